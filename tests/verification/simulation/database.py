"""The reference store over a network: requests take time, get lost, or are answered after the client has gone."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from dispatchers.callbacks import CallbackFailed, Calls, OnCompleted, SettledEntry, Settlement
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.store.protocol import CallbacksChanged, Exchange, Survey
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.ordering import NextIsLocked
from dispatchers.store.records.queries import Accepted, Wanted
from dispatchers.transitions import ClaimedEntry, End, Ending, Lease, Settle
from outbox.keys import KeyFields, Keyring, ParentKey, Tag, encode_native, key_fields
from outbox.times import NEVER
from simulation.crowd import Crowd
from simulation.hints import Hints
from simulation.invariants import Invariants
from simulation.reference import ReferenceStore
from simulation.reference_history import backup, check_identity, restore
from simulation.reference_rows import Entry
from simulation.world import Process, World

START = datetime(2026, 1, 31, tzinfo=UTC)
ENV = "test"


class Database:
    """The server: its store, its clock, its locks.

    chaos: the chance that one of two messages of a request is lost. down_until: it refuses everybody until then.
    crowd: says when it stalls. hints: what it notifies; by default nothing.
    """

    def __init__(self, world: World, invariants: Invariants, crowd: Crowd, hints: Hints | None = None) -> None:
        self.world = world
        self._crowd = crowd
        self.hints = hints or Hints(0, is_crowded=False)
        self._stalled_until = 0.0
        self.invariants = invariants
        self.store = ReferenceStore(self.now)
        self.down_until = 0.0
        self.chaos = 0.0
        self.open: list[Transaction] = []
        self._waiting: list[tuple[set[UUID], Callable[[], None]]] = []
        self._kept: dict[str, object] = {}
        invariants.store = self.store

    def now(self) -> datetime:
        return START + timedelta(seconds=self.world.now)

    # --- requests

    def receive(self, needs: set[UUID], work: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        """Do `work` once no other transaction has changed the rows that it `needs`, as a statement waits for row locks."""
        if self.world.now < self._stalled_until:
            self.world.at(self._stalled_until - self.world.now, self.receive, needs, work, reply)
        elif self.world.now < self.down_until:
            reply(away())
        elif needs & self.store.locked:
            self._waiting.append((needs, lambda: self.receive(needs, work, reply)))
        else:
            reply(work())

    def lock(self, id: UUID) -> None:
        self.store.locked.add(id)

    def unlock(self, id: UUID) -> None:
        self.store.locked.discard(id)
        waiting, self._waiting = self._waiting, []
        for _, again in waiting:
            again()

    # --- what befalls it

    def back_up(self) -> None:
        self._kept = backup(self.store)
        self.invariants.restore.backup()

    def set_back(self) -> None:
        """To the backup; all connections are lost."""
        restore(self.store, self._kept, f"{self.store.timeline}'")
        self.invariants.restore.restored()  # before those that wait continue
        self.invariants.flow.restored()
        for transaction in self.open[:]:
            transaction.rollback()
        waiting, self._waiting = self._waiting, []
        for _, again in waiting:
            again()

    # --- what is asked of it

    def enqueue(self, *entries: Entry, by: Process | None = None) -> None:
        """by: the process whose callback has enqueued them."""
        self.store.enqueue(*entries)
        self.hints.committed(entries, by)
        for entry in entries:
            self.invariants.entries.setdefault(entry.id, entry)

    def callbacks(self, registered: Collection[str]) -> frozenset[str]:
        self.store.callbacks.update(registered)
        return frozenset(self.store.callbacks)

    def exchange(
        self,
        settlements: Sequence[Ending],
        request: ClaimRequest | None,
        process: Process,
        callbacks: frozenset[str],
    ) -> Exchange | CallbacksChanged:
        """callbacks: those on record, as this process has read them."""
        if settlements and self.is_changed(callbacks):
            return CallbacksChanged()
        settled: set[Lease] = set()
        postponed: set[Lease] = set()
        for entry, change in settlements:
            if self.store.must_be_postponed(entry, change):
                self.invariants.note(f"{entry.id.hex[:6]} postponed")
                postponed.add(entry.lease)
                continue
            if self.store.may_settle(entry, change):
                self.invariants.settling_without_callback(entry, change)
            if self.settle(entry, change, request.cutoff if request else NEVER):
                settled.add(entry.lease)
        for entry, _ in settlements:
            self.invariants.groups.require_not_stuck(entry.ordering_key)
        if request is None:
            return Exchange(settled, postponed=frozenset(postponed))
        if request.flow_update is not None:
            for name, news in request.flow_update.news.items():
                self.invariants.flow.released(name, sum(news.unsent.values()))
            taken, flow_states = self.store.claim_throttled(request, request.flow_update)
            self.invariants.tenants.check_flow(self.store.flow)
        else:
            taken, flow_states = self.store.claim(request), None
        self.invariants.claimed(taken.claimed, request.lease, process)
        self.invariants.hints.asked(process, [quota.destination for quota in request.quotas], taken.claimed)
        if taken.claimed and self.world.faulty:
            self._stalled_until = self.world.now + self._crowd.stall()
        return Exchange(settled, taken.claimed, taken.passed_over, flow_states, frozenset(postponed))

    def is_changed(self, callbacks: frozenset[str]) -> bool:
        return callbacks != self.store.callbacks

    def settle(
        self, entry: ClaimedEntry, change: Any, cutoff: datetime = NEVER, seen: Collection[UUID] | None = None
    ) -> bool:
        settled = bool(self.store.settle([(entry, change)], cutoff, seen))
        self.invariants.settled(entry, change, settled)
        return settled


def away() -> sa.exc.OperationalError:
    return sa.exc.OperationalError("a statement", {}, Exception("the server is unavailable"))


class Transaction:
    """One that settles an entry, open while its callback runs: what the callback writes is kept at the commit.

    Its settling sees what was there when it began.
    """

    def __init__(self, database: Database, entry: ClaimedEntry, end: End) -> None:
        self._database = database
        self._entry = entry
        self._end = end
        self._seen = set(database.store.queue)
        self._is_over = False
        self.writes: list[Callable[[], None]] = []
        database.lock(entry.id)
        database.open.append(self)

    def commit(self) -> Any:
        if self._is_over:
            return away()
        self._database.settle(self._entry, self._end, seen=self._seen)
        for write in self.writes:
            write()
        self.rollback()
        return True

    def rollback(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._database.open.remove(self)
            self._database.unlock(self._entry.id)


class AppSession:
    """What the app's callback writes with."""

    def __init__(self, database: Database, transaction: Transaction, parent: ParentKey, process: Process) -> None:
        self._database = database
        self._process = process
        self._transaction = transaction
        self._parent = parent

    def enqueue(self, make: Callable[[ParentKey], Entry]) -> None:
        entry = make(self._parent)
        self._transaction.writes.append(lambda: self._database.enqueue(entry, by=self._process))

    def add(self, id: UUID, state: str) -> None:
        """The app's own row: that this has ended so."""
        self._transaction.writes.append(lambda: self._database.invariants.reported(id, state))


