"""What the store hands out and takes back: claims, and the transitions that end their leases."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

Lease: TypeAlias = tuple[UUID, UUID]  # the entry and its lease's token


class ClaimedEntry(NamedTuple):
    """An entry under our lease. All instants are the database's.

    deliveries: claims so far, this one included. attempts: sends that may have left, this one not included.
    in_doubt_since: when the first attempt under this key began whose fate is unknown.
    sent_as: the key's form and what else the first possible send was pinned to.
    due_at, created_at: as it was enqueued. first_leased_at: since when it has been tried. queued_at: its place in the queue.
    leased_at: when this lease began.
    outcome: what was written down before this claim, as JSON: see `outcome_on_record`, below.
    record_id: the request that it belongs to. completion: who answers that request, if it was accepted and awaits its end.
    ordering_key, position: its place in its group, if it has one.
    ended: the state of its settlement, if it has one although it is in the queue; it is not handed out then.

    Its repr shows neither payload nor outcome, which may hold a result.
    """

    id: UUID
    destination: str
    env: str
    operation: str
    payload: bytes
    options: str
    headers: str
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
    outcome: str | None
    record_id: UUID | None
    completion: str | None
    ordering_key: str | None
    position: int | None
    ended: str | None
    lease_token: UUID

    @property
    def lease(self) -> Lease:
        """What a process knows this claim by: the same entry may be claimed again before the process is done with this claim."""
        return self.id, self.lease_token

    def __repr__(self) -> str:
        return f"ClaimedEntry(id={self.id!r}, operation={self.operation!r}, deliveries={self.deliveries})"


class Settle(NamedTuple):
    """The end: `delivered` means that it happened, `failed` and `cancelled` that it did not and will not.

    looked: a look has shown it, not an attempt. decided: a person has said so, which its history tells already.
    blocks_group: of a failed one: whether its group blocks behind it.
    """

    state: Literal["delivered", "failed", "cancelled"]
    attempts: int
    result: Any = None
    reason: str | None = None
    looked: bool = False
    failure_blocks_group: bool = True
    decided: bool = False

    @property
    def note(self) -> Literal["attempt", "look"] | None:
        """As what the entry's history tells of it, if it does."""
        if self.looked:
            return "look"
        return "attempt" if self.state == "failed" and not self.decided else None


class LookupState(NamedTuple):
    """How an entry is being looked for: on record while nothing may be sent.

    why: what made a look necessary. made: how many could not tell; from the first of them on it is uncertain.
    quiet_at: when the looking began to count: from then on no earlier sender can be at work, by the database's clock.
    deliveries: how often it had been claimed when this was written down. stored: as in `MarkUncertain`.
    """

    why: str
    made: int
    quiet_at: datetime
    deliveries: int
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """Send it again, `delay` from now, with the same key."""

    delay: timedelta
    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None


@dataclass(frozen=True, slots=True)
class MarkUncertain:
    """`uncertain`: never sent again without a look at the service or a person's word.

    stored: the service has an answer on record under this key, and would only repeat it.
    looks: it has been looked for, in vain, and is to be again after `delay`; None for never.
    blocks_group: whether its group blocks behind it.
    """

    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    stored: bool = False
    looks: LookupState | None = None
    delay: timedelta | None = None
    failure_blocks_group: bool = True


@dataclass(frozen=True, slots=True)
class AwaitLookup:
    """Nothing is sent before a look, `delay` from now, None for never: `retry` before the first one, then `uncertain`.

    looked: a look led to this, not an attempt.
    """

    looks: LookupState
    delay: timedelta | None
    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    looked: bool = False


@dataclass(frozen=True, slots=True)
class SendAgain:
    """It is to be sent again: `pending`, after `delay`.

    key_epoch: as it was while the service surely remembers the key, else the next one, and then doubt counts anew too.
    absent: a look has proved that it did not happen; attempts and age go on counting. Else a person asked, and they count anew.
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
    """Its outcome is known, but its callback has not committed: store the outcome, and call the callback after `delay`.

    failed: whether the callback failed, which the entry's history reports. Else it had no turn, and that counts as nothing.
    callback: the name of the callback that this process does not have: it is due when a process that has it takes it over.
    """

    end: "Settle | MarkUncertain"
    delay: timedelta
    reason: str
    failed: bool = True
    callback: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Not tried at all: as if never claimed, to be looked at again `delay` from now, or never by itself.

    shown: whether the reason is to be told of the entry while it waits. served: whether this process serves its operation; else
        its reason takes no other reason's place.
    """

    reason: str
    delay: timedelta | None = timedelta(0)
    shown: bool = False
    served: bool = False


End: TypeAlias = Settle | MarkUncertain
"""What a callback may be registered for."""

