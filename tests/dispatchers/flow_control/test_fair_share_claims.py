"""Claims of a fair destination: one suite over the databases. No entry twice, none left, everybody a fair share."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    age,
    change,
    claim,
    claim_at_once,
    claim_request,
    put_one,
    queue_row,
    quota,
    run_once,
    settle,
)
from support.examples import divided
from support.fair_share import MOMENT, Bench, numbers
from support.ordering import OrderedService, put_in_group, send_all

import outbox
from dispatchers import Delivered, Delivery, Limits, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause
from dispatchers.flow_control import fair_share
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_postgresql, claims_rows
from dispatchers.store.queue import fair_share as store_fair_share
from dispatchers.transitions import Settle
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

RING = outbox.Keyring({"k1": bytes(range(32))}, current="k1")


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox.Outbox(RING, env="test", fair={"crm"})


@pytest.fixture
def unfair() -> outbox.Outbox:
    """The app before the destination was declared fair."""
    return outbox.Outbox(RING, env="test")


@pytest.fixture
def bench(database: Database, ob: outbox.Outbox) -> Bench:
    return Bench(database, ob)


# --- the contents of the queue


def test_only_a_fair_destinations_entries_have_their_scope_in_the_queue(database: Database, ob: outbox.Outbox) -> None:
    ada = outbox.ParentKey("order:1", scope="ada")
    with database.begin() as session:
        ob.enqueue(session, "crm.upsert", {}, parent=ada)
        ob.enqueue(session, "crm.upsert", {}, parent="order:2")
        ob.enqueue(session, "crm.upsert", {}, parent=ada, discriminator="group", ordering_key="a")
        ob.enqueue(session, "mail.send", {}, parent=ada)
        ob.enqueue(session, "mail.send", {}, parent=ada, discriminator="group", ordering_key="a")
        ob.enqueue(session, "mail.send", {}, parent=ada, discriminator="elsewhere", destination="crm")
        ob.enqueue(session, "crm.upsert", {}, parent=ada, discriminator="elsewhere", destination="crm:7")
    with database.begin() as session:
        ob.enqueue(session, "crm.upsert", {}, parent=ada, discriminator="alone")

    found = Counter((row.destination, row.fair, row.scope, row.ordering_key) for row in database.queue)
    assert found == {
        ("crm", "crm", "ada", None): 3,
        ("crm", "crm", "", None): 1,
        ("crm", "crm", "ada", "a"): 1,
        ("mail", None, None, None): 1,
        ("mail", None, None, "a"): 1,
        ("crm:7", None, None, None): 1,
    }


# --- who gets how much


def test_the_portable_sql_shares_out_on_postgresql_too(postgresql: Database, ob: outbox.Outbox) -> None:
    bench = Bench(postgresql, ob)
    bench.store._exchanges._sql = claims_rows
    bench.flood("big", 30)
    bench.put("small")

    assert [bench.claim(10), bench.claim(1), bench.claim(30)] == [{"big": 9, "small": 1}, {"big": 1}, {"big": 20}]


def test_without_fair_share_the_oldest_go_first(bench: Bench, unfair: outbox.Outbox) -> None:
    bench.flood("big", 100, ob=unfair)
    for _ in range(3):
        bench.put("small", ob=unfair)

    assert bench.claim(64) == {"big": 64}


def test_big_scopes_share_what_small_ones_leave_and_each_sends_its_oldest(bench: Bench) -> None:
    big = bench.flood("big", 100)  # the later in the list, the older
    bench.flood("other", 100)
    bench.put("small")

    claimed = claim(bench.store, quota(permits=21))

    assert bench.counted(claimed) == {"big": 10, "other": 10, "small": 1}
    assert {entry.id for entry in claimed if bench.of[entry.id] == "big"} == set(big[-10:])


def test_one_permit_at_a_time_goes_round(bench: Bench) -> None:
    bench.flood("big", 50)
    bench.flood("other", 2)
    bench.put("small")

    order = [next(iter(bench.claim(1))) for _ in range(7)]

    assert order == ["big", "other", "small", "big", "other", "big", "big"]


def test_tenants_after_many_with_nothing_due_are_found_within_a_round(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fair_share, store_fair_share):
        monkeypatch.setattr(module, "MAX_SCOPES", 5)
    bench.flood("big", 150)
    for number in range(30):
        bench.put(f"tenant {number:02}", due=HOUR if number % 6 else None)

    rounds = Counter[str]()
    for _ in range(7):  # 31 scopes, 5 looked at in each
        rounds += bench.claim(20)

    assert set(rounds) == {"big", *(f"tenant {number:02}" for number in range(0, 30, 6))}
    assert sum(rounds.values()) >= 7 * 16  # permits that no other scope uses go to the oldest


def test_a_claim_keeps_entries_max_and_serves_fair_destinations_and_others(bench: Bench) -> None:
    bench.flood("big", 100)
    bench.put("small")
    for _ in range(4):
        put_one(bench.database, bench.ob, "mail.send", parent=f"mail:{next(numbers)}")

    few = claim(bench.store, quota("crm", 8), quota("mail", 4), max_entries=5)
    more = claim(bench.store, quota("crm", 8), quota("mail", 4), quota("sms", 4))
    none = claim(bench.store, quota("crm", 8), max_entries=0)

    assert [entry.destination for entry in few] == ["crm"] * 5
    assert bench.counted(few) == {"big": 4, "small": 1}
    assert Counter(entry.destination for entry in more) == {"crm": 8, "mail": 4}
    assert none == []


def test_what_came_due_after_the_cutoff_counts_for_nothing(bench: Bench) -> None:
    bench.flood("big", 20)
    late = bench.put("late")
    cutoff = queue_row(bench.database, late).due_at - MOMENT

    assert bench.claim(10, cutoff=cutoff) == {"big": 10}
    assert bench.claim(10) == {"big": 9, "late": 1}


def test_a_hint_that_the_newest_have_moved_on_hides_nothing_that_is_older(bench: Bench) -> None:
    """A dispatcher's own hint is the latest due time it was handed: of a small tenant, after all that a big one waits for."""
    bench.flood("big", 100)
    bench.put("small")

    assert bench.claim(10)["small"] == 1
    assert bench.counted(claim(bench.store, quota(permits=10, due_from=NEVER))) == {"big": 10}


