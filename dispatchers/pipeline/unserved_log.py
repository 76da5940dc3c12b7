"""What the log says of entries that this process cannot send: once a minute for each operation, however many there are."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from dispatchers.transitions import ClaimedEntry

log = logging.getLogger("outbox.dispatcher")

REPORT_SECONDS = 60.0
OPERATIONS_MAX = 1000  # names come from rows: what is remembered must not grow without end
ENTRIES_MAX = 10_000


@dataclass(slots=True)
class Report:
    """reported_at: by our clock. unreported: the entries that were left since then, as far as they are counted."""

    reported_at: float = -math.inf
    unreported: set[UUID] = field(default_factory=set)


class UnservedLog:
    """When each operation was told of last, by `clock` in seconds, and how many entries have been left untold since."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, Report] = {}

    def leave(self, entry: ClaimedEntry, reason: str) -> None:
        """It waits, for `reason`: told now, or counted and told with the next one."""
        if len(self._reports) >= OPERATIONS_MAX and entry.operation not in self._reports:
            self._reports.clear()
        report = self._reports.setdefault(entry.operation, Report())
        now = self._clock()
        if now - report.reported_at < REPORT_SECONDS:
            if len(report.unreported) < ENTRIES_MAX:
                report.unreported.add(entry.id)
            return
        others = len(report.unreported - {entry.id})
        told = f"; and {others} more of this operation" if others else ""
        log.warning("entry %s (%s) waits: %s%s", entry.id, entry.operation, reason, told)
        report.reported_at = now
        report.unreported.clear()
