"""Settlements: one suite over PostgreSQL, SQLite, MariaDB, and the portable SQL on PostgreSQL."""

import asyncio

import pytest
from support.claims import MINUTE, Bench, moves
from support.database import TABLES
from support.entries import (
    HOUR,
    claim,
    claim_one,
    claim_request,
    put,
    quota,
    reasons,
    settle,
    settlement_row,
)

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_rows
from dispatchers.transitions import Release


@pytest.fixture(params=["postgresql", "portable on postgresql", "sqlite", "mariadb"])
def bench(request: pytest.FixtureRequest, ob: outbox.Outbox) -> Bench:
    database = request.getfixturevalue(request.param.rpartition(" ")[2])
    store = DatabaseStore(database.engine, ob.configuration)
    if request.param.startswith("portable"):
        store._exchanges._sql = claims_rows
    return Bench(database, store, ob)


def test_delivered_ends_the_entry_with_its_result(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)

    assert settle(bench.store, (entry, moves(entry)["delivered"])) == {id}

    row = settlement_row(bench.database, id)
    assert bench.row(id) is None
    assert tuple(row)[:-1] == (id, "delivered", '{"id": "ch_1"}', None, 1, 1, 0)
    assert abs(row.settled_at - entry.leased_at) < MINUTE
    assert reasons(bench.database, id) == []


def test_a_batch_settles_each_entry_in_its_own_way(bench: Bench) -> None:
    ids = put(bench.database, bench.ob, count=5)
    claimed = {entry.id: entry for entry in claim(bench.store)}
    batch = [(claimed[id], moves(claimed[id])[kind]) for id, kind in zip(ids, moves(claimed[ids[0]]), strict=True)]

    assert settle(bench.store, *batch) == set(ids)

    ended = [settlement_row(bench.database, id).state for id in ids[:2]]
    waiting = [bench.row(id).state for id in ids[2:]]
    assert ended + waiting == ["delivered", "failed", "retry", "uncertain", "pending"]


# --- a stale lease


def test_settling_twice_settles_once(bench: Bench) -> None:
    ids = put(bench.database, bench.ob, count=5)
    claimed = {entry.id: entry for entry in claim(bench.store)}
    batch = [(claimed[id], moves(claimed[id])[kind]) for id, kind in zip(ids, moves(claimed[ids[0]]), strict=True)]

    assert settle(bench.store, *batch) == set(ids)
    assert settle(bench.store, *batch) == set()

    assert len(bench.database.rows(TABLES.event)) == 3


def test_one_exchange_settles_and_then_claims(bench: Bench) -> None:
    _, second = bench.put(), bench.put()
    (entry,) = claim(bench.store, quota(permits=1))

    exchange = asyncio.run(bench.store.exchange([(entry, Release("not now", HOUR))], claim_request()))

    assert exchange.settled == {entry.lease}
    assert [claimed.id for claimed in exchange.claimed] == [second]
