"""Logs entries that this process cannot send, at most once a minute for each operation."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from dispatchers.telemetry.log_ids import of_entry
from dispatchers.transitions import ClaimedEntry

log = logging.getLogger("outbox.dispatcher")

REPORT_SECONDS = 60.0
MAX_OPERATIONS = 1000  # the names come from rows, so their number needs a limit
MAX_ENTRIES = 10_000


@dataclass(slots=True)
class Report:
    """reported_at: by the process's clock. unreported: the entries skipped since then, up to `MAX_ENTRIES`."""

    reported_at: float = -math.inf
    unreported: set[UUID] = field(default_factory=set)


class UnservedLog:
    """Stores for each operation when it was last logged, and which entries were skipped since. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, Report] = {}

    def leave(self, entry: ClaimedEntry, reason: str) -> None:
        """Log that the entry waits for `reason`, or count it for the next line of its operation."""
        if len(self._reports) >= MAX_OPERATIONS and entry.operation not in self._reports:
            self._reports.clear()
        report = self._reports.setdefault(entry.operation, Report())
        now = self._clock()
        if now - report.reported_at < REPORT_SECONDS:
            if len(report.unreported) < MAX_ENTRIES:
                report.unreported.add(entry.id)
            return
        others = len(report.unreported - {entry.id})
        addition = f"; {others} more entries of this operation wait too" if others else ""
        log.warning("entry %s (%s) waits: %s%s", entry.id, entry.operation, reason, addition, extra=of_entry(entry))
        report.reported_at = now
        report.unreported.clear()