# --- what a claim has always done


def test_an_expired_lease_goes_over_in_its_scopes_turn_and_leaves_doubt(bench: Bench) -> None:
    small = bench.put("small")
    bench.claim(1)
    bench.flood("big", 100)
    age(bench.database, HOUR)

    claimed = {entry.id: entry for entry in claim(bench.store, quota(permits=10))}

    assert bench.counted(list(claimed.values())) == {"big": 9, "small": 1}
    assert (claimed[small].deliveries, claimed[small].attempts, claimed[small].maybe_sent) == (2, 1, True)


@pytest.mark.parametrize(
    "not_ready",
    [
        {"due_at": NEVER, "suspended_reason": "paused"},
        {"state": "uncertain", "due_at": NEVER, "maybe_sent": True},
        {"state": "sending", "lease_token": uuid4(), "lease_until": NEVER, "leased_at": NEVER},
    ],
    ids=["suspended", "uncertain", "leased"],
)
def test_what_is_not_to_be_sent_now_has_no_turn(bench: Bench, not_ready: dict[str, Any]) -> None:
    change(bench.database, bench.put("suspended"), **not_ready)
    bench.flood("big", 20)
    bench.put("small")

    assert bench.claim(13) == {"big": 12, "small": 1}
    assert bench.claim(8) == {"big": 8}
    assert bench.claim(8) == {}


def test_of_a_paused_fair_destination_only_what_was_admitted_is_claimed(bench: Bench) -> None:
    bench.flood("big", 20)
    bench.put("small")
    with bench.database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada", reason=None)

    assert bench.claim(10) == {}
    admitted = claim(bench.store, quota(permits=4)._replace(admitted=True))
    assert bench.counted(admitted) == {"big": 3, "small": 1}


def test_a_suspended_database_hands_out_nothing(bench: Bench) -> None:
    bench.flood("big", 20)
    bench.database.execute(sa.insert(TABLES.meta).values(id=1, suspended_reason="it was restored"))

    assert bench.claim(10) == {}


def test_the_entries_of_a_group_stay_in_order(database: Database, ob: outbox.Outbox) -> None:
    for number in range(5):
        for scope in ("zoe", "ada"):
            parent = outbox.ParentKey(f"change:{number}", scope=scope)
            put_in_group(database, ob, f"{number} {scope}", group="one for all", parent=parent)
    service = OrderedService()

    send_all(database, ob, service)

    assert service.came["one for all"] == [f"{number} {scope}" for number in range(5) for scope in ("zoe", "ada")]


# --- switched on, and off


def test_what_was_enqueued_before_the_switch_is_one_scope(bench: Bench, unfair: outbox.Outbox) -> None:
    bench.flood("before", 100, ob=unfair)
    bench.flood("big", 100)
    bench.put("small")

    assert bench.claim(17) == {"big": 8, "small": 1, "before": 8}
    assert bench.claim(1) + bench.claim(1) + bench.claim(1) + bench.claim(1) == {"big": 2, "before": 2}


def test_what_an_app_enqueues_before_it_knows_of_the_switch_is_sent(bench: Bench, unfair: outbox.Outbox) -> None:
    bench.flood("big", 100)
    bench.put("untold", ob=unfair)
    bench.flood("big", 100)

    claims = 0
    while "untold" not in bench.claim(10):
        claims += 1

    assert claims <= 10  # no longer than it would wait elsewhere


