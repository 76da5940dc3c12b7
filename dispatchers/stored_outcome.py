"""The stored outcome: what the queue's column `outcome` keeps of an entry between two claims, as JSON. Pure.

The store reads it once, at the claim, into `ClaimedEntry.outcome`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

SEND_AGAIN = "send_again"
KEY_CONFLICT = "the service holds this key for another request"
"""How the reason of such an entry begins, wherever it is kept: a status lookup under its key would find the other request."""

UNSERVED = "unserved"
"""The member that marks a reason written by a process that cannot serve the entry."""

UNREAD = "unread"
"""The member that marks a reason written by a process that serves the entry, but cannot read its payload."""

CANCELLED_PATTERN = '%"known": {"state": "cancelled"%"decided_at": %'
"""For LIKE: the `outcome` of an entry that an operator has cancelled. A quote inside a reason is escaped: none can match."""


class MalformedOutcome(ValueError):
    """The text is not an `outcome` that this release can read. It may hold a service's answer, so the error does not quote it."""


class LookupState(NamedTuple):
    """The state of an entry that waits for a status lookup; nothing is sent while it is stored.

    why: what made the lookup necessary. inconclusive: how many lookups gave no result; after the first the entry is uncertain.
    fenced_at: from then on no earlier sender can be running, by the database's clock; absence counts only from then on.
    deliveries: how often the entry had been claimed when this was stored. stored: as in `MarkUncertain`.
    """

    why: str
    inconclusive: int
    fenced_at: datetime
    deliveries: int
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An outcome that was decided before the claim: by an operator, or by an answer whose callback has not committed.

    The entry is not sent while it is stored, unless `state` is `send_again`.

    state: the entry's end; `uncertain` for one whose callback is due. attempts: None if an operator decided.
    looked_up: a status lookup has shown it, not an attempt.
    decided_at: of an operator's cancellation. key_epoch: of a `send_again`, the only epoch that the operator allows; None for
    the safest at the time.
    """

    state: Literal["delivered", "failed", "cancelled", "uncertain", "send_again"]
    attempts: int | None = None
    result: Any = None
    reason: str | None = None
    stored: bool = False
    looked_up: bool = False
    decided_at: datetime | None = None
    key_epoch: int | None = None


_STATES = ("delivered", "failed", "cancelled", "uncertain", SEND_AGAIN)
_KNOWN = ("state", "attempts", "result", "reason", "key_epoch")


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """The parsed column.

    known: the outcome, if it is decided. lookup: the state of its status lookup, if one is due and nothing is decided.
    stored: as in `MarkUncertain`. deliveries: how often the entry had been claimed when it was last set to wait; None if that was
    not stored. members: the whole JSON object, with what a newer release may have added.
    """

    known: Known | None = None
    lookup: LookupState | None = None
    stored: bool = False
    deliveries: int | None = None
    members: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def reason(self) -> str | None:
        """Why the entry waits or is uncertain."""
        reason = self.members.get("reason")
        return reason if isinstance(reason, str) else None

    @property
    def is_unserved(self) -> bool:
        """Whether nothing is stored but the reason of a process that cannot serve the entry."""
        return bool(self.members.get(UNSERVED, False))

    @property
    def is_unread(self) -> bool:
        """Whether the process that last released the entry could not read its payload."""
        return bool(self.members.get(UNREAD, False))

    def with_reason(self, reason: str) -> str:
        """The column's text after a process has released an entry that it serves, but would send in another form."""
        return json.dumps({**self.members, "reason": reason})

    def with_unread_reason(self, reason: str) -> str:
        """The column's text after a process has released an entry whose payload it cannot read."""
        return json.dumps({**self.members, "reason": reason, UNREAD: True})

    def with_unserved_reason(self, reason: str) -> str | None:
        """The column's text after a process that cannot serve the entry has released it.

        None leaves the column as it is: a reason that a serving process or an operator has stored is kept.
        """
        if "reason" in self.members and not self.is_unserved:
            return None
        return json.dumps({**self.members, "reason": reason, UNSERVED: True})


NOTHING_STORED = StoredOutcome(deliveries=0)


def read_outcome(text: str | None) -> StoredOutcome:
    """Parse the column. Members that a newer release has added are kept and ignored. Raises `MalformedOutcome`."""
    if not text:
        return NOTHING_STORED
    try:
        members = json.loads(text)
        stored = members.get("stored", False)
        known = _read_known(members["known"], stored) if members.get("known") else None
        lookup = _read_lookup(members["lookup"], stored) if known is None and members.get("lookup") else None
        return StoredOutcome(known, lookup, stored, members.get("deliveries"), members)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedOutcome(f"the stored outcome cannot be read ({type(error).__name__})") from None


def _read_known(members: Any, stored: bool) -> Known:
    if members["state"] not in _STATES:
        raise ValueError
    given = {name: members[name] for name in _KNOWN if name in members}
    decided_at = _instant(members, "decided_at") if "decided_at" in members else None
    return Known(**given, stored=stored, looked_up=members.get("looked_up") is True, decided_at=decided_at)


def _read_lookup(members: Any, stored: bool) -> LookupState:
    inconclusive, deliveries = members["inconclusive"] + 0, members["deliveries"] + 0  # numbers, or a TypeError
    return LookupState(members["why"], inconclusive, _instant(members, "fenced_at"), deliveries, stored)


def _instant(members: Any, name: str) -> datetime:
    instant = datetime.fromisoformat(members[name])
    if instant.tzinfo is None:
        raise ValueError
    return instant


def write_outcome(
    reason: str,
    *,
    stored: bool = False,
    known: Known | None = None,
    lookup: LookupState | None = None,
    deliveries: int | None = None,
) -> str:
    """The column's text."""
    members: dict[str, Any] = {"reason": reason}
    if deliveries is not None:
        members["deliveries"] = deliveries
    if stored or (lookup is not None and lookup.stored):
        members["stored"] = True
    if lookup is not None:
        values = {name: getattr(lookup, name) for name in ("why", "inconclusive", "deliveries")}
        members["lookup"] = values | {"fenced_at": lookup.fenced_at.isoformat()}
    if known is not None:
        members["known"] = {name: value for name in _KNOWN if (value := getattr(known, name)) is not None}
        if known.looked_up:
            members["known"]["looked_up"] = True
        if known.decided_at is not None:
            members["known"]["decided_at"] = known.decided_at.isoformat()
    return json.dumps(members)
