"""What the reference store keeps: the rows of its tables."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatchers.database_identity import DatabaseIdentity
from dispatchers.flow_control.state import FlowState
from outbox.sql.schema.tables import SCHEMA_VERSION
from outbox.times import NEVER

WAITING = ("pending", "retry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the app asked for; never changed. apart: its destination, if that is not its operation's first word."""

    id: UUID
    operation: str
    tag: bytes
    payload: bytes = b"{}"
    options: str = "{}"
    headers: str = "{}"
    env: str = "test"
    kid: str = "k1"
    parent: str = "order:1"
    scope: str = ""
    source: str = "app"
    apart: str | None = None
    schema_version: int = SCHEMA_VERSION
    created_at: datetime
    ordering_key: str | None = None

    @property
    def destination(self) -> str:
        return self.apart or self.operation.partition(".")[0]


@dataclass(slots=True, kw_only=True)
class Row:
    """The queue row of an entry that has not ended. position: in its group, in the order of the commits."""

    state: str = "pending"
    due_at: datetime
    lease_token: UUID | None = None
    lease_until: datetime | None = None
    leased_at: datetime | None = None
    first_leased_at: datetime | None = None
    deliveries: int = 0
    attempts: int = 0
    maybe_sent: bool = False
    in_doubt_since: datetime | None = None
    key_epoch: int = 0
    sent_as: str | None = None
    outcome: str | None = None
    waiting_since: datetime | None = None
    ordering_key: str | None = None
    position: int | None = None
    callback: str | None = None
    known: str | None = None

    @property
    def is_blocked(self) -> bool:
        """It waits for the head of its group: nothing else that waits is never due."""
        return self.position is not None and self.state in WAITING and self.due_at == NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How an entry ended."""

    state: str
    result: Any
    reason: str | None
    deliveries: int
    attempts: int
    key_epoch: int


@dataclass(frozen=True, slots=True)
class Block:
    """Which entry blocks a group, and why."""

    entry_id: UUID
    reason: str


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an entry: an attempt that did not deliver, a status lookup, or an operator's decision."""

    entry_id: UUID
    kind: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """identity: as last stored. suspended: why nothing may be sent."""

    identity: DatabaseIdentity | None = None
    suspended: str | None = None
    number: int = 0


@dataclass(slots=True)
class Tables:
    """All of it. clock: the database's. locked: rows that an open transaction has changed; no dispatcher claims them meanwhile.

    timeline: the server's, which a restore changes.
    """

    clock: Callable[[], datetime]
    entries: dict[UUID, Entry] = field(default_factory=dict)
    queue: dict[UUID, Row] = field(default_factory=dict)
    settlements: dict[UUID, Settlement] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    locked: set[UUID] = field(default_factory=set)
    flow: dict[str, FlowState] = field(default_factory=dict)  # by destination
    callbacks: set[str] = field(default_factory=set)  # on record
    blocked_group: dict[str, Block] = field(default_factory=dict)  # by ordering key
    last_position: int = 0
    meta: Meta = Meta()
    timeline: str = "1"


class Refused(Exception):
    """The entry's state does not allow this decision."""