def test_switched_off_again_everything_is_sent_the_oldest_first(bench: Bench, unfair: outbox.Outbox) -> None:
    bench.flood("big", 20)
    bench.put("small")
    bench.put("new", ob=unfair)
    bench.store = DatabaseStore(bench.database.engine, unfair.configuration)

    assert bench.claim(16) == {"big": 16}
    assert bench.claim(16) == {"big": 4, "small": 1, "new": 1}


# --- the whole dispatcher


def test_a_dispatcher_sends_a_small_tenants_entries_first_and_all_others(database: Database, ob: outbox.Outbox) -> None:
    bench = Bench(database, ob)
    bench.flood("big", 200)
    small = {bench.put("small") for _ in range(3)}
    order: list[UUID] = []

    class Noting(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            order.append(delivery.id)
            return Delivered()

    assert run_once(database, ob, adapters={"crm": Noting()}, limits={"crm": Limits(concurrency=40)}) == 203

    assert small <= set(order[:60])  # two claims of half the permits each, and what the first of them sent meanwhile
    assert len(set(order)) == 203


def test_what_a_callback_enqueues_has_its_turn_too(postgresql: Database, ob: outbox.Outbox) -> None:
    effects = Operations()

    @effects.operation("crm")
    async def send(delivery: Delivery) -> Delivered:
        return Delivered()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        ob.enqueue(session, "crm.note", {}, due=HOUR)

    put_one(postgresql, ob, parent=outbox.ParentKey("order:1", scope="ada"))
    run_once(postgresql, ob, include=[effects])

    (row,) = postgresql.queue
    assert (row.destination, row.scope) == ("crm", "ada")


def test_an_async_engine_shares_out_alike(database: Database, ob: outbox.Outbox) -> None:
    bench = Bench(database, ob)
    bench.flood("big", 100)
    bench.put("small")
    bench.store = DatabaseStore(database.async_engine(), ob.configuration)

    assert bench.claim(10) == {"big": 9, "small": 1}
    asyncio.run(bench.store.close())


# --- at the same time, and in any order


def test_claimers_at_once_never_get_the_same_entry_and_leave_none(postgresql: Database, ob: outbox.Outbox) -> None:
    bench = Bench(postgresql, ob)
    ids = bench.flood("big", 150)
    for number in range(50):
        ids.append(bench.put(f"tenant {number % 12}"))

    taken = [entry.id for entry in claim_at_once(postgresql, ob, permits=7)]

    assert sorted(taken) == sorted(ids)
    assert {row.deliveries for row in postgresql.queue} == {1}


def test_an_uncommitted_claim_keeps_from_others_only_what_it_takes(postgresql: Database, ob: outbox.Outbox) -> None:
    bench = Bench(postgresql, ob)
    for scope in ("ada", "ben"):
        bench.flood(scope, 2)

    with postgresql.engine.begin() as connection:
        first = claims_postgresql.claim(
            connection, TABLES, claim_request(quota(permits=2)), fair_share.FairCursor({"crm"})
        )
        assert bench.counted(first) == {"ada": 1, "ben": 1}
        assert bench.claim(2) == {"ada": 1, "ben": 1}


@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "mariadb"])
def test_whatever_waits_everybody_gets_a_fair_share_and_nothing_is_left(
    request: pytest.FixtureRequest, ob: outbox.Outbox, unfair: outbox.Outbox, kind: str
) -> None:
    bench = Bench(request.getfixturevalue(kind), ob)

    @settings(max_examples=divided(over=2), deadline=None)
    @given(
        waiting=st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 12), min_size=1),
        untold=st.integers(0, 10),
        permits=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    )
    def share_and_drain(waiting: dict[str, int], untold: int, permits: list[int]) -> None:
        for table in (TABLES.entry, TABLES.queue):
            bench.database.execute(table.delete())
        bench.store = DatabaseStore(bench.database.engine, ob.configuration)  # no scope's turn is known
        left = Counter(waiting)
        for scope, count in waiting.items():
            bench.flood(scope, count)
        if untold:
            left["untold"] = untold
            bench.flood("untold", untold, ob=unfair)
        claims = iter(permits)
        while left.total():
            most = next(claims, 8)
            claimed = claim(bench.store, quota(permits=most))
            got = bench.counted(claimed)
            assert 0 < got.total() <= most
            assert got <= left
            for scope in +left - Counter({"untold": left["untold"]}):
                assert got[scope] >= min(left[scope], most // len(+left)) or left.total() <= most
            left -= got
            settle(bench.store, *((entry, Settle("delivered", 1)) for entry in claimed))

    share_and_drain()
    assert bench.database.queue == []
