"""Replaces the driver's error if a statement of the outbox finds no table or function, by one that shows what to do.

One listener for all engines of the process translates these errors. Errors of the app's own statements are not changed.
"""

import re
from collections.abc import Collection

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext

from outbox.errors import SchemaError
from outbox.sql.mariadb_errors import is_of_server, state_of
from outbox.sql.places import place_of

UNDEFINED = {"42P01": "table", "42883": "function"}
"""Source: PostgreSQL, appendix A: undefined_table, undefined_function."""

_UNDEFINED_IN_SQLITE = re.compile(r"no such table: (?:main\.)?(\w+)")
_names: set[str] = set()


def translate_for(names: Collection[str]) -> None:
    """Translate errors of statements for which one of these tables or functions is missing."""
    _names.update(names)


@event.listens_for(Engine, "handle_error", retval=True)
def _translate(context: ExceptionContext) -> SchemaError | None:
    error = context.original_exception
    text = str(error.args[0]).partition("\n")[0] if error.args else ""
    if context.dialect.name == "sqlite":
        found = _UNDEFINED_IN_SQLITE.search(text)
        kind, words = "table", [found[1]] if found else []
    else:
        code = state_of(error) or getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        kind = UNDEFINED.get(code or "", "")
        if kind and is_of_server(error):
            # SQLAlchemy itself asks so whether a table exists, and needs this error
            is_inspection = (context.statement or "").startswith(("DESCRIBE", "SHOW"))
            text = "" if is_inspection else str(error.args[-1])
        words = re.findall(r"\w+", text) if kind else []
    missing = next((word for word in words if word in _names), None)
    if missing is None:
        return None
    return SchemaError(
        f"the outbox's {kind} {missing!r} does not exist in the database {place_of(context.engine)}, as this connection sees"
        " it: run `outbox db upgrade`; or the app's own Alembic, if that makes the outbox's tables; or set `schema` and"
        " `prefix` to where they are"
    )