class RemoteStore:
    """One process's way to the database: what a dispatcher is handed."""

    takes_async_callbacks = True

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process
        self._world = database.world
        self._open: list[Transaction] = []
        self._callbacks: frozenset[str] = frozenset()  # on record, as it has read
        self.listener = database.hints.listener(process, self._ask)  # None in most runs: asking finds everything
        process.at_death.append(self._die)

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        given = list(settlements)
        needs = {entry.id for entry, _ in given}
        read = self._callbacks
        exchange: Exchange = await self._ask(
            lambda: self._database.exchange(given, request, self._process, read), needs
        )
        return exchange

    async def callbacks(self, registered: Collection[str] = ()) -> frozenset[str]:
        names: frozenset[str] = await self._ask(lambda: self._database.callbacks(registered))
        self._callbacks = names
        return names

    async def take_over(self, callbacks: Collection[str]) -> int:
        count: int = await self._ask(lambda: self._database.store.take_over(callbacks))
        return count

    async def settle_with(self, entry: ClaimedEntry, end: End, calls: Calls) -> bool:
        read = self._callbacks
        transaction: Transaction | None = await self._ask(lambda: self._begin(entry, end, read), {entry.id})
        if transaction is None:
            return False
        try:
            await self._call(transaction, entry, end, calls)
            await self._ask(transaction.commit)
        finally:
            transaction.rollback()
        return True

    def _begin(
        self, entry: ClaimedEntry, end: End, callbacks: frozenset[str]
    ) -> Transaction | CallbacksChanged | NextIsLocked | None:
        if self._database.is_changed(callbacks):
            return CallbacksChanged()
        if not self._process.alive or not self._database.store.may_settle(entry, end):
            return None
        if self._database.store.must_be_postponed(entry, end):
            return NextIsLocked([entry.lease])
        transaction = Transaction(self._database, entry, end)
        self._open.append(transaction)
        return transaction

    async def _call(self, transaction: Transaction, entry: ClaimedEntry, end: End, calls: Calls) -> None:
        if calls.ended is None:
            return
        stored = self._database.store.entries[entry.id]
        session = AppSession(self._database, transaction, parent_of(stored), self._process)
        try:
            await calls.ended(session, _settlement(stored, entry, end))
        except Exception as error:
            raise CallbackFailed from error

    def _die(self) -> None:
        """The server notices, and rolls back what its client has left open."""
        for transaction in self._open:
            self._world.at(self._world.rng.choice([0.0, 0.1, 1.0]), transaction.rollback)

    async def request_lookups(self, wanted: Wanted, fencing_delay: timedelta, after: UUID | None) -> UUID | None:
        await self._ask(lambda: self._database.store.request_lookups(wanted, fencing_delay))
        return None

    async def check_identity(self, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
        watched: IdentityCheck = await self._ask(lambda: check_identity(self._database.store, env, known))
        return watched

    async def survey(self) -> Survey:
        survey: Survey = await self._ask(self._database.store.survey)
        return survey

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        fields: KeyFields = await self._ask(lambda: fields_of(self._database.invariants.entries[entry_id]))
        return fields

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        return []

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        return False

    max_connections = None
    dialect = "sqlite"

    @property
    def place(self) -> str:
        return "nowhere"

    async def require_usable(self, env: str, keyring: Keyring) -> None:
        pass

    async def record_secrets(self, keyring: Keyring) -> None:
        pass

    async def close(self) -> None:
        pass

    # --- the wire

    async def _ask(self, work: Callable[[], Any], needs: set[UUID] = frozenset()) -> Any:  # type: ignore[assignment]
        """One round trip, in which either message may be lost."""
        rng, chaos = self._world.rng, self._database.chaos
        answer = asyncio.get_running_loop().create_future()
        draw = rng.random()
        if draw < chaos:  # on its way there
            self._world.at(rng.choice([0.01, 0.5, 2.0]), _answer, answer, away())
        else:
            is_lost = draw < 2 * chaos  # the response is lost: it is done, and no client knows

            def reply(found: Any) -> None:
                if is_lost and isinstance(found, Transaction):
                    found.rollback()  # its connection is gone
                self._world.at(self._delay(), _answer, answer, away() if is_lost else found)

            self._world.at(self._delay(), self._database.receive, needs, work, reply)
        return await (answer if self.listener is None else self._watched(answer))

    async def _watched(self, answer: asyncio.Future[Any]) -> Any:
        """The answer; the invariants hear whether it came in time."""
        hints, failed = self._database.invariants.hints, True
        request = hints.requesting(self._process)
        try:
            found = await answer
            failed = False
        finally:
            hints.answered(self._process, request, failed=failed)
        return found

    def _delay(self) -> float:
        rng = self._world.rng
        if self._database.chaos and rng.random() < 0.02:
            return rng.choice([0.3, 2.0, 7.0])
        return 0.001 + 0.004 * rng.random()


def _answer(answer: asyncio.Future[Any], found: Any) -> None:
    if answer.done():
        if isinstance(found, Transaction):
            found.rollback()  # the caller was cancelled, and its connection closed
    else:
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def fields_of(entry: Entry) -> KeyFields:
    return key_fields(ENV, parent_of(entry), entry.operation, "")


def parent_of(entry: Entry) -> ParentKey:
    return ParentKey(entry.parent, entry.scope, entry.source)


def _settlement(stored: Entry, entry: ClaimedEntry, end: End) -> Settlement:
    return Settlement(
        entry=SettledEntry(
            id=entry.id,
            operation=entry.operation,
            parent=parent_of(stored),
            discriminator="",
            destination=entry.destination,
            child_key=encode_native(Tag(stored.tag)),
            payload_json=stored.payload,
            created_at=stored.created_at,
        ),
        state=end.state if isinstance(end, Settle) else "uncertain",
        result=end.result if isinstance(end, Settle) else None,
        reason=end.reason,
        attempts=end.attempts,
    )
