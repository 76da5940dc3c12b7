"""The recipe of docs/sharding.md: four servers, and tenants that move between them while requests come in and are repeated."""

import asyncio
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.docs_pages import ROOT, snippets_of
from support.entries import put_one, run_once, until_true

import outbox
import outbox.migrations
from dispatchers import Delivered, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.fleet_work import FleetWork
from dispatchers.testing.postgres import temporary_postgres
from outbox.moving import copy_scope

SHARDS = ("east", "west", "north", "south")
TENANTS = [f"tenant{number}" for number in range(8)]
REQUESTS = 100


@pytest.fixture
def shards(copies: Any) -> Iterator[dict[str, Database]]:
    taken = {name: copies.take() for name in SHARDS}
    yield taken
    for each in taken.values():
        copies.give_back(each)


@pytest.fixture
def servers() -> Iterator[dict[str, Database]]:
    """A server for each shard."""
    with ExitStack() as running, ThreadPoolExecutor(len(SHARDS)) as threads:
        started = dict(zip(SHARDS, threads.map(lambda name: started_server(running), SHARDS), strict=True))
        yield started
        for each in started.values():
            each.dispose()


def started_server(running: ExitStack) -> Database:
    database = Database(sa.make_url(running.enter_context(temporary_postgres(durable=False)).url))
    outbox.migrations.upgrade(database.engine)
    return database


