"""Callbacks: what they write commits with the settlement, once, in any dispatcher; what they enqueue is of the same parent."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.callbacks import Breaking, Gate, Shop
from support.database import CHARGE, TABLES, Client, Database
from support.entries import (
    HOUR,
    age,
    claim_one,
    claims_again,
    dispatcher,
    pumping,
    put,
    put_one,
    queue_row,
    state,
    states,
    until_true,
)

import outbox
from dispatchers import Delivered, KeyConflict, Operations, Outcome, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel, resolve
from dispatchers.callbacks import Calls, Settlement
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox.keys import Tag, encode_native

pytestmark = pytest.mark.on_mariadb

SECRET = bytes(range(32))


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


def ignore(session: Session, settlement: Settlement) -> None:
    pass


def key_of(database: Database, operation: str) -> str:
    (entry,) = (entry for entry in database.entries if entry.operation == operation)
    return encode_native(Tag(bytes(entry.tag)))


# --- what is handed in, and what it brings about


def test_what_a_callback_writes_and_enqueues_commits_with_the_settling(shop: Shop) -> None:
    put_one(shop.database, shop.ob, parent="invoice:42")
    shop.on_settled(shop.pay)
    mail = MemoryAdapter()

    assert shop.run_once(adapters={"crm": MemoryAdapter()}) == 1
    assert shop.run_once(adapters={"crm": MemoryAdapter(), "mail": mail}) == 1

    assert [order.customer for order in shop.database.orders] == ["invoice:42"]
    assert [delivery.key for delivery in mail.deliveries] == [shop.ob.child_key("invoice:42", "mail.receipt")]
    assert states(shop.database) == {"delivered": 2}
    assert shop.states == ["delivered"]


@pytest.mark.parametrize("forget", ["expire_all", "expunge_all"])
def test_an_entry_outlives_the_objects_of_the_callbacks_session(shop: Shop, forget: str) -> None:
    put_one(shop.database, shop.ob)

    def work(session: Session, settlement: Settlement) -> None:
        shop.ob.enqueue(session, "mail.receipt", {})
        getattr(session, forget)()

    shop.on_settled(work)
    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert states(shop.database) == {"delivered": 1, "pending": 1}


def test_a_callback_is_handed_the_entry_and_how_it_ended(shop: Shop) -> None:
    payload = {"b": 1, "a": "é"}
    id = put_one(shop.database, shop.ob, payload=payload, parent="invoice:42", discriminator="1", destination="eu")
    shop.on_settled(ignore)

    shop.run_once(adapters={"crm": MemoryAdapter([Delivered({"id": "c_1"})])})

    (settlement,) = shop.seen
    entry = settlement.entry
    assert (settlement.state, settlement.result, settlement.reason) == ("delivered", {"id": "c_1"}, None)
    assert settlement.attempts == 1
    assert "é" not in repr(settlement)
    assert "c_1" not in repr(settlement)
    assert (entry.id, entry.operation, entry.parent) == (id, "crm.upsert", outbox.ParentKey("invoice:42"))
    assert (entry.discriminator, entry.destination, entry.payload) == ("1", "eu", payload)
    assert entry.child_key == shop.ob.child_key("invoice:42", "crm.upsert", "1")
    assert entry.created_at.tzinfo is not None


def test_a_callbacks_entries_have_the_requests_parent_secret_and_record(
    shop: Shop,
    database: Database,
    ob: outbox.Outbox,
) -> None:
    Client(database, ob, is_async=False).request(key="retry-001", scope="acct_1")
    shop.ob = outbox.Outbox(outbox.Keyring({"k1": SECRET, "k2": SECRET[::-1]}, current="k2"), env="test")
    shop.on_settled(shop.pay, CHARGE)

    assert shop.run_once(adapters={"stripe": MemoryAdapter()}) == 1

    charge, receipt = sorted(database.entries, key=lambda entry: entry.operation == "mail.receipt")
    for field in ("scope", "source", "parent", "parent_id", "record_id", "kid"):
        assert getattr(receipt, field) == getattr(charge, field)
    assert (receipt.kid, receipt.record_id) == ("k1", database.records[0].id)
    parent = outbox.ParentKey("retry-001", scope="acct_1", source="http")
    assert key_of(database, "mail.receipt") == ob.child_key(parent, "mail.receipt")


def test_an_entry_whose_secret_has_gone_has_grandchildren_under_a_new_one(database: Database) -> None:
    old = outbox.Outbox(outbox.Keyring({"k1": SECRET}), env="test")
    new = outbox.Outbox(outbox.Keyring({"k2": SECRET[::-1]}), env="test")
    put_one(database, old, parent="invoice:42")
    shop = Shop(database, new, is_async=False)
    shop.on_settled(shop.pay)

    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert key_of(database, "mail.receipt") == new.child_key("invoice:42", "mail.receipt")


def test_a_callback_may_name_another_parent(shop: Shop) -> None:
    put_one(shop.database, shop.ob, parent="invoice:42")
    shop.on_settled(lambda session, _: shop.ob.enqueue(session, "mail.receipt", {}, parent="customer:7"))

    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert key_of(shop.database, "mail.receipt") == shop.ob.child_key("customer:7", "mail.receipt")


def test_another_outbox_needs_a_parent_of_its_own(shop: Shop) -> None:
    put_one(shop.database, shop.ob)
    other = outbox.Outbox(outbox.Keyring({"k1": SECRET}), env="other")

    def enqueue(session: Session, settlement: Settlement) -> None:
        with pytest.raises(outbox.ParentRequired, match="enqueue needs parent="):
            other.enqueue(session, "mail.receipt", {})

    shop.on_settled(enqueue)
    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert states(shop.database) == {"delivered": 1}


# --- which end reaches which callback


@pytest.mark.parametrize(
    ("outcome", "recorded"),
    [
        (Delivered({"id": "c_1"}), ("on_settled", "delivered", {"id": "c_1"}, None)),
        (Rejected("no card", result={"code": 402}), ("on_settled", "failed", {"code": 402}, "no card")),
        (
            KeyConflict("other"),
            ("on_uncertain", "uncertain", None, "the service holds this key for another request: other"),
        ),
    ],
    ids=["delivered", "failed", "uncertain"],
)
def test_every_end_reaches_its_callback(shop: Shop, outcome: Outcome, recorded: Any) -> None:
    put_one(shop.database, shop.ob)
    kinds: list[str] = []
    shop.on("on_settled", "crm", lambda session, _: kinds.append("on_settled"))
    shop.on("on_uncertain", "crm", lambda session, _: kinds.append("on_uncertain"))

    assert shop.run_once(adapters={"crm": MemoryAdapter([outcome])}) == 1

    (settlement,) = shop.seen
    assert (*kinds, settlement.state, settlement.result, settlement.reason) == recorded


def test_an_uncertain_entry_reaches_on_settled_once_it_is_resolved(shop: Shop) -> None:
    id = put_one(shop.database, shop.ob)
    adapter = MemoryAdapter([KeyConflict("other")])
    shop.on("on_uncertain", "crm.upsert", ignore)
    shop.on_settled(shop.pay)

    shop.run_once(adapters={"crm": adapter})
    with shop.database.engine.begin() as connection:
        resolve(connection, TABLES, id, "happened", actor="ada", reason="seen in the list", result={"id": "c_1"})
    assert shop.run_once(adapters={"crm": adapter}) == 1

    assert shop.states == ["uncertain", "delivered"]
    assert (shop.seen[1].result, shop.seen[1].reason) == ({"id": "c_1"}, "seen in the list")
    assert len(adapter.deliveries) == len(shop.database.orders) == 1


def test_an_operators_cancel_runs_the_callback_the_apps_own_does_not(shop: Shop) -> None:
    id, of_the_app = put(shop.database, shop.ob, count=2)
    adapter = MemoryAdapter()
    shop.on_settled(shop.pay)
    with shop.database.engine.begin() as connection:
        cancel(connection, TABLES, id, actor="ada", reason="ordered by mistake")
    with shop.database.begin() as session:
        assert shop.ob.cancel(session, of_the_app)

    assert shop.run_once(adapters={"crm": adapter}) == 1

    (settlement,) = shop.seen
    assert (settlement.state, settlement.reason, settlement.attempts) == ("cancelled", "ordered by mistake", 0)
    assert adapter.deliveries == []
    assert state(shop.database, id) == "cancelled"


def test_the_longest_prefix_wins_and_others_are_left_alone(shop: Shop) -> None:
    names: list[str] = []
    for operation in ("crm.upsert", "crm.note.add", "crmother.upsert"):
        put_one(shop.database, shop.ob, operation)
    shop.on_settled(lambda *_: names.append("crm"), "crm")
    shop.on_settled(lambda *_: names.append("crm.note"), "crm.note")

    assert shop.run_once(adapters={"crm": MemoryAdapter(), "crmother": MemoryAdapter()}) == 3

    assert sorted(names) == ["crm", "crm.note"]


# --- once, in any dispatcher


def settle_with(store: DatabaseStore, *arguments: Any) -> bool:
    entry, end, callback = arguments
    return asyncio.run(store.settle_with(entry, end, Calls(callback)))


def test_a_stale_lease_runs_no_callback(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    stale = claim_one(store)
    age(database, HOUR)
    fresh = claim_one(store)

    assert not settle_with(store, stale, Settle("failed", 1), pytest.fail)

    assert queue_row(database, id).lease_token == fresh.lease_token


def test_late_proof_of_success_runs_the_callback_once(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    stale = claim_one(store)
    age(database, HOUR)
    fresh = claim_one(store)
    shop = Shop(database, ob, is_async=False)

    settled = [settle_with(store, entry, Settle("delivered", 1), shop.pay) for entry in (stale, fresh)]

    assert settled == [True, False]
    assert (state(database, id), len(database.orders)) == ("delivered", 1)


# --- what is refused at the start


def registering_twice() -> None:
    effects = Operations()
    effects.on_settled("crm.upsert")(ignore)
    effects.on_settled("crm.upsert")(ignore)


def registering_in_two_modules() -> None:
    first, second = Operations(), Operations()
    first.on_uncertain("crm.upsert")(ignore)
    second.on_uncertain("crm.upsert")(ignore)
    dispatcher(sa.create_engine("sqlite://"), OUTBOX, include=[first, second], adapters={"crm": MemoryAdapter()})


def async_beside_a_sync_engine() -> None:
    effects = Operations()

    @effects.on_settled("crm.upsert")
    async def settled(session: AsyncSession, settlement: Settlement) -> None: ...

    dispatcher(sa.create_engine("sqlite://"), OUTBOX, include=[effects], adapters={"crm": MemoryAdapter()})


OUTBOX = outbox.Outbox(outbox.Keyring({"k1": SECRET}), env="test")


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            registering_twice,
            outbox.ConfigurationError,
            r"on_settled\('crm.upsert'\) is registered twice: register one callback",
        ),
        (registering_in_two_modules, outbox.ConfigurationError, r"on_uncertain\('crm.upsert'\) is registered twice"),
        (
            async_beside_a_sync_engine,
            outbox.ConfigurationError,
            r"the callback on_settled\('crm.upsert'\) is async: give the dispatcher an AsyncEngine \(create_async_engine\)",
        ),
        (lambda: Operations().on_settled("Crm!"), outbox.InvalidValue, "operation 'Crm!': must be lower-case words"),
    ],
    ids=["twice", "in two modules", "async", "a malformed name"],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    mistake: Callable[[], None], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        mistake()


# --- Callbacks at the same time, on few connections or permits, and across event loops: each commits once and stalls no
# other.


@pytest.mark.differs("portable", "a callback is called again after 40001, and commits once")
def test_two_dispatchers_run_each_callback_once(shop: Shop) -> None:
    put(shop.database, shop.ob, count=20)
    shop.on_settled(shop.pay)
    adapter = MemoryAdapter()

    async def main() -> list[int]:
        engines = [shop.database.async_engine() if shop.is_async else shop.database.new_engine() for _ in range(2)]
        both = [shop.dispatcher(engine, adapters={"crm": adapter}, concurrency=8) for engine in engines]
        return await asyncio.gather(*(each.run_once() for each in both))

    assert sum(asyncio.run(main())) == 20

    assert len(shop.database.orders) == len(shop.seen) == 20


@pytest.mark.every_value
@pytest.mark.parametrize("fates", [("before", "before"), ("conflict",), ("after",)], ids=" ".join)
def test_a_database_that_goes_away_at_the_settling_gets_the_effects_once(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, fates: tuple[str, ...]
) -> None:
    put_one(database, ob)
    shop = Shop(database, ob, is_async=False)
    shop.on_settled(shop.pay)
    adapter = MemoryAdapter()

    shop.run_once(store=Breaking(database.engine, ob, *fates), adapters={"crm": adapter})

    assert states(database) == {"delivered": 1, "pending": 1}
    assert len(adapter.deliveries) == len(database.orders) == len(shop.seen) == 1
    assert "its callback raised" not in caplog.text


def test_many_callbacks_make_do_with_a_pool_of_one_connection(shop: Shop) -> None:
    put(shop.database, shop.ob, count=20)
    shop.on_settled(shop.pay)
    pool: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 20}

    async def main() -> int:
        if not shop.is_async:
            return await shop.dispatcher(
                shop.database.new_engine(poolclass=sa.QueuePool, **pool), adapters={"crm": MemoryAdapter()}
            ).run_once()
        engine = create_async_engine(shop.database.async_url, poolclass=sa.AsyncAdaptedQueuePool, **pool)
        working = shop.dispatcher(engine, adapters={"crm": MemoryAdapter()})
        settled = await working.run_once()
        await working.close()
        await engine.dispose()
        return settled

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 20

    assert len(shop.database.orders) == 20


def test_a_slow_callback_stalls_no_entry_without_one(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=10)
    put(postgresql, ob, "crm.note", count=50)
    put(postgresql, ob, "mail.send", count=50)
    shop, gate = Shop(postgresql, ob, is_async=False), Gate()
    shop.on_settled(gate)
    working = shop.dispatcher(adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter()})

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 110))
        try:
            await until_true(lambda: states(postgresql)["delivered"] == 100)
        finally:
            gate.opened.set()
            await pump

    asyncio.run(main())

    assert len(shop.seen) == 10


def test_callbacks_that_wait_keep_the_permits_of_their_destination(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=30)
    shop, gate = Shop(postgresql, ob, is_async=False), Gate()
    shop.on_settled(gate)
    adapter, mail = MemoryAdapter(), MemoryAdapter()
    working = shop.dispatcher(adapters={"crm": adapter, "mail": mail}, concurrency=6)

    async def main() -> None:
        pump = asyncio.create_task(pumping(working, lambda: states(postgresql)["delivered"] == 32))
        await until_true(lambda: gate.entered == 4)
        await claims_again(postgresql, ob, mail)
        sent = len(adapter.deliveries)
        gate.opened.set()
        await pump
        assert sent == 6

    asyncio.run(main())


def test_run_once_ends_though_each_callback_enqueues_another(shop: Shop) -> None:
    put_one(shop.database, shop.ob, parent="invoice:42")

    def again(session: Session, settlement: Settlement) -> None:
        number = f"{settlement.entry.discriminator}+"
        shop.ob.enqueue(session, "crm.upsert", {}, discriminator=number)

    shop.on_settled(again)

    counts = [shop.run_once(adapters={"crm": MemoryAdapter()}) for _ in range(3)]

    assert counts == [1, 1, 1]
    assert states(shop.database) == {"delivered": 3, "pending": 1}


def test_what_was_cut_off_with_its_event_loop_settles_in_the_next(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=8)
    effects = Operations()
    hanging = [True] * 4
    seen: list[Settlement] = []

    @effects.on_settled("crm.upsert")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        if hanging and hanging.pop():
            await asyncio.sleep(60)
        await session.run_sync(Shop(postgresql, ob, is_async=True).pay, settlement)
        seen.append(settlement)

    adapter = MemoryAdapter()
    working = dispatcher(postgresql.async_engine(), ob, include=[effects], adapters={"crm": adapter})

    async def cut_off() -> None:
        call = asyncio.create_task(working.run_once())
        await until_true(lambda: not hanging)
        call.cancel()

    asyncio.run(cut_off())
    assert (states(postgresql)["delivered"], seen) == (0, [])
    asyncio.run(asyncio.wait_for(working.run_once(), 60))

    assert len(seen) == len(postgresql.orders) == len(adapter.deliveries) == 8
    assert states(postgresql) == {"delivered": 8, "pending": 8}
