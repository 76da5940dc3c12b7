"""The columns that plain SQL reads of a locked row, and the `ClaimedEntry` made of a claimed one, with its JSON parsed."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.stored_outcome import NOTHING_STORED, read_outcome
from dispatchers.transitions import ClaimedEntry

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_make = ClaimedEntry._make


def claimed_entry(row: Sequence[Any], token: UUID) -> ClaimedEntry:
    """row: the fields of `ClaimedEntry` in their order, without the token; the last three are JSON texts.

    Raises `ValueError` for a text that cannot be read. The claim then fails, and the store suspends the entry.
    """
    if row[-3] is None and row[-2] == row[-1] == "{}":  # true of most rows
        return _make((*row[:-3], NOTHING_STORED, _EMPTY, _EMPTY, token))
    return _make((*row[:-3], read_outcome(row[-3]), read_object(row[-2]), read_object(row[-1]), token))


def read_object(text: str) -> Mapping[str, Any]:
    if text == "{}":
        return _EMPTY
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the stored JSON is not an object")  # the stored row is wrong, so no `InvalidValue`
    return value


class LockedRow(NamedTuple):
    """What a claim in plain SQL reads of an entry: first of its queue row, then of its own, of its record and its settlement."""

    id: UUID
    destination: str
    queued_at: datetime
    first_leased_at: datetime | None
    leased_at: datetime | None
    lease_token: UUID | None
    deliveries: int
    attempts: int
    maybe_sent: bool
    in_doubt_since: datetime | None
    key_epoch: int
    sent_as: str | None
    ordering_key: str | None
    position: int | None
    outcome: str | None
    env: str
    operation: str
    payload: bytes
    tag: bytes
    kid: str
    schema_version: int
    due_at: datetime
    created_at: datetime
    record_id: UUID | None
    options: str
    headers: str
    completion: str | None
    ended: str | None

    @classmethod
    def columns(cls, *, queue: str, entry: str, record: str, settlement: str) -> list[str]:
        """The fields as SQL text, by the names or aliases of the tables."""
        fields = list(cls._fields)
        of_entry = fields.index("env")
        renamed = {"queued_at": "due_at"}
        read = [f"{queue}.{renamed.get(name, name)}" for name in fields[:of_entry]]
        return [
            *read,
            *(f"{entry}.{name}" for name in fields[of_entry:-2]),
            f"{record}.completion",
            f"{settlement}.state",
        ]


class Lease(NamedTuple):
    """The new values of a locked row that depend on its old ones."""

    taken_over: bool
    maybe_sent: bool
    in_doubt_since: datetime | None
    sent_as: str | None


def leased_entry(row: LockedRow, lease: Lease, token: UUID, now: datetime) -> ClaimedEntry:
    """The entry of a row that was leased at `now`."""
    return claimed_entry(
        (
            *(row.id, row.destination, row.env, row.operation, row.payload, row.tag, row.kid, row.schema_version),
            *(row.due_at, row.created_at, row.first_leased_at or now, row.queued_at, row.deliveries + 1),
            *(row.attempts + lease.taken_over, lease.maybe_sent, lease.in_doubt_since, row.key_epoch, lease.sent_as),
            *(now, row.record_id, row.completion, row.ordering_key, row.position, row.ended),
            *(row.outcome, row.options, row.headers),
        ),
        token,
    )
