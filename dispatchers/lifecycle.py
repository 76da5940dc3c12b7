"""What the store hands out and takes back: claims, and the transitions that end their leases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

from outbox.schema import NEVER


class Claimed(NamedTuple):
    """An entry under our lease. All instants are the database's.

    deliveries: claims so far, this one included. attempts: sends that may have left, this one not included.
    in_doubt_since: when the first attempt under this key began whose fate is unknown.
    sent_as: the key's form and what else the first possible send was pinned to.
    first_leased_at: since when it has been tried. queued_at: its place in the queue. leased_at: when this lease began.
    """

    id: UUID
    destination: str
    operation: str
    payload: bytes
    options: str
    headers: str
    tag: bytes
    kid: str
    schema_version: int
    first_leased_at: datetime
    queued_at: datetime
    deliveries: int
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    key_epoch: int
    sent_as: str | None
    leased_at: datetime
    lease_token: UUID


class Settle(NamedTuple):
    """The end: `delivered` means that it happened, `failed` that it did not and will not."""

    state: Literal["delivered", "failed"]
    attempts: int
    result: Any = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Send it again, `delay` from now, with the same key."""

    delay: timedelta
    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None


@dataclass(frozen=True, slots=True)
class Park:
    """`uncertain`: never sent again without a look at the service or a person's word."""

    reason: str
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None


@dataclass(frozen=True, slots=True)
class HandBack:
    """Not tried at all: as if never claimed, to be looked at again `delay` from now."""

    reason: str
    delay: timedelta = timedelta(0)


Transition: TypeAlias = Settle | Wait | Park | HandBack
Settlement: TypeAlias = tuple[Claimed, Transition]


class Want(NamedTuple):
    """How many entries of one destination at most. hint: what was due before it was seen already."""

    destination: str
    slots: int
    hint: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a dispatcher wants to take: at most `entries_max` in all, the first destinations first.

    token: random, new for each claim. cutoff: only what was due by then.
    forms: what an operation's first send is pinned to, by dotted prefix.
    """

    wants: Sequence[Want]
    entries_max: int
    token: UUID
    lease: timedelta
    forms: Mapping[str, str]
    cutoff: datetime = NEVER
