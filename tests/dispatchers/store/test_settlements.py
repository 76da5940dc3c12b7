"""Settlements: one suite over PostgreSQL, SQLite, MariaDB, and the portable SQL on PostgreSQL."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import pytest
from support.claims import MINUTE, Bench, moves
from support.database import TABLES
from support.entries import (
    HOUR,
    NO_LEASE,
    age,
    change,
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
from dispatchers.stored_outcome import write_outcome
from dispatchers.transitions import Release, Retry
from outbox.times import NEVER


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


def test_failed_ends_the_entry_with_its_reason_and_a_note(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)

    settle(bench.store, (entry, moves(entry)["failed"]))

    assert tuple(settlement_row(bench.database, id))[:-1] == (id, "failed", None, "declined", 1, 1, 0)
    assert reasons(bench.database, id) == ["declined"]


def test_an_entry_that_waits_keeps_its_doubt_and_is_due_after_the_delay(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store, forms={"crm": "native"})

    settle(bench.store, (entry, moves(entry)["retry"]))

    row = bench.row(id)
    assert (row.state, row.deliveries, row.attempts, row.sent_as) == ("retry", 1, 1, "native")
    assert (row.maybe_sent, row.in_doubt_since) == (True, entry.leased_at)
    assert (row.lease_token, row.lease_until, row.leased_at) == (None, None, None)
    assert MINUTE <= row.due_at - entry.leased_at < 2 * MINUTE
    assert row.outcome == write_outcome("slow", deliveries=1)
    (event,) = bench.database.rows(TABLES.event)
    assert (event.entry_id, event.kind, event.delivery, event.actor, event.reason) == (id, "attempt", 1, None, "slow")


def test_an_uncertain_entry_is_never_due_again(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)

    settle(bench.store, (entry, moves(entry)["uncertain"]))

    row = bench.row(id)
    assert (row.state, row.due_at, row.attempts) == ("uncertain", NEVER, 1)
    assert (row.maybe_sent, row.in_doubt_since) == (True, entry.leased_at)
    assert row.lease_token is None
    assert reasons(bench.database, id) == ["vanished"]
    assert claim(bench.store) == []


def test_how_long_an_entry_has_been_tried_counts_from_its_first_lease(bench: Bench) -> None:
    id = bench.put()
    entry = claim_one(bench.store)
    settle(bench.store, (entry, Release("no adapter")))
    assert bench.row(id).first_leased_at is None  # what was never tried has no age

    age(bench.database, HOUR)
    first = claim_one(bench.store)
    settle(bench.store, (first, Retry(timedelta(0), "slow", 1, True, first.leased_at)))
    assert bench.row(id).first_leased_at == first.first_leased_at == first.leased_at

    age(bench.database, HOUR)
    claim_one(bench.store)
    age(bench.database, HOUR)
    third = claim_one(bench.store)
    assert third.leased_at - third.first_leased_at > 1.9 * HOUR


@pytest.mark.parametrize("before", ["pending", "retry"])
def test_what_is_released_without_an_attempt_is_unchanged_and_not_counted(bench: Bench, before: str) -> None:
    id = bench.put()
    if before == "retry":
        entry = claim_one(bench.store)
        settle(bench.store, (entry, Retry(timedelta(0), "slow", 1, True, entry.leased_at)))
        age(bench.database, MINUTE)
    was = bench.row(id)
    entry = claim_one(bench.store)

    settled = settle(bench.store, (entry, Release("no adapter", MINUTE)))

    row = bench.row(id)
    assert settled == {id}
    assert row.state == was.state == before
    for name in ("deliveries", "attempts", "maybe_sent", "in_doubt_since", "lease_token", "outcome", "key_epoch"):
        assert getattr(row, name) == getattr(was, name)
    assert MINUTE <= row.due_at - entry.leased_at < 2 * MINUTE
    assert len(reasons(bench.database, id)) == (before == "retry")


def test_what_a_claim_took_over_is_released_with_the_doubt_that_it_found(bench: Bench) -> None:
    id = bench.put()
    claim_one(bench.store)
    age(bench.database, HOUR)
    entry = claim_one(bench.store)

    settle(bench.store, (entry, Release("no adapter")))

    row = bench.row(id)
    assert (row.state, row.deliveries, row.attempts) == ("retry", 1, 1)
    assert (row.maybe_sent, row.in_doubt_since) == (True, entry.in_doubt_since)


def test_a_batch_settles_each_entry_in_its_own_way(bench: Bench) -> None:
    ids = put(bench.database, bench.ob, count=5)
    claimed = {entry.id: entry for entry in claim(bench.store)}
    batch = [(claimed[id], moves(claimed[id])[kind]) for id, kind in zip(ids, moves(claimed[ids[0]]), strict=True)]

    assert settle(bench.store, *batch) == set(ids)

    ended = [settlement_row(bench.database, id).state for id in ids[:2]]
    waiting = [bench.row(id).state for id in ids[2:]]
    assert ended + waiting == ["delivered", "failed", "retry", "uncertain", "pending"]


def test_attempts_never_decrease(bench: Bench) -> None:
    id = bench.put()
    late = claim_one(bench.store)
    for _ in range(3):
        age(bench.database, HOUR)
        claim_one(bench.store)

    settle(bench.store, (late, moves(late)["delivered"]))

    row = settlement_row(bench.database, id)
    assert (row.attempts, row.deliveries) == (3, 4)


# --- a stale lease


def taken_over_by_another(bench: Bench, id: UUID) -> None:
    age(bench.database, HOUR)
    claim_one(bench.store)


def waiting_again(bench: Bench, id: UUID) -> None:
    taken_over_by_another(bench, id)
    change(bench.database, id, state="retry", **NO_LEASE)


def uncertain_by_now(bench: Bench, id: UUID) -> None:
    taken_over_by_another(bench, id)
    change(bench.database, id, state="uncertain", due_at=NEVER, **NO_LEASE)


def pending_again(bench: Bench, id: UUID) -> None:
    change(bench.database, id, state="pending", **NO_LEASE)


SINCE: list[Callable[[Bench, UUID], None]] = [taken_over_by_another, waiting_again, uncertain_by_now, pending_again]


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("kind", ["failed", "retry", "uncertain", "released"])
def test_a_stale_lease_settles_nothing(bench: Bench, since: Callable[[Bench, UUID], None], kind: str) -> None:
    id = bench.put()
    stale = claim_one(bench.store)
    since(bench, id)
    before = bench.row(id)

    assert settle(bench.store, (stale, moves(stale)[kind])) == set()

    assert bench.row(id) == before
    assert settlement_row(bench.database, id) is None
    assert reasons(bench.database, id) == []


@pytest.mark.parametrize("since", SINCE[:3])
def test_a_late_proof_of_success_is_kept(bench: Bench, since: Callable[[Bench, UUID], None]) -> None:
    id = bench.put()
    stale = claim_one(bench.store)
    since(bench, id)

    assert settle(bench.store, (stale, moves(stale)["delivered"])) == {id}

    assert bench.row(id) is None
    assert settlement_row(bench.database, id).state == "delivered"
    assert settlement_row(bench.database, id).result == '{"id": "ch_1"}'


@pytest.mark.parametrize("since", SINCE)
def test_a_late_success_under_another_key_proves_nothing(bench: Bench, since: Callable[[Bench, UUID], None]) -> None:
    id = bench.put()
    stale = claim_one(bench.store)
    since(bench, id)
    change(bench.database, id, key_epoch=1)
    before = bench.row(id)

    assert settle(bench.store, (stale, moves(stale)["delivered"])) == set()

    assert bench.row(id) == before


def test_a_late_success_does_not_end_what_is_pending_again(bench: Bench) -> None:
    id = bench.put()
    stale = claim_one(bench.store)
    pending_again(bench, id)

    assert settle(bench.store, (stale, moves(stale)["delivered"])) == set()

    assert bench.row(id).state == "pending"


def test_after_a_late_success_the_other_sender_settles_nothing(bench: Bench) -> None:
    id = bench.put()
    stale = claim_one(bench.store)
    age(bench.database, HOUR)
    fresh = claim_one(bench.store)
    settle(bench.store, (stale, moves(stale)["delivered"]))

    for change_ in moves(fresh).values():
        assert settle(bench.store, (fresh, change_)) == set()

    assert settlement_row(bench.database, id).state == "delivered"


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
