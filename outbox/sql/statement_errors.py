"""Errors of our own statements, without the values that were sent: payloads, answers, tags and keys stay out of every log.

SQLAlchemy shows a statement's parameters in its errors unless the engine was made with `hide_parameters=True`; PostgreSQL quotes
rows ("Failing row contains (...)") and single values. One listener on every engine of the process removes both from the errors of
statements that name one of our tables or functions, in sessions, dispatchers and the command line alike. Other statements' errors
stay as they are, and so does what only came while a statement ran: a cancellation, a time limit's signal, an error of asyncio.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from sqlalchemy import Dialect, Engine, event
from sqlalchemy.engine import ExceptionContext

HIDDEN = "(its text is hidden: it may quote what was sent)"
QUOTING_NONE = (
    *("08", "0A", "23", "25", "26", "28", "2B", "34", "3B", "3D", "3F", "40", "42"),
    *("53", "54", "55", "57", "58", "72", "F0", "P0002", "P0003", "XX"),
)
"""The SQLSTATEs, or their classes, whose first line names tables, constraints and settings only. Not among them: data exceptions
(22), which quote the value, and RAISE without an ERRCODE (P0001), whose text is anybody's.
Source: PostgreSQL, appendix A; its error messages in src/backend."""

_CONVERSIONS = (ValueError, TypeError, ArithmeticError, LookupError)
"""What a driver or a type raises for a value that it cannot convert, and quotes."""

_ours: dict[tuple[str | None, str], re.Pattern[str]] = {}


def hide_values_of(schema: str | None, prefix: str, tables: Collection[str], functions: Collection[str]) -> None:
    """Have the errors of statements hidden that name one of these tables or functions. tables, functions: with the prefix."""
    if (schema, prefix) not in _ours:
        _ours[schema, prefix] = _naming(schema, prefix, tables, functions)


def _naming(schema: str | None, prefix: str, tables: Collection[str], functions: Collection[str]) -> re.Pattern[str]:
    """What finds the names as identifiers, each as a whole; the app's own tables may begin alike, or are in another schema."""
    table, function = (f"(?:{'|'.join(map(_identifier, names))})" for names in (tables, functions))
    if schema is not None:
        return re.compile(rf"{_identifier(schema)}\.(?:{table}|{function})")
    if prefix:
        return re.compile(rf"(?<!\.)(?:{table}|{function})")
    # Plain words that are column names too: only in the place of a table or a function.
    return re.compile(rf"(?i:{_BEFORE_TABLES})\s+{table}(?!\.)|(?<!\.){table}\.|(?<!\.){function}\(")


_BEFORE_TABLES = r"\b(?:FROM|JOIN|INTO|UPDATE|USING|ONLY|TABLE|COPY|EXISTS|ON)"


def _identifier(name: str) -> str:
    quoted = name.replace('"', '""')
    return rf'(?:"{re.escape(quoted)}(?:_\d{{8}})?"|(?<![\w"]){re.escape(name)}(?:_\d{{8}})?(?![\w"]))'


@event.listens_for(Engine, "handle_error")
def _hide_values(context: ExceptionContext) -> None:
    statement = context.statement or getattr(context.execution_context, "statement", None)
    if statement is None or not is_ours(statement):
        return
    error: Any = context.original_exception
    wrapped: Any = context.sqlalchemy_exception
    if wrapped is not None:
        wrapped.hide_parameters, wrapped.params = True, None
    if not may_quote(error, context.dialect):
        return
    text = hide_values(error, is_sqlite=context.dialect.name == "sqlite")
    if wrapped is not None:
        wrapped.args = (f"({type(error).__module__}.{type(error).__name__}) {text}",)
        is_psycopg = context.dialect.driver in ("psycopg", "psycopg_async")
        if is_psycopg and isinstance(error, context.dialect.loaded_dbapi.Error):
            wrapped.orig = _without_diagnostics(error, text)


def is_ours(statement: str) -> bool:
    """Whether it names a table or function of an outbox of this process."""
    return any(pattern.search(statement) for pattern in tuple(_ours.values()))


def may_quote(error: BaseException, dialect: Dialect) -> bool:
    """Whether it is about a statement's values: an error of the database, or of a value's conversion."""
    return isinstance(error, (dialect.loaded_dbapi.Error, *_CONVERSIONS))


def hide_values(error: BaseException, *, is_sqlite: bool = False) -> str:
    """Remove from a driver's error, and from those it was made of, what may quote values. Returns the text that is left."""
    shown = _text(error) if is_sqlite else _safe_text(error)
    for each in _with_causes(error):
        if isinstance(each, UnicodeDecodeError):
            each.object = b""
        elif isinstance(each, UnicodeEncodeError | UnicodeTranslateError):
            each.object = ""
        elif not is_sqlite:
            each.args = (shown,)
        for name in ("message", "detail", "hint", "context", "internal_query"):  # asyncpg's names for them
            if getattr(each, name, None) is not None:
                setattr(each, name, None)
    return shown


def _with_causes(error: BaseException) -> Iterator[Any]:
    """It, and what may quote values of the errors that the driver made it of. Not its context: that may be the app's own."""
    yield error
    is_of_a_value = isinstance(error, _CONVERSIONS)
    cause = error.__cause__
    for _ in range(8):
        if not isinstance(cause, Exception):  # a cancellation, if it is any
            return
        is_of_a_value = is_of_a_value or isinstance(cause, _CONVERSIONS)
        if is_of_a_value or hasattr(cause, "sqlstate"):
            yield cause
        cause = cause.__cause__


def _safe_text(error: BaseException) -> str:
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is None:
        # Without an answer of the server: a lost connection, or a value that the driver could not convert.
        kinds = {each.__name__ for each in type(error).__mro__}
        is_of_a_value = isinstance(error, _CONVERSIONS) or isinstance(error.__cause__, _CONVERSIONS)
        return _text(error) if kinds & {"OperationalError", "InterfaceError"} and not is_of_a_value else HIDDEN
    return _text(error).partition("\n")[0] if code.startswith(QUOTING_NONE) else HIDDEN


def _text(error: BaseException) -> str:
    return str(error.args[0]) if error.args else ""


def _without_diagnostics(error: Any, text: str) -> Any:
    """The psycopg error without the server's answer, which has the details and is pickled with it."""
    copy = type(error)(text)
    if copy.sqlstate != error.sqlstate:
        copy.sqlstate = error.sqlstate
    return copy
