"""What a dispatcher asks its store for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import FlowUpdate
from outbox.times import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a dispatcher claims: at most `entries_max` in all, the first destinations first.

    token: random, new for each claim. cutoff: only what was due by then.
    forms: what an operation's first send is pinned to, by dotted prefix.
    completions: whether to ask who answers the entries' requests; else `record_id` and `completion` may stay None.
    callbacks: the names of those that this process has; an entry that waits for another one is passed over.
    seen: the number of the last database identity that this process has seen; nothing is claimed where the stored number is
        lower.
    flow_update: what to store for the destinations, and to decide under their rows' lock; None for nothing.
    unserved: operations that this process does not serve. Their entries are passed over, as are those that only a newer release
        can read, unless an operator has cancelled them. None while none of either was met.
    only: the entries that may be claimed; None for any.
    """

    quotas: Sequence[Quota]
    entries_max: int
    token: UUID
    lease: timedelta
    forms: Mapping[str, str]
    cutoff: datetime = NEVER
    completions: bool = False
    callbacks: Collection[str] = ()
    seen: int = 0
    flow_update: FlowUpdate | None = None
    unserved: Sequence[str] | None = None
    only: frozenset[UUID] | None = None
