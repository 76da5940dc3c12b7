"""The instants of APScheduler's CronTrigger in a time zone whose offset changes.

APScheduler's own search adds hours to local times, so that what it finds depends on the instant from which it searches. Asked in
March, `0 0 1 * *` in Berlin is due on 1 May, and not on 1 April; `0,30 2 * * *` loses one of its times on the day on which both
are missing. Here APScheduler searches at a fixed offset only, and this module moves from one offset to the next.
"""

import copy
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from dispatchers.periodic.instants import SECOND

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

DAY = timedelta(days=1)
STEP = timedelta(days=7)  # no zone changes its offset twice in a week


class LocalTimes:
    """A CronTrigger is due at each of its local times. One that does not exist is later by the missing time, and one that occurs
    twice is due twice.
    """

    def __init__(self, trigger: "CronTrigger") -> None:
        self._trigger: Any = trigger
        self._fixed: dict[timedelta, Any] = {}

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime, /) -> datetime | None:
        low = now.astimezone(UTC)
        while True:
            found = min(filter(None, (self._search(self._offset(low), low), self._search_missing(low))), default=None)
            changes_at = None if found is None else self._change(low, found)
            if changes_at is None:
                return found
            low = changes_at

    def _search(self, offset: timedelta, low: datetime) -> datetime | None:
        """The first instant from `low` on, as if the offset never changed."""
        if (fixed := self._fixed.get(offset)) is None:
            fixed = self._fixed[offset] = copy.copy(self._trigger)
            fixed.timezone = timezone(offset)
        found: datetime | None = fixed.get_next_fire_time(None, low)
        return None if found is None else found.astimezone(UTC)

    def _search_missing(self, low: datetime) -> datetime | None:
        """The first instant from `low` on whose local time does not exist, if the clocks were set forward in the day before."""
        before, offset = self._offset(low - DAY), self._offset(low)
        if before >= offset or (changed_at := self._change(low - DAY, low)) is None:
            return None
        found = self._search(before, low)
        return found if found is not None and found < changed_at + (offset - before) else None

    def _change(self, low: datetime, high: datetime) -> datetime | None:
        """The first instant after `low`, and up to `high`, at which the offset is another one than at `low`."""
        offset = self._offset(low)
        while low < high:
            step = high if high - low <= STEP else low + STEP
            if self._offset(step) != offset:
                while step - low > SECOND:
                    middle = low + (step - low) // (2 * SECOND) * SECOND
                    low, step = (middle, step) if self._offset(middle) == offset else (low, middle)
                return step
            low = step
        return None

    def _offset(self, at: datetime) -> timedelta:
        return at.astimezone(self._trigger.timezone).utcoffset() or timedelta(0)
