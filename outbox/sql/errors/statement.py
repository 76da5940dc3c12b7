"""Removes values from the errors of the outbox's statements, so that no log shows payloads, answers, tags or keys.

SQLAlchemy shows a statement's parameters in its errors, unless the engine has `hide_parameters=True`. PostgreSQL quotes rows
("Failing row contains (...)") and single values. One listener for all engines of the process removes both from the errors of
statements with one of the outbox's tables or functions; in sessions, in dispatchers and on the command line. Errors of other
statements are not changed, nor are errors that only occurred during a statement: a cancellation, a signal, an error of asyncio.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from sqlalchemy import Dialect, Engine, event
from sqlalchemy.engine import ExceptionContext

from outbox.sql.dialect import dialect_if_supported
from outbox.sql.mariadb.errors import NAMING_NO_VALUES, is_of_server, number_of

HIDDEN = "(its text is hidden: it may quote what was sent)"
QUOTING_NONE = (
    *("08", "0A", "23", "25", "26", "28", "2B", "34", "3B", "3D", "3F", "40", "42"),
    *("53", "54", "55", "57", "58", "72", "F0", "P0002", "P0003", "XX"),
)
"""The SQLSTATEs, or their classes, whose first line names only tables, constraints and settings. Two are missing: data exceptions
(22), which quote the value, and RAISE without an ERRCODE (P0001), which may have any text.
Source: PostgreSQL, appendix A; its error messages in src/backend."""

_CONVERSIONS = (ValueError, TypeError, ArithmeticError, LookupError)
"""The exceptions of a driver or a type for a value that it cannot convert; they quote the value."""

_ours: dict[tuple[str | None, str], re.Pattern[str]] = {}


def hide_values_of(schema: str | None, prefix: str, tables: Collection[str], functions: Collection[str]) -> None:
    """Hide the values in errors of statements with one of these tables or functions, whose names include the prefix."""
    if (schema, prefix) not in _ours:
        _ours[schema, prefix] = _naming(schema, prefix, tables, functions)


def _naming(schema: str | None, prefix: str, tables: Collection[str], functions: Collection[str]) -> re.Pattern[str]:
    """A pattern for the names as whole identifiers: the app's tables may begin with them, or may be in another schema."""
    table, function = (f"(?:{'|'.join(map(_identifier, names))})" for names in (tables, functions))
    if schema is not None:
        return re.compile(rf"{_identifier(schema)}\.(?:{table}|{function})")
    if prefix:
        return re.compile(rf"(?<!\.)(?:{table}|{function})")
    # Plain words may be column names, so they count only where a table or a function is expected.
    return re.compile(rf"(?i:{_BEFORE_TABLES})\s+{table}(?!\.)|(?<!\.){table}\.|(?<!\.){function}\(")


_BEFORE_TABLES = r"\b(?:FROM|JOIN|INTO|UPDATE|USING|ONLY|TABLE|COPY|EXISTS|ON)"


def _identifier(name: str) -> str:
    quoted = name.replace('"', '""')
    on_mariadb = re.escape(name.replace("`", "``"))
    return rf'(?:"{re.escape(quoted)}(?:_\d{{8}})?"|`{on_mariadb}`|(?<![\w"]){re.escape(name)}(?:_\d{{8}})?(?![\w"]))'


@event.listens_for(Engine, "handle_error")
def _hide_values(context: ExceptionContext) -> None:
    statement = context.statement or getattr(context.execution_context, "statement", None)
    if statement is None or not is_ours(statement):
        return
    error: Any = context.original_exception
    wrapped: Any = context.sqlalchemy_exception
    if wrapped is not None:
        wrapped.hide_parameters, wrapped.params = True, None
    dialect = dialect_if_supported(context)
    if not may_quote(error, context.dialect):
        return
    text = hide_values(error, quotes_values=dialect is None or dialect.errors_quote_values)
    if wrapped is not None:
        wrapped.args = (f"({type(error).__module__}.{type(error).__name__}) {text}",)
        is_psycopg = context.dialect.driver in ("psycopg", "psycopg_async")
        if is_psycopg and isinstance(error, context.dialect.loaded_dbapi.Error):
            wrapped.orig = _without_diagnostics(error, text)


def is_ours(statement: str) -> bool:
    """Whether the statement has a table or function of an outbox of this process."""
    return any(pattern.search(statement) for pattern in tuple(_ours.values()))


def may_quote(error: BaseException, dialect: Dialect) -> bool:
    """Whether the error may quote values: it is from the database, or from the conversion of a value."""
    return isinstance(error, (dialect.loaded_dbapi.Error, *_CONVERSIONS))


def hide_values(error: BaseException, *, quotes_values: bool = True) -> str:
    """Remove everything that may quote values from a driver's error and its causes. Returns the remaining text."""
    shown = _safe_text(error) if quotes_values else _text(error)
    for each in _with_causes(error):
        if isinstance(each, UnicodeDecodeError):
            each.object = b""
        elif isinstance(each, UnicodeEncodeError | UnicodeTranslateError):
            each.object = ""
        elif quotes_values:
            each.args = (each.args[0], shown) if is_of_server(each) else (shown,)
        for name in ("message", "detail", "hint", "context", "internal_query"):  # of asyncpg
            if getattr(each, name, None) is not None:
                setattr(each, name, None)
    return shown


def _with_causes(error: BaseException) -> Iterator[Any]:
    """The error and those of its causes that may quote values. Not its context, which may be an error of the app."""
    yield error
    is_of_a_value = isinstance(error, _CONVERSIONS)
    cause = error.__cause__
    for _ in range(8):
        if not isinstance(cause, Exception):  # for example a cancellation
            return
        is_of_a_value = is_of_a_value or isinstance(cause, _CONVERSIONS)
        if is_of_a_value or hasattr(cause, "sqlstate"):
            yield cause
        cause = cause.__cause__


def _safe_text(error: BaseException) -> str:
    if is_of_server(error):
        return _text(error) if number_of(error) in NAMING_NO_VALUES else HIDDEN
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is None:
        # The server did not answer: the connection was lost, or the driver could not convert a value.
        kinds = {each.__name__ for each in type(error).__mro__}
        is_of_a_value = isinstance(error, _CONVERSIONS) or isinstance(error.__cause__, _CONVERSIONS)
        return _text(error) if kinds & {"OperationalError", "InterfaceError"} and not is_of_a_value else HIDDEN
    return _text(error).partition("\n")[0] if code.startswith(QUOTING_NONE) else HIDDEN


def _text(error: BaseException) -> str:
    if is_of_server(error):
        return str(error.args[-1])
    return str(error.args[0]) if error.args else ""


def _without_diagnostics(error: Any, text: str) -> Any:
    """A copy of the psycopg error without the server's answer, which has the details and would be pickled with the error."""
    copy = type(error)(text)
    if copy.sqlstate != error.sqlstate:
        copy.sqlstate = error.sqlstate
    return copy
