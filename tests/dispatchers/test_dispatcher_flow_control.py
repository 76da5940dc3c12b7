"""The dispatcher's flow control: limits, services that hang, a store that breaks, and one that is no database at all."""

import ast
import asyncio
import random
import threading
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    Blocking,
    WrappedStore,
    age,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    run_once,
    settlement_row,
    states,
    until_true,
)

import dispatchers
import outbox
from dispatchers import Deferred, Delivered, Delivery, Dispatcher, Operations, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Callback
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.flow_control.state import FlowStates
from dispatchers.process.dispatcher import Simulation
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange, Survey
from dispatchers.store.queries import Wanted
from dispatchers.stored_outcome import NOTHING_STORED
from dispatchers.transitions import ClaimedEntry, End, Ending, MarkUncertain, Release, Retry, Settle
from outbox.keys import KeyFields, Keyring, ParentKey, derive_tag, key_fields

# --- flow control


def test_the_limits_on_what_is_in_flight_hold(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    put(database, ob, "mail.send", count=20)
    waiting: dict[str, list[asyncio.Event]] = {"crm": [], "mail": []}
    most: list[tuple[int, int]] = []  # at one destination, and at both

    class Gated(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            gate = asyncio.Event()
            here = waiting[delivery.operation.partition(".")[0]]
            here.append(gate)
            most.append((len(here), sum(map(len, waiting.values()))))
            await gate.wait()
            here.remove(gate)
            return await super().send(delivery)

    async def main() -> None:
        service = Gated()
        working = dispatcher(database, ob, adapters={"crm": service, "mail": service}, concurrency=4, in_flight_max=6)
        pump = asyncio.create_task(pumping(working, lambda: states(database) == {"delivered": 40}))
        for sent in range(40):  # one leaves at a time, and another may come
            await until_true(lambda: sum(map(len, waiting.values())) >= min(6, 40 - sent))  # noqa: B023
            max(waiting.values(), key=len)[0].set()
            await until_true(lambda: len(service.deliveries) > sent)  # noqa: B023
        await pump

    asyncio.run(main())

    assert max(at_one for at_one, _ in most) == 4
    assert max(at_both for _, at_both in most) == 6


def test_a_destination_that_hangs_starves_no_other(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)
    mails = put(database, ob, "mail.send", count=20)
    dead, mail = Blocking(), MemoryAdapter()

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": dead, "mail": mail}, concurrency=4)
        await pumping(working, lambda: states(database)["delivered"] == len(mails) and not dead.released.set())

    asyncio.run(main())

    assert {delivery.id for delivery in mail.deliveries} == set(mails)


def test_sync_operations_that_hang_starve_no_other_destination(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    hanging, released = threading.Semaphore(0), threading.Event()

    @effects.operation("crm")
    def hang(delivery: Delivery) -> Outcome:
        hanging.release()
        released.wait(60)
        return Delivered()

    put(database, ob, count=40)
    working = dispatcher(database, ob, include=[effects], adapters={"mail": MemoryAdapter()}, concurrency=4)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, released.is_set))
        for _ in range(4):
            await asyncio.to_thread(hanging.acquire, timeout=60)
        put(database, ob, "mail.send")
        try:
            await until_true(lambda: states(database)["delivered"] == 1)
        finally:
            released.set()
            await pump

    asyncio.run(main())


def test_no_sync_operation_waits_for_the_thread_of_another(database: Database, ob: outbox.Outbox) -> None:
    """Such a wait would be part of its timeout."""
    effects, at_once = Operations(), threading.Barrier(48)  # more than asyncio's own pool has threads

    @effects.operation("crm", timeout=timedelta(seconds=40))
    def meet(delivery: Delivery) -> Outcome:
        at_once.wait(30)
        return Delivered()

    put(database, ob, count=at_once.parties)

    run_once(database, ob, include=[effects], concurrency=at_once.parties)

    assert states(database) == {"delivered": at_once.parties}


def test_a_send_that_outlives_its_lease_costs_no_permit(database: Database, ob: outbox.Outbox) -> None:
    class Stubborn(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            outcome = await super().send(delivery)
            while len(self.deliveries) == 1:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue  # as code that catches everything does
            return outcome

    put(database, ob, count=1)
    adapter = Stubborn(timeout=timedelta(milliseconds=50))
    working = dispatcher(
        database,
        ob,
        adapters={"crm": adapter},
        lease=timedelta(milliseconds=200),
        margin=timedelta(milliseconds=20),
        concurrency=2,
    )

    async def main() -> None:
        await pumping(working, lambda: states(database) == {"delivered": 1})
        put(database, ob, count=4)
        adapter.timeout = timedelta(seconds=1)
        await pumping(working, lambda: states(database) == {"delivered": 5})

    asyncio.run(main())

    assert states(database) == {"delivered": 5}
    assert set(adapter.effects.values()) == {1}


# --- a store that breaks


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a store's fates meet its exchanges in order."""
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.CLAIM_LOOPS", 1)


@pytest.mark.usefixtures("one_group")
@pytest.mark.parametrize(
    "fates",
    [["", "before"], ["", "after"], ["", "before", "before", "after"], ["before", "", "after", "before"]],
    ids=", ".join,
)
def test_outcomes_are_kept_while_the_database_is_down_and_settled_once(
    database: Database, ob: outbox.Outbox, fates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.STORE_RETRY_SECONDS", (0.01, 0.01))
    sent, waiting = put_one(database, ob, destination="a"), put_one(database, ob, destination="a")
    adapter = MemoryAdapter(lambda delivery: Delivered() if delivery.id == sent else Deferred("busy", after=HOUR))
    store = WrappedStore(DatabaseStore(database.engine, ob.configuration), *fates)
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store)

    asyncio.run(pumping(working, lambda: states(database) == {"delivered": 1, "retry": 1} and not store.failing))

    assert len(adapter.deliveries) == 2
    row, settled = queue_row(database, waiting), settlement_row(database, sent)
    assert (row.deliveries, row.attempts) == (1, 0)
    assert (settled.deliveries, settled.attempts) == (1, 1)
    assert len(database.rows(TABLES.event)) == 1


@pytest.mark.usefixtures("one_group")
def test_run_once_raises_the_databases_error_and_the_next_call_settles(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    adapter = MemoryAdapter()
    store = WrappedStore(DatabaseStore(database.engine, ob.configuration), "", "before")
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store)

    with pytest.raises(sa.exc.OperationalError):
        asyncio.run(working.run_once())
    assert states(database) == {"sending": 3}

    assert asyncio.run(working.run_once()) == 3
    assert states(database) == {"delivered": 3}
    assert len(adapter.deliveries) == 3


@pytest.mark.usefixtures("one_group")
def test_a_claim_whose_acknowledgement_was_lost_is_taken_over_in_doubt(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    adapter = MemoryAdapter()
    store = WrappedStore(DatabaseStore(database.engine, ob.configuration), "after")
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store)

    with pytest.raises(sa.exc.OperationalError):
        asyncio.run(working.run_once())
    assert asyncio.run(working.run_once()) == 0
    assert adapter.deliveries == []
    age(database, HOUR)

    assert asyncio.run(working.run_once()) == 1
    assert settlement_row(database, id).attempts == 2


def test_a_database_error_is_logged_without_what_was_to_be_stored(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.STORE_RETRY_SECONDS", (0.01, 0.01))
    put(database, ob)
    table, away = TABLES.settlement.name, "elsewhere"

    def answer(delivery: Delivery) -> Delivered:
        """After the claim, which reads the settlements too."""
        database.execute(sa.text(f"ALTER TABLE {table} RENAME TO {away}"))
        return Delivered({"email": "ada@example.com"})

    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter(answer)})

    def repaired() -> bool:
        if "the database " in caplog.text:
            database.execute(sa.text(f"ALTER TABLE {away} RENAME TO {table}"))
            return True
        return False

    asyncio.run(pumping(working, repaired))

    assert states(database) == {"delivered": 1}
    if (
        database.engine.dialect.name == "postgresql"
    ):  # which says what is wrong: an operator should not suspect the network
        assert "database error: the outbox's table 'outbox_settlement' does not exist" in caplog.text
    assert "ada@example.com" not in caplog.text


# --- no database at all


class FakeStore:
    """One destination in memory, on a clock that only its tests turn."""

    takes_async_callbacks = True
    listener = None  # it hears no hints: whatever it finds, it finds by asking

    def __init__(self, count: int = 1) -> None:
        self.seconds = 1000.0
        self.lag = 0.0
        self.lag_of_keys = 0.0
        self.queue = [fake_entry(number) for number in range(count)]
        self.requests: list[ClaimRequest] = []
        self.changes: list[Any] = []
        self.others: list[str] = []
        self.exchanges = 0

    @property
    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        self.exchanges += 1
        self.changes += [change for _, change in settlements]
        claimed = []
        if request is not None and request.quotas:
            self.requests.append(request)
            size = min(
                sum(quota.permits for quota in request.quotas if quota.destination == "crm"), request.entries_max
            )
            taken, self.queue = self.queue[:size], self.queue[size:]
            claimed = [entry._replace(leased_at=self.now, lease_token=request.token) for entry in taken]
            self.seconds += self.lag
        return Exchange({entry.id for entry, _ in settlements}, claimed)

    async def settle_with(self, entry: ClaimedEntry, end: End, callback: Callback) -> bool:
        raise NotImplementedError

    async def callbacks(self, registered: Collection[str] = ()) -> frozenset[str]:
        return frozenset(registered)

    async def take_over(self, callbacks: Collection[str]) -> int:
        return 0

    async def check_identity(self, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
        return IdentityCheck(identity=None)

    async def request_lookups(self, wanted: Wanted, fencing_delay: timedelta, after: UUID | None) -> UUID | None:
        return None

    async def survey(self) -> Survey:
        return Survey(["crm", *self.others], FlowStates(self.now, {}))

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        self.seconds += self.lag_of_keys
        return key_fields("test", ParentKey("order:1"), "crm.upsert", "")

    connections_max = None
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


def fake_entry(number: int, **fields: Any) -> ClaimedEntry:
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    ring = outbox.Keyring({"k1": bytes(32)})
    given = {
        "id": UUID(int=number + 1),
        "destination": "crm",
        "env": "test",
        "operation": "crm.upsert",
        "payload": b"{}",
        "options": {},
        "headers": {},
        "tag": derive_tag(ring, "k1", key_fields("test", ParentKey(f"order:{number}"), "crm.upsert", "")),
        "kid": "k1",
        "schema_version": 1,
        "due_at": long_ago,
        "created_at": long_ago,
        "first_leased_at": long_ago,
        "queued_at": long_ago,
        "deliveries": 1,
        "attempts": 0,
        "maybe_sent": False,
        "in_doubt_since": None,
        "key_epoch": 0,
        "sent_as": None,
        "leased_at": long_ago,
        "outcome": NOTHING_STORED,
        "record_id": None,
        "completion": None,
        "ordering_key": None,
        "position": None,
        "ended": None,
        "lease_token": UUID(int=0),
    }
    return ClaimedEntry(**given | fields)


def simulated(store: FakeStore, ob: outbox.Outbox, adapter: Any, seed: int = 1, **settings: Any) -> Dispatcher:
    simulation = Simulation(store=store, clock=lambda: store.seconds, rng=random.Random(seed))
    return Dispatcher(outbox=ob, adapters={"crm": adapter}, simulation=simulation, **settings)


def test_a_store_without_a_database_drives_it_the_same_way_each_time(ob: outbox.Outbox) -> None:
    runs = []
    for seed in (1, 1, 2):
        store = FakeStore(count=300)
        adapter = MemoryAdapter([Unknown("slow"), Deferred("busy")])
        assert asyncio.run(simulated(store, ob, adapter, seed).run_once()) == 300
        runs.append(([request.token for request in store.requests], store.changes))

    assert runs[0] == runs[1] != runs[2]
    assert sum(isinstance(change, Settle) for change in runs[0][1]) == 298
    assert sum(isinstance(change, Retry) for change in runs[0][1]) == 2


def test_what_would_outlive_its_lease_is_released_without_an_attempt(ob: outbox.Outbox) -> None:
    store = FakeStore(count=2)
    store.lag = 56.0  # the claim's answer took so long
    adapter = MemoryAdapter(timeout=timedelta(seconds=1))

    asyncio.run(simulated(store, ob, adapter, lease=timedelta(seconds=60), margin=timedelta(seconds=5)).run_once())

    assert adapter.deliveries == []
    assert [type(change) for change in store.changes] == [Release, Release]


def test_nothing_is_sent_whose_key_came_after_the_end_of_the_lease(ob: outbox.Outbox) -> None:
    store = FakeStore()
    store.queue = [fake_entry(0, maybe_sent=True, key_epoch=1)]
    store.lag_of_keys = 70.0
    adapter = MemoryAdapter()

    asyncio.run(simulated(store, ob, adapter).run_once())

    assert adapter.deliveries == []
    assert [type(change) for change in store.changes] == [Release]


@pytest.mark.parametrize(("seconds_more", "sent"), [(0, 1), (3, 0)])
def test_the_window_counts_by_the_databases_clock_and_since_the_claim(
    ob: outbox.Outbox, seconds_more: int, sent: int
) -> None:
    store = FakeStore()
    window, timeout, margin = timedelta(hours=1), timedelta(seconds=1), timedelta(seconds=5)
    doubt = store.now - (window - timeout - margin) + timedelta(seconds=2)  # two seconds are left
    store.queue = [fake_entry(0, maybe_sent=True, in_doubt_since=doubt, attempts=1, deliveries=2)]
    store.lag = seconds_more
    adapter = MemoryAdapter(window=window, timeout=timeout)

    asyncio.run(simulated(store, ob, adapter, margin=margin).run_once())

    assert len(adapter.deliveries) == sent
    assert isinstance(store.changes[0], Settle if sent else MarkUncertain)


def test_a_full_dispatcher_does_not_ask_the_database_again_and_again(ob: outbox.Outbox) -> None:
    store, adapter = FakeStore(count=10), Blocking()
    store.others = [f"host-{number}" for number in range(2000)]
    asked: list[int] = []

    async def main() -> None:
        working = simulated(store, ob, adapter, in_flight_max=4, poll=timedelta(seconds=10))
        pump = asyncio.create_task(pumping(working, lambda: len(store.changes) == 10))
        await until_true(lambda: adapter.waiting == 4)
        before = store.exchanges
        for _ in range(1000):  # iterations of the event loop, in which nothing waits for a real database
            await asyncio.sleep(0)
        asked.append(store.exchanges - before)
        adapter.released.set()
        await pump

    asyncio.run(main())

    assert asked[0] < 5


# --- nothing below the daemon reads the time or the random source by itself

MODULES = {"time", "random", "secrets"}
NAMES = {"uuid1", "uuid4", "now", "utcnow", "today", "urandom", "getrandom"}
PACKAGE = Path(dispatchers.__file__).parent
ALLOWED = {
    "store/callback_transactions.py": {"calling", "give_up", "seconds_left"},  # how long an app's function really takes
    "process/dispatcher.py": {"steady_clock", "_STEADY", "_set_up"},  # the defaults of what is handed in
    "store/claims_plain.py": {"_chosen"},  # after a conflict: or two dispatchers would choose the same entries again
    "store/transactions.py": {"_in_portable_transactions"},  # the same, for their pauses
    "admin/doctor.py": {"_clock"},  # compares our clock with the database's
    "admin/proposals.py": {"propose"},  # its id is chance; its time is the database's
    "maintenance/body_partitions.py": {"drop_days"},  # `today` is the database's
    "adapters/retry_after.py": {"retry_after"},  # an HTTP date counts from our own clock where the answer has none
    "adapters/brokers/aws/client.py": {"import"},  # how long a thread may still begin a call
    "adapters/brokers/kafka_producer.py": {"import"},  # librdkafka answers on its own thread, with no event loop
    "adapters/brokers/nats_connection.py": {"import"},  # which server of a cluster is asked first
    "adapters/brokers/rabbitmq_connection.py": {"import"},  # which server of a cluster is asked first
    "adapters/brokers/redis_connection.py": {"import"},  # which server is asked first
    "adapters/workflows/dbos.py": {"_start", "_left"},  # how long a thread may still begin a commit
}


def readings(path: Path) -> set[str]:
    """The functions and constants in a module that read a clock or chance. The event loop's clock is the loop's maker's."""
    tree = ast.parse(path.read_text())
    found = {"import" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in MODULES}
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for outer in (*constants, *functions):
        name = outer.name if not isinstance(outer, ast.Assign) else ast.unparse(outer.targets[0])
        inner = [outer.value] if isinstance(outer, ast.Assign) else outer.body
        if any(_reads(node) for part in inner for node in ast.walk(part)):
            found.add(name)
    return found


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id in MODULES or node.attr in NAMES
    return isinstance(node, ast.Name) and node.id in NAMES - {"now"}


def test_nothing_below_the_daemon_reads_a_clock_or_chance_by_itself() -> None:
    for_people = {path for folder in ("cli", "dashboard", "testing") for path in PACKAGE.glob(f"{folder}/**/*.py")}
    paths = {*PACKAGE.rglob("*.py")} - for_people - {PACKAGE / "process" / "daemon.py"}
    named = {path.relative_to(PACKAGE).as_posix(): path for path in paths}

    found = {name: readings(path) - ALLOWED.get(name, set()) for name, path in named.items()}

    assert {name: where for name, where in found.items() if where} == {}
    assert any(readings(path) for path in paths)  # the search finds what there is
