"""Logs entries that this process cannot send, at most once a minute for each operation."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from dispatchers.transitions import ClaimedEntry

log = logging.getLogger("outbox.dispatcher")

REPORT_SECONDS = 60.0
OPERATIONS_MAX = 1000  # names come from rows: the memory for them must be bounded
ENTRIES_MAX = 10_000


@dataclass(slots=True)
class Report:
    """reported_at: by our clock. unreported: the entries skipped since then, up to ENTRIES_MAX."""

    reported_at: float = -math.inf
    unreported: set[UUID] = field(default_factory=set)


class UnservedLog:
    """Per operation: when it was last logged, by `clock` in seconds, and which entries were skipped since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, Report] = {}

    def leave(self, entry: ClaimedEntry, reason: str) -> None:
        """Log that the entry waits for `reason`, or count it for the next line of its operation."""
        if len(self._reports) >= OPERATIONS_MAX and entry.operation not in self._reports:
            self._reports.clear()
        report = self._reports.setdefault(entry.operation, Report())
        now = self._clock()
        if now - report.reported_at < REPORT_SECONDS:
            if len(report.unreported) < ENTRIES_MAX:
                report.unreported.add(entry.id)
            return
        others = len(report.unreported - {entry.id})
        addition = f"; {others} more entries of this operation wait too" if others else ""
        log.warning("entry %s (%s) waits: %s%s", entry.id, entry.operation, reason, addition)
        report.reported_at = now
        report.unreported.clear()
