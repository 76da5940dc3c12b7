"""How long settled entries and answered requests are kept. Pure: the SQL is in `retention_sql`, the schedule in `jobs`.

Rows are deleted in three steps. First a request's record: when its `keep_until` has passed and all its entries are settled. If it
has entries, a tombstone replaces it, which refuses its key. So does the tombstone of a request whose lease expired, because its
handler may have had effects. Next an entry with its settlement and events: `retention` after its settling, if it has no record
any more. Last the tombstone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from dispatchers.time_limits import CENTURY, FOREVER, Window
from outbox.errors import ConfigurationError

MARGIN = timedelta(days=1)
"""`retention` must exceed the longest window by this: the time of a send, and 1 % of up to 100 days for different clocks."""

BEHIND = timedelta(days=7)
"""How late maintenance may be: a key is refused for this much longer than its entries are kept, so that it never meets one."""

REMEMBERED = timedelta(days=365)
"""How long a key is refused if its entries went to a service that never forgets keys. Such a window has no end, but tombstones
must not be kept without end. Clients' keys are random, so a key that returns after a year counts as new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Both count from an entry's settling. entries: how long it is kept. refuse: how long the key of its request is refused."""

    entries: timedelta
    refuse: timedelta

    @classmethod
    def of(cls, retention: timedelta, windows: Iterable[Window]) -> "Retention":
        """The retention with which every service forgets a key before its entry is deleted.

        windows: those of ALL adapters that send from this database, also in other processes.
        Raises `ConfigurationError` if `retention` is shorter than the longest of them and `MARGIN`.
        """
        windows = list(windows)
        if not isinstance(retention, timedelta):
            raise ConfigurationError(f"retention must be a timedelta, not {retention!r}")
        longest = max((window for window in windows if isinstance(window, timedelta)), default=timedelta(0))
        if not longest + MARGIN <= retention <= CENTURY:
            raise ConfigurationError(
                f"retention={retention} must be from {longest + MARGIN} (the longest window of the adapters, {longest}, and a"
                f" margin of {MARGIN}) to {CENTURY.days} days: an entry that is deleted earlier could be requested again under a"
                " key that the service still remembers; give a longer retention"
            )
        refuse = retention + BEHIND
        return cls(entries=retention, refuse=max(refuse, REMEMBERED) if FOREVER in windows else refuse)


class Children(NamedTuple):
    """The entries of a record: how many are unsettled, and when the last one was settled (None: no entry is settled)."""

    unsettled: int = 0
    last_settled_at: datetime | None = None

    def forget_at(self, retention: Retention) -> datetime | None:
        """Until when the key of a deleted record is refused; None if no service can remember anything under it."""
        return None if self.last_settled_at is None else self.last_settled_at + retention.refuse

    def __add__(self, other: object) -> "Children":
        """Combine a record's entries under its own key with its entries under other parents."""
        if not isinstance(other, Children):
            return NotImplemented
        instants = [at for at in (self.last_settled_at, other.last_settled_at) if at is not None]
        return Children(self.unsettled + other.unsettled, max(instants, default=None))
