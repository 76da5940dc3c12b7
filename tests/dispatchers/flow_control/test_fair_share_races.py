"""Claims of a fair destination at the same time and in any order: no entry twice, none left, everybody a fair share."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import claim, claim_at_once, claim_request, quota, settle
from support.examples import divided
from support.fair_share import Bench

import outbox
from dispatchers.flow_control import fair_share
from dispatchers.store import claims_postgresql
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle

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
