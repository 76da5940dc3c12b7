"""The dispatcher's interface to its database."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.callbacks import Calls, OnCompleted
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.flow_control.state import FlowStates
from dispatchers.periodic.schedules import Schedule, Tick
from dispatchers.store.connections.listener import Listener
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.records.queries import Accepted, Wanted
from dispatchers.transitions import ClaimedEntry, End, Ending, Lease
from outbox.keys import KeyFields, Keyring
from outbox.sql.schema.tables import Tables

Result = TypeVar("Result")


class Run(Protocol):
    """Runs blocking work on a connection, in a transaction of its own that is committed on return."""

    def __call__(self, work: Callable[[Connection], Result]) -> Awaitable[Result]: ...


class CallbacksChanged(Exception):
    """The recorded callbacks have changed since this process read them: another dispatcher added or removed one.

    The transaction wrote nothing. Call `callbacks` again before the next try.
    """


@dataclass(frozen=True, slots=True)
class Exchange:
    """The result of one round trip: the leases that were settled, and the new claims.

    Leases, not entries: one round trip may settle two claims of one entry, if its process lost the first one.

    passed_over: how many due entries were not claimed, because they are not the heads of their groups or had ended before.
    postponed: leases that could not be settled now, because another transaction has locked a row. They are still valid.
    ended: the state of each entry that had a settlement and was still in the queue. Its queue row was removed.
    flow_states: the destinations whose rows were locked for the request's `flow_update`. No news was stored for the others.
    unopened: why claimed entries cannot be decrypted by this process. They are not sent.
    error: why the exchange ended early, although settlements are stored. Nothing was claimed.
    unstored: the leases to settle again.
    """

    settled: set[Lease] = field(default_factory=set)
    claimed: list[ClaimedEntry] = field(default_factory=list)
    passed_over: int = 0
    flow_states: FlowStates | None = None
    postponed: frozenset[Lease] = frozenset()
    ended: Mapping[UUID, str] = field(default_factory=dict)
    unopened: Mapping[UUID, str] = field(default_factory=dict)
    error: Exception | None = None
    unstored: frozenset[Lease] = frozenset()


@dataclass(frozen=True, slots=True)
class Survey:
    """What a dispatcher reads about the whole queue every few seconds.

    destinations: those that have unsettled entries. flow_states: those that are throttled now or were paused at some time.
    known: those that have due entries whose end is stored.
    """

    destinations: list[str]
    flow_states: FlowStates
    known: Sequence[str] = ()


class Store(Protocol):
    """The operations of the database that the dispatcher uses. The simulation implements them without a database."""

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        """Settle the entries whose leases are still valid, then claim. All of it is committed on return.

        It takes one transaction, or several if the database refuses one because of a single row.
        Raises `CallbacksChanged`, and what the database raises; the outcomes must be settled again then. An error after some were
        stored is not raised: see `Exchange.error`.
        """
        ...

    def release(self, entries: Sequence[ClaimedEntry], tokens: Collection[UUID], reason: str) -> int:
        """Release these entries, and those under these tokens, on the calling thread; returns how many. No send of them has
        begun. A lost lease is left alone.

        Raises what the database raises.
        """
        ...

    async def settle_with(self, entry: ClaimedEntry, end: End, calls: Calls) -> bool:
        """Settle one entry and run `calls` in the same transaction. Returns False if the lease was lost.

        The transaction has the engine's own isolation level, because the app's callback may rely on it.

        Raises `NextIsLocked` before anything is called, `CallbackFailed`, `CallbacksChanged`, and what the database raises;
        nothing is changed then.
        """
        ...

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        """The next accepted requests, oldest first. Fewer than `MAX_ACCEPTED` mean that there are no more."""
        ...

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        """Run the completion of an accepted request and store its response. Returns False if an entry has not ended yet.

        Raises the same errors as `settle_with`.
        """
        ...

    async def call_schedule(self, schedule: Schedule, tick: Tick) -> bool:
        """Call the schedule's function for an instant, and record the instant in the same transaction. Returns False if another
        dispatcher has recorded it, or is calling it now.

        Raises `CallbackFailed`, and what the database raises; nothing is changed then.
        """
        ...

    async def callbacks(self, registered: Collection[str] = ()) -> frozenset[str]:
        """Record these callbacks, which this process has, and return all recorded callbacks.

        If the record changes later, this store settles nothing until this method is called again.
        """
        ...

    async def take_over(self, callbacks: Collection[str]) -> int:
        """Make the entries due that wait for a process with these callbacks; returns how many."""
        ...

    @property
    def takes_async_callbacks(self) -> bool:
        """Whether a callback may be a coroutine function."""
        ...

    async def request_lookups(self, wanted: Wanted, fencing_delay: timedelta, after: UUID | None) -> UUID | None:
        """Request lookups for a page of uncertain entries without one: see `queries.request_lookups`."""

    async def check_identity(self, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
        """Compare the database with its stored identity and with `known`, which this process remembers.

        If they differ, suspend sending; otherwise renew the stored identity when it is old. The result is committed on
        return. Raises `ConfigurationError`, with nothing written, if the database belongs to another env.
        """
        ...

    async def survey(self) -> Survey:
        """Read which destinations have unsettled entries, and which of them are throttled. An ordering group that nothing blocks,
        and that nothing has advanced, continues.
        """
        ...

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        """The fields from which an entry's keys are derived. Only a later key epoch needs them."""
        ...

    @property
    def listener(self) -> Listener | None:
        """Receives hints from the apps; None if hints are off."""
        ...

    @property
    def max_connections(self) -> int | None:
        """How many connections the engine's pool gives out at the same time; None if it sets no limit."""
        ...

    @property
    def has_server_checks(self) -> bool:
        """Whether `outbox doctor` compares settings of the server."""
        ...

    @property
    def place(self) -> str:
        """The database's address for the log, without the password."""
        ...

    async def require_usable(self, env: str, keyring: Keyring) -> None:
        """Raise `SchemaError` if tables are missing or outdated. Raise `ConfigurationError` if the database or unsettled entries
        belong to another env, a kid's secret differs from the recorded one, or an entry has an unknown kid. Writes nothing.
        """
        ...

    async def record_secrets(self, keyring: Keyring) -> None:
        """Record the kids that have no record yet. Raise `ConfigurationError` if a kid's secret differs from the recorded one."""
        ...

    @property
    def tables(self) -> Tables:
        """The outbox's tables."""
        ...

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Run maintenance `work` in a transaction of its own, which is committed on return."""
        ...

    async def run_apart(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` that may wait for hours. It blocks neither other maintenance nor the end of the process."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...
