"""The values that the store returns and receives: claimed entries, and the transitions that end their leases."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

from dispatchers.stored_outcome import LookupState, StoredOutcome

Lease: TypeAlias = tuple[UUID, UUID]  # the entry and its lease's token


class ClaimedEntry(NamedTuple):
    """An entry under this process's lease. All instants are the database's.

    deliveries: claims so far, this one included. attempts: sends that may have left, this one not included.
    in_doubt_since: when the first attempt under this key began whose result is unknown.
    sent_as: the key's form and what else the first possible send was pinned to.
    due_at, created_at: as it was enqueued. first_leased_at: since when it has been tried. queued_at: its place in the queue.
    leased_at: when this lease began.
    record_id: the request that it belongs to. completion: the callback that answers that request, if it was accepted and is open.
    ordering_key, position: its place in its ordering group, if it has one.
    ended: the state of its settlement, if it has one although it is in the queue; then it is not handed out.
    outcome: what the queue kept of it before this claim. options, headers: as they were enqueued.

    The store has parsed `outcome`, `options` and `headers`. The repr shows none of them, nor the payload.
    """

    id: UUID
    destination: str
    env: str
    operation: str
    payload: bytes
    tag: bytes
    kid: str
    schema_version: int
    due_at: datetime
    created_at: datetime
    first_leased_at: datetime
    queued_at: datetime
    deliveries: int
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    key_epoch: int
    sent_as: str | None
    leased_at: datetime
    record_id: UUID | None
    completion: str | None
    ordering_key: str | None
    position: int | None
    ended: str | None
    outcome: StoredOutcome
    options: Mapping[str, Any]
    headers: Mapping[str, Any]
    lease_token: UUID

    @property
    def is_known(self) -> bool:
        """Whether its end was stored before the claim: then nothing is sent under this lease."""
        return self.outcome.known is not None

    @property
    def lease(self) -> Lease:
        """The identity of this claim: the same entry may be claimed again before the process has finished with this claim."""
        return self.id, self.lease_token

    def __repr__(self) -> str:
        return f"ClaimedEntry(id={self.id!r}, operation={self.operation!r}, deliveries={self.deliveries})"


class Send(NamedTuple):
    """Send the entry now. before: the time from which it must not be sent; None for no limit."""

    before: datetime | None = None


class Lookup(NamedTuple):
    """Ask the service for the status of the entry now. state: what is stored of its lookups."""

    state: LookupState


class Settle(NamedTuple):
    """The end: `delivered` means that it happened, `failed` and `cancelled` that it did not and will not.

    looked_up: a status lookup has shown it, not an attempt. decided: an operator has decided it, which its history shows already.
    failure_blocks_group: of a failed one: whether it blocks its ordering group.
    """

    state: Literal["delivered", "failed", "cancelled"]
    attempts: int
    result: Any = None
    reason: str | None = None
    looked_up: bool = False
    failure_blocks_group: bool = True
    decided: bool = False

    @property
    def note(self) -> Literal["attempt", "lookup"] | None:
        """The kind of the event that the entry's history gets; None for no event."""
        if self.looked_up:
            return "lookup"
        return "attempt" if self.state == "failed" and not self.decided else None


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the entry again after `delay`, with the same key."""

    delay: timedelta
    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None


@dataclass(frozen=True, slots=True)
class MarkUncertain:
    """`uncertain`: never sent again without a status lookup or an operator's decision.

    stored: the service has an answer on record under this key, and would only repeat it.
    lookup: the status lookups so far were inconclusive, and the next one is after `delay`; None for never.
    failure_blocks_group: whether it blocks its ordering group.
    """

    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    stored: bool = False
    lookup: LookupState | None = None
    delay: timedelta | None = None
    failure_blocks_group: bool = True


@dataclass(frozen=True, slots=True)
class AwaitLookup:
    """Nothing is sent before a status lookup, after `delay`, None for never: `retry` before the first one, then `uncertain`.

    looked_up: a status lookup led to this, not an attempt.
    """

    lookup: LookupState
    delay: timedelta | None
    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    looked_up: bool = False


@dataclass(frozen=True, slots=True)
class SendAgain:
    """The entry must be sent again: `pending`, after `delay`.

    key_epoch: unchanged while the service surely remembers the key, else the next one, and then doubt begins again too.
    absent: a status lookup has proved that it did not happen; attempts and age count on. Else an operator asked for it, and both
    start from zero.
    """

    key_epoch: int
    in_doubt_since: datetime | None
    delay: timedelta
    reason: str
    attempts: int = 0
    maybe_sent: bool = True
    absent: bool = False


@dataclass(frozen=True, slots=True)
class RetryCallback:
    """The outcome is known, but the callback has not committed: store the outcome, and call the callback after `delay`.

    failed: whether the callback failed, which the entry's history reports. Else it did not run, and nothing is counted.
    callback: the name of the callback that this process does not have; a process that has it makes the entry due.
    """

    end: "Settle | MarkUncertain"
    delay: timedelta
    reason: str
    failed: bool = True
    callback: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Released without an attempt, as if never claimed; due again after `delay`, None for not by itself.

    shown: whether the reason is shown with the entry while it waits. served: whether this process serves its operation; else its
    reason replaces no other. unread: this process serves its operation, but cannot read its payload.
    """

    reason: str
    delay: timedelta | None = timedelta(0)
    shown: bool = False
    served: bool = False
    unread: bool = False


End: TypeAlias = Settle | MarkUncertain
"""The transitions for which a callback may be registered."""

Transition: TypeAlias = Settle | Retry | MarkUncertain | AwaitLookup | SendAgain | RetryCallback | Release

Plan: TypeAlias = Send | Lookup | Transition
"""What a process does with an entry that it has claimed."""

Ending: TypeAlias = tuple[ClaimedEntry, Transition]
"""A claimed entry, and the transition that ends its lease."""


DUE_FROM_SLACK = timedelta(milliseconds=250)
"""A claim reads this much before the due-time cursor: entries of transactions that took as long to commit."""