@contextmanager
def recipe(shards: dict[str, Database], ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the page, with these databases, and with `ob` in the place of `outbox`'s own functions."""
    monkeypatch.setenv("SHARDS", " ".join(shards))
    for name, database in shards.items():
        monkeypatch.setenv(f"{name.upper()}_URL", database.url.render_as_string(hide_password=False))
    monkeypatch.setattr(outbox, "idempotent", ob.idempotent)
    monkeypatch.setattr(outbox, "enqueue", ob.enqueue)
    modules: dict[str, Any] = {}
    try:
        for snippet in snippets_of((ROOT / "docs" / "sharding.md").read_text()):
            if snippet.language == "python":
                (name,) = re.findall(r"^# (\w+)\.py\n", snippet.text)
                modules[name] = sys.modules[name] = ModuleType(name)
                exec(compile(snippet.text, f"sharding.md: {name}", "exec"), modules[name].__dict__)
        for engine in modules["shards"].engines.values():
            modules["shards"].Base.metadata.create_all(engine)
        yield modules
    finally:
        for name in modules:
            del sys.modules[name]
        for engine in modules["shards"].engines.values():
            modules["shards"].Base.metadata.drop_all(engine)
            engine.dispose()


class Crm(MemoryAdapter):
    """Counts how often each order was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: Counter[str] = Counter()

    async def send(self, delivery: Delivery) -> Outcome:
        await asyncio.sleep(0.005)
        self.orders[delivery.payload["number"]] += 1
        return Delivered()


@contextmanager
def serving(shards: dict[str, Database], ob: outbox.Outbox, service: Crm) -> Iterator[None]:
    """A fleet on a thread of its own."""
    stopping, loop = asyncio.Event(), asyncio.new_event_loop()
    urls = {name: database.url for name, database in shards.items()}
    fleet = FleetWork(urls, adapters={"crm": service}, outbox=ob, poll=timedelta(milliseconds=20))
    thread = threading.Thread(target=loop.run_until_complete, args=(fleet.pump(stopping),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


@contextmanager
def four_threads() -> Iterator[ThreadPoolExecutor]:
    """Where a failure ends what has not begun."""
    threads = ThreadPoolExecutor(4)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def answer(place_order: Callable[..., outbox.Response], tenant: str, number: str) -> tuple[int, str]:
    """The status and the order that a client gets, which asks again while its earlier request is in work."""
    while True:
        try:
            response = place_order(tenant, f"key-{number}", {"number": number})
        except outbox.KeyInFlight:
            continue
        return response.status, response.json()["order"]


def settle_in(modules: dict[str, Any], tenant: str, shard: str) -> None:
    with modules["shards"].engines[shard].begin() as connection:
        connection.execute(sa.insert(modules["shards"].Tenant).values(name=tenant, moved_to=None))


def orders_in(modules: dict[str, Any], shard: str) -> dict[str, str]:
    """The tenant of each order in a database."""
    order = modules["shards"].Order
    with modules["shards"].engines[shard].connect() as connection:
        return {row.number: row.tenant for row in connection.execute(sa.select(order.number, order.tenant))}


def test_tenants_move_under_load_without_loss_or_repeat(
    servers: dict[str, Database], ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, rng = Crm(), random.Random(7)
    carts = [(rng.choice(TENANTS), f"order{number}") for number in range(REQUESTS)]
    repeated = carts + carts  # each request comes twice: at once, or long after the tenant has moved
    rng.shuffle(repeated)
    homes = {tenant: SHARDS[number % 4] for number, tenant in enumerate(TENANTS)}

    with recipe(servers, ob, monkeypatch) as modules, serving(servers, ob, service), four_threads() as threads:
        for tenant, shard in homes.items():
            settle_in(modules, tenant, shard)
        place_order = modules["orders"].place_order
        asking = [threads.submit(answer, place_order, tenant, number) for tenant, number in repeated]
        moved = 0
        while not all(each.done() for each in asking) or moved < 6:
            tenant = rng.choice(TENANTS[:3])
            target = rng.choice([shard for shard in SHARDS if shard != homes[tenant]])
            assert modules["move"].move(tenant, homes[tenant], target)
            homes[tenant], moved = target, moved + 1
        answers = {each.result() for each in asking}
        asyncio.run(until_true(lambda: len(service.orders) == REQUESTS))

        assert answers == {(201, number) for _, number in carts}
        assert set(service.orders.values()) == {1}
        for shard in SHARDS:
            here = orders_in(modules, shard)
            assert here == {number: tenant for tenant, number in carts if homes[tenant] == shard}
        for tenant, number in carts:  # the client asks once more, wherever the tenant is now
            assert answer(place_order, tenant, number) == (201, number)
        assert set(service.orders.values()) == {1}


def test_a_move_that_was_stopped_is_repeated_without_harm(
    shards: dict[str, Database], ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recipe(shards, ob, monkeypatch) as modules, serving(shards, ob, Crm()):
        place_order, move = modules["orders"].place_order, modules["move"]
        settle_in(modules, "acme", "east")
        place_order("acme", "key-1", {"number": "1"})
        move.mark("acme", "east", moved_to="west")
        asyncio.run(until_true(lambda: move.copied("acme", "east", "west")))  # and then it is stopped
        place_order("acme", "key-2", {"number": "2"})

        assert move.move("acme", "east", "west")

        assert orders_in(modules, "west") == {"1": "acme", "2": "acme"}
        assert orders_in(modules, "east") == {}
        assert place_order("acme", "key-1", {"number": "1"}).json() == {"order": "1"}


def test_a_tenant_whose_entries_do_not_end_stays_where_it_is(
    shards: dict[str, Database], ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recipe(shards, ob, monkeypatch) as modules:  # and no fleet
        settle_in(modules, "acme", "east")
        modules["orders"].place_order("acme", "key-1", {"number": "1"})

        assert not modules["move"].move("acme", "east", "west", seconds=0)

        modules["orders"].place_order("acme", "key-2", {"number": "2"})
        assert orders_in(modules, "east") == {"1": "acme", "2": "acme"}
        assert orders_in(modules, "west") == {}


# --- copy_scope


def test_the_copy_has_every_ended_row_of_the_scope_and_no_other(shards: dict[str, Database], ob: outbox.Outbox) -> None:
    east, west = shards["east"], shards["west"]
    for scope in ("acme", "other"):
        with east.begin() as session, ob.idempotent(session, "key", scope=scope, content={"n": 1}) as claim:
            ob.enqueue(session, "crm.upsert", {"n": 1})
            claim.respond(201, {"scope": scope})
        put_one(east, ob, parent=outbox.ParentKey("by itself", scope=scope))
    run_once(east, ob, adapters={"crm": MemoryAdapter()})

    for _ in range(2):  # the second call finds nothing to copy
        with east.engine.connect() as source, west.engine.begin() as target:
            assert copy_scope(source, target, "acme") == 0

    for table in (TABLES.entry, TABLES.record):
        expected = [row for row in east.rows(table) if row.scope == "acme"]
        assert west.rows(table) == expected != []
    ids = {row.id for row in west.entries}
    assert west.rows(TABLES.settlement) == [row for row in east.rows(TABLES.settlement) if row.id in ids] != []
    assert west.queue == []


def test_nothing_is_copied_before_all_has_ended(shards: dict[str, Database], ob: outbox.Outbox) -> None:
    east, west = shards["east"], shards["west"]
    put_one(east, ob, parent=outbox.ParentKey("first", scope="acme"))
    run_once(east, ob, adapters={"crm": MemoryAdapter()})
    put_one(east, ob, parent=outbox.ParentKey("second", scope="acme"))
    with east.begin() as session, ob.idempotent(session, "key", scope="acme", content={}) as claim:
        ob.enqueue(session, "crm.upsert", {})
        claim.accept(completion="shop.done", headers={"Location": "/1"})

    with east.engine.connect() as source, west.engine.begin() as target:
        assert copy_scope(source, target, "acme") == 3  # two entries, and the request
        assert copy_scope(source, target, "other") == 0

    assert west.entries == west.records == []
