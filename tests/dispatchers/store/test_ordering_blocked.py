"""An ordering group after a bad end of its head: it blocks until an operator releases it, or it continues."""

import pytest
from support.database import TABLES, Database
from support.entries import HOUR, LEASE, age, change, claim_one, queue_row, run_once, state
from support.lookups import keyless, look_up
from support.ordering import OrderedService, blocked, put_in_group, send_all, states_of

import outbox
from dispatchers import Absent, CannotTell, KeyConflict, Outcome, Rejected
from dispatchers.admin.decide import decisions
from dispatchers.store.database import DatabaseStore
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
