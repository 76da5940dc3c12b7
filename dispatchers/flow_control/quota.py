"""How many entries of a destination a dispatcher asks for."""

from datetime import datetime, timedelta
from typing import NamedTuple


class Quota(NamedTuple):
    """At most `permits` entries of one destination. due_from: entries due earlier were seen already. admitted: whether its flow
    state was checked under its row's lock; else the claim checks it.
    reserved: how many of the permits are also taken from those for all destinations together; a claim brings no more than
    those of all its quotas.
    called_back: whether its permits are counted by the pace of the callbacks, too.
    recent: what became due longer ago than that was seen already, all of it; None if it was not.
    """

    destination: str
    permits: int
    due_from: datetime
    reserved: int = 0
    admitted: bool = False
    called_back: bool = False
    recent: timedelta | None = None
