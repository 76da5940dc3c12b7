"""What the dispatcher needs of a database, whichever it is."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.callbacks import Calls, OnCompleted
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.flow_control.state import FlowStates
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.gauges import Gauge
from dispatchers.store.listener import Listener
from dispatchers.store.queries import Accepted, Wanted
from dispatchers.transitions import ClaimedEntry, End, Ending
from outbox.keys import KeyFields, Keyring
from outbox.sql.schema import Tables

Result = TypeVar("Result")


class Run(Protocol):
    """Runs blocking work on a connection, in a transaction of its own that is committed on return."""

    def __call__(self, work: Callable[[Connection], Result]) -> Awaitable[Result]: ...


class CallbacksChanged(Exception):
    """Another dispatcher has put a callback on record, or removed one, since this process read the record.

    Nothing is changed. Once `callbacks` has been asked again, it may be tried again.
    """


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one round trip brought: ids whose settling took effect, and new claims.

    passed_over: how many were due, but are not the heads of their groups, or had ended before.
    postponed: ids that could not be settled at this moment, and whose leases are still ours.
    ended: entries that were in the queue although they have a settlement, with its state; they are removed from there.
    flow_states: the destinations' rows that were locked for the request's `flow_update`; news of others were not stored.
    """

    settled: set[UUID] = field(default_factory=set)
    claimed: list[ClaimedEntry] = field(default_factory=list)
    passed_over: int = 0
    flow_states: FlowStates | None = None
    postponed: frozenset[UUID] = frozenset()
    ended: Mapping[UUID, str] = field(default_factory=dict)


class Store(Protocol):
    """What the dispatcher needs of a database. A simulation hands in one of its own."""

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        """Settle what is still ours, then claim, in one transaction that is committed on return; in several if the database
        refuses it for the sake of one row.

        Raises `CallbacksChanged`, and what the database raises; nothing is changed then.
        """
        ...

    async def settle_with(self, entry: ClaimedEntry, end: End, calls: Calls) -> bool:
        """Settle one entry and run `calls` in the same transaction, if the lease is still ours; returns whether it was.

        The transaction has the engine's own isolation level, which the app may count on in its callback.

        Raises `NextIsLocked` before anything is called, `CallbackFailed`, `CallbacksChanged`, and what the database raises;
        nothing is changed then.
        """
        ...

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        """The next accepted requests, oldest first; fewer than `ACCEPTED_MAX` at the end."""
        ...

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        """Run the completion of an accepted request and store its response, if every entry has ended; returns whether.

        Raises as `settle_with` does.
        """
        ...

    async def callbacks(self, registered: Collection[str] = ()) -> frozenset[str]:
        """Put these callbacks on record, for the process that has just started with them; returns all that are on record.

        From now on nothing is settled here once the record has changed, until it is asked for again.
        """
        ...

    async def take_over(self, callbacks: Collection[str]) -> int:
        """Make entries due that another process has handed over to those who have these callbacks; returns how many."""
        ...

    @property
    def takes_async_callbacks(self) -> bool:
        """Whether a callback may be a coroutine function."""
        ...

    async def destinations(self) -> list[str]:
        """Every destination that has unsettled entries."""
        ...

    async def request_lookups(self, wanted: Wanted, fencing_delay: timedelta, after: UUID | None) -> UUID | None:
        """Request lookups for a page of uncertain entries without one: see `queries.request_lookups`."""

    async def check_identity(self, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
        """Compare the database with its stored identity and with `known`, which this process remembers.

        Where they differ sending is suspended; else an old identity is renewed. The result is committed on return. Raises
        `ConfigurationError`, with nothing written, if the database is another env's.
        """
        ...

    async def flow_states(self) -> FlowStates:
        """The states of the destinations that are throttled or were paused once."""
        ...

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        """The fields from which an entry's keys derive: needed for another key epoch only."""
        ...

    async def gauges(self) -> dict[str, Gauge]:
        """How many unsettled entries each destination has, counted within bounds: see `gauges.read_gauges`."""
        ...

    @property
    def listener(self) -> Listener | None:
        """Where hints from the apps are heard; None where there are none."""
        ...

    @property
    def connections_max(self) -> int | None:
        """How many connections the engine's pool gives out at once; None if it sets no limit."""
        ...

    @property
    def place(self) -> str:
        """Which database it is, for the log: never its password."""
        ...

    async def unknown_kid(self, known: Sequence[str]) -> str | None:
        """A key id among the unsettled entries that are read (`SAMPLE_MAX`) that is not in `known`, if there is one."""
        ...

    async def require_secrets(self, keyring: Keyring, *, recording: bool) -> None:
        """Raise `ConfigurationError` if a kid's secret is another than the recorded one.

        recording: record the kids that have none yet, so that other processes find out.
        """
        ...

    async def require_environment(self, env: str) -> None:
        """Raise `ConfigurationError` if the database, or an unsettled entry that is not suspended, is of another env."""
        ...

    @property
    def tables(self) -> Tables:
        """The outbox's tables."""
        ...

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Do a piece of maintenance in a transaction of its own, committed on return."""
        ...

    async def run_apart(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` that may wait for hours: it keeps no other maintenance waiting, nor the process from ending."""
        ...

    async def check(self) -> None:
        """Raise `SchemaError` if the tables are not there, or not those that this release needs."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...
