"""The dispatcher on a store without a database and a clock of the test's own: what its leases and windows let it send."""

import asyncio
import random
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from support.entries import Blocking, pumping, until_true

import outbox
from dispatchers import Deferred, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Callback
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.flow_control.state import FlowStates
from dispatchers.process.dispatcher_work import DispatcherWork, Simulation
from dispatchers.store.protocol import Exchange, Survey
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.records.queries import Wanted
from dispatchers.stored_outcome import NOTHING_STORED
from dispatchers.transitions import ClaimedEntry, End, Ending, MarkUncertain, Release, Retry, Settle
from outbox.keys import KeyFields, Keyring, ParentKey, derive_tag, key_fields


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
                sum(quota.permits for quota in request.quotas if quota.destination == "crm"), request.max_entries
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


def simulated(store: FakeStore, ob: outbox.Outbox, adapter: Any, seed: int = 1, **settings: Any) -> DispatcherWork:
    simulation = Simulation(store=store, clock=lambda: store.seconds, rng=random.Random(seed))
    return DispatcherWork(outbox=ob, adapters={"crm": adapter}, simulation=simulation, **settings)


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
        working = simulated(store, ob, adapter, max_in_flight=4, poll=timedelta(seconds=10))
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
