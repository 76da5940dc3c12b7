"""Replaces the driver's error if a statement of the outbox finds no table or function, by one that shows what to do.

One listener for all engines of the process translates these errors. Errors of the app's own statements are not changed.
"""

from collections.abc import Collection

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext

from outbox.errors import SchemaError
from outbox.sql.connections.places import place_of
from outbox.sql.dialect import dialect_if_supported

_names: set[str] = set()


def translate_for(names: Collection[str]) -> None:
    """Translate errors of statements for which one of these tables or functions is missing."""
    _names.update(names)


@event.listens_for(Engine, "handle_error", retval=True)
def _translate(context: ExceptionContext) -> SchemaError | None:
    error = context.original_exception
    dialect = dialect_if_supported(context)
    kind, words = ("", []) if dialect is None else dialect.missing_name(error, context.statement or "")
    missing = next((word for word in words if word in _names), None)
    if missing is None:
        return None
    return SchemaError(
        f"the outbox's {kind} {missing!r} does not exist in the database {place_of(context.engine)}, as this connection sees"
        " it: run `outbox db upgrade`; or the app's own Alembic, if that makes the outbox's tables; or set `schema` and"
        " `prefix` to where they are"
    )
