"""The request of a dispatcher to its store for entries."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from uuid import UUID

from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import FlowUpdate
from outbox.sql.schema.tables import SCHEMA_VERSION
from outbox.times import NEVER


class Forms(dict[str, str]):
    """The form to store at an operation's first send, by dotted prefix. What a statement needs of it is made once: each claim
    has the same one, and a process may have thousands of adapters.
    """

    @cached_property
    def words(self) -> tuple[int, ...]:
        """How many words the prefixes have, the most first."""
        return tuple(sorted({prefix.count(".") + 1 for prefix in self}, reverse=True))

    @cached_property
    def json(self) -> str:
        return json.dumps(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a dispatcher wants to claim: `max_entries` entries at most, beginning with the first quota.

    max_callbacks: how many of them at most may be of destinations with callbacks, which `Quota.called_back` marks.

    token: random, new for each claim. cutoff: entries that are due later are not claimed.
    completions: whether to read which completion answers an entry's request; otherwise `record_id` and `completion` may be None.
    callbacks: the names of this process's callbacks. An entry that waits for another callback is not claimed.
    seen: the number of the last database identity that this process has seen. If the stored number is lower, nothing is
        claimed, because the database was set back.
    flow_update: what to store and to decide for the destinations while their rows are locked; None for nothing.
    unserved: operations that this process does not serve. Their entries are not claimed, nor are entries that only a newer
        release can read; except those that an operator has cancelled. None until the process meets such an entry.
    readable: the highest version of entries that this process can read: without data keys it cannot read encrypted ones.
    only: the ids of the entries that may be claimed; None for any.
    """

    quotas: Sequence[Quota]
    max_entries: int
    token: UUID
    lease: timedelta
    forms: Forms
    max_callbacks: int = 0
    cutoff: datetime = NEVER
    completions: bool = False
    callbacks: Collection[str] = ()
    seen: int = 0
    flow_update: FlowUpdate | None = None
    unserved: Sequence[str] | None = None
    readable: int = SCHEMA_VERSION
    only: frozenset[UUID] | None = None
