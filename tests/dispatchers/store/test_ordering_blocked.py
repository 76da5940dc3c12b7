"""An ordering group after a bad end of its head: it blocks until an operator releases it, or it continues."""

import asyncio
from uuid import UUID

import pytest
from support.database import TABLES, Database
from support.entries import HOUR, LEASE, age, change, claim, claim_one, queue_row, run_once, state
from support.lookups import keyless, look_up
from support.ordering import BUSY, OrderedService, blocked, decide, put_in_group, send_all, states_of

import outbox
from dispatchers import Absent, CannotTell, KeyConflict, Outcome, Rejected
from dispatchers.admin.decide import decisions
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import MarkUncertain, Settle
from outbox.sql.clock import clock

pytestmark = pytest.mark.on_mariadb

REFUSED = Rejected("status 422: no such customer")
CONFLICT = KeyConflict("another request")


def release(database: Database, group: str = "ada") -> None:
    with database.engine.begin() as connection:
        decisions.release_group(connection, TABLES, group, actor="bob", reason="asked")


@pytest.mark.parametrize(("answer", "ends"), [(REFUSED, "failed"), (CONFLICT, "uncertain")])
def test_a_group_blocks_after_a_bad_end_until_an_operator_releases_it(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, answer: Outcome, ends: str
) -> None:
    service = OrderedService(bad=answer)
    ids = put_in_group(database, ob, "bad", "second", "third")

    send_all(database, ob, service)
    put_in_group(database, ob, "fourth")
    send_all(database, ob, service)

    assert states_of(database, ids) == [ends, "blocked", "blocked"]
    assert blocked(database) == {"ada": ids[0]}
    assert f"ordering group 'ada' blocked by entry {ids[0]}: " in caplog.text
    release(database)
    send_all(database, ob, service)

    assert service.came == {"ada": ["bad", "second", "third", "fourth"]}
    assert (blocked(database), state(database, ids[0])) == ({}, ends)


@pytest.mark.parametrize(("answer", "ends"), [(REFUSED, "failed"), (CONFLICT, "uncertain")])
def test_a_group_continues_after_a_bad_end_where_the_adapter_says_so(
    database: Database, ob: outbox.Outbox, answer: Outcome, ends: str
) -> None:
    service = OrderedService(bad=answer)
    service.failure_blocks_group = False
    ids = put_in_group(database, ob, "bad", "second", "third")

    send_all(database, ob, service)

    assert service.came == {"ada": ["bad", "second", "third"]}
    assert states_of(database, ids) == [ends, "delivered", "delivered"]
    assert blocked(database) == {}


def uncertain_head(database: Database, ob: outbox.Outbox, service: OrderedService) -> list[UUID]:
    """A group that an uncertain head blocks, with two that wait."""
    service.answers["bad"] = CONFLICT
    ids = put_in_group(database, ob, "bad", "second", "third")
    send_all(database, ob, service)
    service.answers.clear()
    assert states_of(database, ids) == ["uncertain", "blocked", "blocked"]
    return ids


def test_proof_that_the_head_happened_lifts_the_block(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    ids = uncertain_head(database, ob, service)

    decide(database, decisions.resolve, ids[0], "happened")
    send_all(database, ob, service)

    assert states_of(database, ids) == ["delivered"] * 3
    assert blocked(database) == {}


def test_what_did_not_happen_leaves_the_group_blocked_until_it_is_released(
    database: Database, ob: outbox.Outbox
) -> None:
    service = OrderedService()
    ids = uncertain_head(database, ob, service)

    decide(database, decisions.resolve, ids[0], "did_not_happen")
    send_all(database, ob, service)
    assert states_of(database, ids) == ["failed", "blocked", "blocked"]
    release(database)
    send_all(database, ob, service)

    assert states_of(database, ids) == ["failed", "delivered", "delivered"]


def test_a_decision_on_what_was_passed_by_blocks_nothing_again(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService(second=BUSY)
    ids = uncertain_head(database, ob, service)
    service.answers["second"] = BUSY
    release(database)
    send_all(database, ob, service)

    decide(database, decisions.resolve, ids[0], "did_not_happen")
    send_all(database, ob, service)

    assert states_of(database, ids) == ["failed", "retry", "blocked"]
    assert blocked(database) == {}


def test_what_is_sent_again_goes_before_those_its_group_was_blocked_for(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    ids = uncertain_head(database, ob, service)

    decide(database, decisions.resolve, ids[0], "send_again")
    send_all(database, ob, service)
    assert states_of(database, ids) == ["pending", "blocked", "blocked"]
    age(database, HOUR)
    send_all(database, ob, service)

    assert service.came == {"ada": ["bad", "bad", "second", "third"]}
    assert blocked(database) == {}


def test_what_is_sent_again_in_a_released_group_is_its_head_once_more(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    ids = uncertain_head(database, ob, service)
    service.answers["second"] = BUSY
    release(database)
    send_all(database, ob, service)

    decide(database, decisions.resolve, ids[0], "send_again")
    send_all(database, ob, service)
    service.answers.clear()
    age(database, HOUR)
    send_all(database, ob, service)

    assert service.came == {"ada": ["bad", "second", "bad", "second", "third"]}
    assert states_of(database, ids) == ["delivered"] * 3


def test_what_a_lookup_finds_absent_waits_out_those_that_were_let_by(database: Database, ob: outbox.Outbox) -> None:
    service = keyless("request", finds=[CannotTell("down"), Absent()])
    ids = put_in_group(database, ob, "bad", "second")
    run_once(database, ob, adapters={"crm": service})
    look_up(database, ob, service)
    release(database)
    under_way = claim_one(DatabaseStore(database.engine, ob.configuration))
    change(database, ids[0], due_at=clock())

    run_once(database, ob, adapters={"crm": service})
    run_once(database, ob, adapters={"crm": service})
    absent = queue_row(database, ids[0])
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": service})

    assert under_way.id == ids[1]
    assert (absent.state, absent.deliveries) == ("pending", 3)  # sent once, looked up twice
    assert absent.due_at > under_way.leased_at + LEASE
    assert states_of(database, ids)[0] == "delivered"


def test_late_proof_of_success_lifts_the_block(database: Database, ob: outbox.Outbox) -> None:
    store = DatabaseStore(database.engine, ob.configuration)
    ids = put_in_group(database, ob, "slow", "second")
    (late,) = claim(store)
    age(database, HOUR)
    (taken_over,) = claim(store)
    parked = MarkUncertain("its sender crashed", taken_over.attempts, True, taken_over.in_doubt_since)
    asyncio.run(store.exchange([(taken_over, parked)], None))
    assert blocked(database) == {"ada": ids[0]}

    asyncio.run(store.exchange([(late, Settle("delivered", 1))], None))

    assert blocked(database) == {}
    assert [entry.id for entry in claim(store)] == [ids[1]]


def test_a_blocked_entry_that_is_made_due_by_hand_is_blocked_again(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService(first=BUSY)
    ids = put_in_group(database, ob, "first", "second")
    send_all(database, ob, service)

    change(database, ids[1], due_at=outbox.sql.clock.clock())
    send_all(database, ob, service)

    assert states_of(database, ids) == ["retry", "blocked"]
    assert queue_row(database, ids[1]).deliveries == 0