Transition: TypeAlias = Settle | Retry | MarkUncertain | AwaitLookup | SendAgain | RetryCallback | Release

Ending: TypeAlias = tuple[ClaimedEntry, Transition]
"""A claim, and what ends its lease."""


# --- the queue's `outcome`: a JSON object. reason: why the entry waits or is uncertain. stored: as in `MarkUncertain`.
# known: what has become of it by a person's word, or by an outcome whose callback failed; with it on record the entry is never
# sent again.
# looks: it is to be looked for; with that on record it is never sent without a look. deliveries: how often it had been claimed
# when it was told to wait.

SEND_AGAIN = "send_again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is on record of an entry before its claim, under `known`.

    state: its end, `uncertain` for one whose callback is due, or `send_again`. decided_at: of an operator's cancellation.
    """

    state: Literal["delivered", "failed", "cancelled", "uncertain", "send_again"]
    attempts: int | None = None
    result: Any = None
    reason: str | None = None
    stored: bool = False
    decided_at: datetime | None = None


KEY_CONFLICT = "the service holds this key for another request"
"""How the reason of such an entry begins, wherever it is kept: what a look finds under its key would be that other's effect."""


def outcome_on_record(
    reason: str,
    *,
    stored: bool = False,
    known: Known | None = None,
    looks: LookupState | None = None,
    deliveries: int | None = None,
) -> str:
    """The text of the queue's `outcome`."""
    record: dict[str, Any] = {"reason": reason}
    if deliveries is not None:
        record["deliveries"] = deliveries
    if stored or (looks is not None and looks.stored):
        record["stored"] = True
    if looks is not None:
        told = {name: getattr(looks, name) for name in ("why", "made", "deliveries")}
        record["looks"] = told | {"quiet_at": looks.quiet_at.isoformat()}
    if known is not None:
        record["known"] = {name: value for name in _KNOWN if (value := getattr(known, name)) is not None}
        if known.decided_at is not None:
            record["known"]["decided_at"] = known.decided_at.isoformat()
    return json.dumps(record)


UNSERVED = "unserved"
"""The member of `outcome` that says so: only a process that cannot serve the entry has written it."""


def left_pinned(outcome: str | None, reason: str) -> str:
    """The queue's `outcome` after a process has released an entry that it serves, but would send in another form."""
    return json.dumps((json.loads(outcome) if outcome else {}) | {"reason": reason})


def left_unserved(outcome: str | None, reason: str) -> str | None:
    """The queue's `outcome` after a process that cannot serve the entry has released it, with the reason.

    None leaves it as it is: what a process that serves it, or an operator, has put on record stays there.
    """
    record = json.loads(outcome) if outcome else {}
    if "reason" in record and not record.get(UNSERVED):
        return None
    return json.dumps(record | {"reason": reason, UNSERVED: True})


def is_unserved(outcome: str | None) -> bool:
    """Whether nothing is on record but the reason of a process that cannot serve the entry."""
    return outcome is not None and json.loads(outcome).get(UNSERVED, False)


def known_of(outcome: str | None) -> Known | None:
    """What is known of an entry with this `outcome`, if anything is. Fields that a newer release adds are passed over."""
    record = json.loads(outcome) if outcome else {}
    known = record.get("known")
    if not known:
        return None
    told = {name: known[name] for name in _KNOWN if name in known}
    decided_at = datetime.fromisoformat(known["decided_at"]) if "decided_at" in known else None
    return Known(**told, stored=record.get("stored", False), decided_at=decided_at)


_KNOWN = ("state", "attempts", "result", "reason")

CANCELLED_PATTERN = '%"known": {"state": "cancelled"%"decided_at": %'
"""For LIKE: the `outcome` of an entry that an operator has cancelled. A quote inside a reason is escaped: none can match."""


def lookup_of(outcome: str | None) -> LookupState | None:
    """How an entry with this `outcome` is being looked for, if it is."""
    record = json.loads(outcome) if outcome else {}
    looks = record.get("looks")
    if not looks or record.get("known"):
        return None
    quiet_at = datetime.fromisoformat(looks["quiet_at"])
    return LookupState(looks["why"], looks["made"], quiet_at, looks["deliveries"], record.get("stored", False))


def vanished(entry: ClaimedEntry) -> int:
    """With how many senders in turn it vanished: claims that nothing came of, since it was enqueued or told to wait."""
    told = json.loads(entry.outcome).get("deliveries") if entry.outcome else 0
    return 0 if told is None else max(entry.deliveries - told - 1, 0)


DUE_FROM_SLACK = timedelta(milliseconds=250)
"""Transactions that take so long to commit are seen behind a hint, without waiting for a sweep."""
