"""How long what has ended is kept. Pure: its SQL is in `retention_sql`, its pace in `jobs`.

Three ages follow one another. A request's record goes when its `keep_until` has passed and none of its entries is unsettled;
while entries of it remain, a tombstone replaces it, so that its key is refused when it is used again; likewise for one that was
abandoned under a lease, as its handler's effects are unknown. An entry goes, with its settlement and its events, `keep` after
it was settled and once it has no record. A tombstone goes last.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from dispatchers.delivery import FOREVER, Window
from dispatchers.time_limits import CENTURY
from outbox.errors import ConfigurationError

KEEP = timedelta(days=35)
"""The default: longer than records are kept (`outbox.configuration.AUDIT_WINDOW`, 30 days), and than the windows of 30 days
that several services publish (Stripe API v2: docs.stripe.com/api-v2-overview)."""

MARGIN = timedelta(days=1)
"""What `keep` must have over the longest window: a send's time, and 1 % for clocks that run apart, up to 100 days."""

BEHIND = timedelta(days=7)
"""How far maintenance may lag: a key is refused for this much longer than its entries are kept, so that it never meets one."""

REMEMBERED = timedelta(days=365)
"""How long a key is refused whose children went to a service that never forgets. There is no end to its window, and there must
be one to the tombstones: clients' keys are random, and one that comes back after a year is taken for a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """keep: how long an entry is kept, from its settling. refuse: how long its request's key is refused, from there too."""

    keep: timedelta
    refuse: timedelta

    @classmethod
    def of(cls, keep: timedelta, windows: Iterable[Window]) -> "Retention":
        """The retention under which every service has forgotten a key before we do.

        windows: those of ALL adapters that send from this database, also in other processes.
        Raises `ConfigurationError` if `keep` is shorter than the longest of them and `MARGIN`.
        """
        windows = list(windows)
        if not isinstance(keep, timedelta):
            raise ConfigurationError(f"keep must be a timedelta, not {keep!r}")
        longest = max((window for window in windows if isinstance(window, timedelta)), default=timedelta(0))
        if not longest + MARGIN <= keep <= CENTURY:
            raise ConfigurationError(
                f"keep={keep} must be from {longest + MARGIN} (the longest window of the adapters, {longest}, and a margin of"
                f" {MARGIN}) to {CENTURY.days} days: an entry that is deleted earlier could be requested again under a key that"
                " the service still remembers; give a longer keep"
            )
        refuse = keep + BEHIND
        return cls(keep=keep, refuse=max(refuse, REMEMBERED) if FOREVER in windows else refuse)


class Children(NamedTuple):
    """What a record's entries say: how many have not ended, and when the last of the others did (None: there are none)."""

    unsettled: int = 0
    last_settled_at: datetime | None = None

    def forget_at(self, retention: Retention) -> datetime | None:
        """Until when a key whose record goes is refused; None if nothing was done under it that anyone could remember."""
        return None if self.last_settled_at is None else self.last_settled_at + retention.refuse

    def __add__(self, other: object) -> "Children":
        """Both together: a record's entries under its own key, and those under other parents."""
        if not isinstance(other, Children):
            return NotImplemented
        instants = [at for at in (self.last_settled_at, other.last_settled_at) if at is not None]
        return Children(self.unsettled + other.unsettled, max(instants, default=None))
