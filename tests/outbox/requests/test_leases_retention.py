"""A request that was abandoned under a lease: deleted in the end, and its key refused for as long as a service may know it."""

from datetime import timedelta

import pytest
from support.database import PAYLOAD, REQUEST, Database, Order
from support.leases import RECEIPT, Shop
from support.retention import DAY, RETENTION, clean, elapse, kept, settle_all

import outbox
from dispatchers.maintenance.retention import BEHIND

AUDIT = timedelta(days=30)


@pytest.fixture
def shop(database: Database, ob: outbox.Outbox) -> Shop:
    return Shop(database, ob)


def abandon(shop: Shop) -> None:
    """No client repeats the request after this attempt."""

    def fail(claim: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.request(fail)


def test_an_abandoned_request_is_kept_for_the_audit_window_and_then_goes(shop: Shop, database: Database) -> None:
    abandon(shop)
    elapse(database, AUDIT - DAY)
    assert not clean(database)

    elapse(database, 2 * DAY)

    assert clean(database) == {"records": 1}


def test_its_key_is_refused_as_long_as_a_service_may_remember_the_call(shop: Shop, database: Database) -> None:
    abandon(shop)
    elapse(database, AUDIT + DAY)
    clean(database)
    assert kept(database) == {"tombstone": 1}

    with pytest.raises(outbox.KeyExpired):
        shop.request()
    elapse(database, RETENTION + BEHIND - AUDIT)
    clean(database)

    assert kept(database) == {}
    assert shop.request().status == 201


def test_a_request_whose_lease_holds_is_never_deleted(shop: Shop, database: Database) -> None:
    with shop.block(database.engine, lease=timedelta(days=400)) as claim:
        elapse(database, 300 * DAY)
        assert not clean(database)
        claim.respond(201)


def test_an_abandoned_request_stays_while_an_entry_of_it_is_unsettled(
    shop: Shop, database: Database, ob: outbox.Outbox
) -> None:
    block = shop.block(database.engine)
    claim = block.__enter__()
    with database.begin() as session, claim.fence(session):
        session.add(Order(customer="ada", amount=1))
        ob.enqueue(session, RECEIPT, PAYLOAD)
    block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    elapse(database, AUDIT + DAY)
    assert not clean(database)

    settle_all(database)

    assert clean(database) == {"records": 1}


def test_an_owner_whose_record_was_deleted_has_lost_its_lease(shop: Shop, database: Database) -> None:
    claim = shop.block(database.engine).__enter__()
    elapse(database, AUDIT + DAY)
    clean(database)

    with pytest.raises(outbox.LeaseLost):
        claim.respond(201)


def test_an_answered_leased_request_goes_as_any_other(shop: Shop, database: Database) -> None:
    shop.request(content=REQUEST)
    settle_all(database)

    elapse(database, AUDIT + DAY)

    assert clean(database) == {"records": 1}
