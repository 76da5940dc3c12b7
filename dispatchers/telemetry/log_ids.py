"""The ids that lines of the log carry as fields: the database of a fleet, the entry that is sent, looked up or settled, and the
current span."""

import logging
import sys
from contextvars import ContextVar
from typing import Any, Final

from dispatchers.transitions import ClaimedEntry

FIELDS: Final = ("database", "entry_id", "operation", "destination", "request_id", "trace_id", "span_id")

_entry: ContextVar[ClaimedEntry | None] = ContextVar("entry", default=None)
_database: ContextVar[str | None] = ContextVar("database", default=None)


def work_on_database(name: str) -> None:
    """Set the database of a fleet that is named in the lines of this task and of the tasks that it starts."""
    _database.set(name)


def work_on(entry: ClaimedEntry | None) -> None:
    """Set the entry that is named in the lines of this task and of the threads that it starts; None for no entry."""
    _entry.set(entry)


def of_entry(entry: ClaimedEntry) -> dict[str, str]:
    """The `extra` of one line about this entry."""
    return {"entry_id": str(entry.id), "operation": entry.operation, "destination": entry.destination}


class LogIds(logging.Filter):
    """Gives each record the ids that are known where it is logged, as attributes named in `FIELDS`. It drops no record.

    `outbox run --json` uses it. Add it to a handler of your own: `handler.addFilter(LogIds())`. It never adds a parent key, a
    payload or a child key.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        entry, database = _entry.get(), _database.get()
        of_database = {"database": database} if database else {}
        for name, value in {**of_database, **(of_entry(entry) if entry else {}), **_span()}.items():
            if name not in record.__dict__:
                setattr(record, name, value)
        return True


def ids_of(record: logging.LogRecord) -> dict[str, str]:
    """The ids that a record has."""
    return {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}


def _span() -> dict[str, str]:
    """The ids of OpenTelemetry's current span; none in a process that has not loaded OpenTelemetry."""
    opentelemetry: Any = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return {}
    span = opentelemetry.get_current_span().get_span_context()
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"} if span.is_valid else {}
