"""How many entries of a destination a dispatcher asks for."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple


class Quota(NamedTuple):
    """At most `permits` entries of one destination.

    due_from: entries that are due earlier were seen already.
    admitted: whether the flow state was checked while the destination's row was locked; otherwise the claim checks it.
    reserved: how many permits are also taken from the total of all destinations. A claim brings at most the sum over its quotas.
    called_back: how many permits are also taken from the total of the destinations with callbacks; None if it has no callbacks.
    recent: all entries that became due longer ago than this were seen already; None if they were not.
    known: only entries whose end is stored. Nothing is sent, so no pause, no limit and no backlog of the destination matters.
    """

    destination: str
    permits: int
    due_from: datetime
    reserved: int = 0
    admitted: bool = False
    called_back: int | None = None
    recent: timedelta | None = None
    known: bool = False


def max_entries(quotas: Iterable[Quota]) -> int:
    """The maximal number of entries of a claim with these quotas."""
    return sum(quota.reserved for quota in quotas)


def max_callbacks(quotas: Iterable[Quota]) -> int:
    """The maximal number of entries that may need a callback of a claim with these quotas."""
    return sum(quota.called_back or 0 for quota in quotas)
