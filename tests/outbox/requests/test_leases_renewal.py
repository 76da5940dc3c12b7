"""A lease that is renewed in the background: for as long as it was asked, and not a moment after it is lost or answered."""

import asyncio
import logging
import threading
from datetime import timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from sqlalchemy.exc import OperationalError
from support.daemons import wait_for
from support.database import TABLES
from support.leases import Shop

import outbox
from outbox.requests import lease_renewal
from outbox.requests.lease_renewal import TaskRenewal, ThreadRenewal, retries_after

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

RECORD = UUID(int=1)
HOUR = timedelta(hours=1)
SHORT = timedelta(seconds=1)  # the shortest lease that may be asked for
TINY = timedelta(milliseconds=3)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "outbox-lease"]


def lease_until(shop):
    return shop.record().lease_until


def test_a_thread_renews_until_the_block_ends(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine, lease=SHORT, renew_for=HOUR) as claim:
        first = lease_until(shop)
        assert wait_for(lambda: lease_until(shop) > first, "a renewal")
        claim.respond(201)

    assert threads() == []


def test_a_task_renews_until_the_block_ends(database, ob):
    shop = Shop(database, ob)

    async def handle():
        async with shop.block(database.async_engine(), lease=SHORT, renew_for=HOUR) as claim:
            first = lease_until(shop)
            await asyncio.to_thread(wait_for, lambda: lease_until(shop) > first, "a renewal")
            await claim.respond(201)
        return [task.get_name() for task in asyncio.all_tasks()]

    assert "outbox-lease" not in asyncio.run(handle())


def test_without_being_asked_nothing_renews(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        assert threads() == []
        claim.respond(201)


def test_a_replay_renews_nothing(database, ob):
    shop = Shop(database, ob)
    shop.request()

    with shop.block(database.engine, renew_for=HOUR) as claim:
        assert claim.replayed
        assert threads() == []


def test_a_renewal_beside_an_open_fence_waits_for_no_one_and_is_no_loss(postgresql, ob):
    shop = Shop(postgresql, ob)
    with (
        shop.block(postgresql.engine) as claim,
        postgresql.begin() as session,
        claim.fence(session) as fence,
    ):
        claim.renew()
        fence.respond(201)

    assert shop.record().state == "succeeded"


def test_after_its_own_answer_a_renewal_ends_quietly(database, ob, caplog):
    shop = Shop(database, ob)
    with shop.block(database.engine, lease=SHORT, renew_for=HOUR) as claim:
        (thread,) = threads()
        claim.respond(201)
        thread.join(60)
        assert not thread.is_alive()

    assert caplog.records == []


def test_a_lost_lease_is_logged_once_and_not_taken_back(database, ob, caplog):
    shop = Shop(database, ob)
    thief = uuid4()
    block = shop.block(database.engine, lease=SHORT, renew_for=HOUR)
    claim = block.__enter__()
    (thread,) = threads()
    database.execute(TABLES.record.update().values(lease_token=thief))

    thread.join(60)

    assert not thread.is_alive()
    with pytest.raises(outbox.LeaseLost) as caught:
        claim.respond(201)
    block.__exit__(outbox.LeaseLost, caught.value, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"lease of request {shop.record().id} lost: another attempt took it over; this attempt stores nothing"
    ]
    assert shop.record().lease_token == thief


# --- the pace, and the end, without a database


@pytest.fixture
def renewals(monkeypatch):
    """Each takes a minute, of the clock that ends them."""
    renewals = []
    monkeypatch.setattr(lease_renewal, "time", SimpleNamespace(monotonic=lambda: 60 * len(renewals)))
    return renewals


def test_a_thread_gives_up_after_the_time_that_it_was_given(renewals):
    renewal = ThreadRenewal(lambda: renewals.append(1), RECORD, TINY, timedelta(minutes=3))

    wait_for(lambda: not threads(), "the thread to end by itself")

    assert len(renewals) == 3
    renewal.stop()


def test_a_task_gives_up_after_the_time_that_it_was_given(renewals):
    async def renew():
        renewals.append(1)

    async def main():
        TaskRenewal(renew, RECORD, TINY, timedelta(minutes=3))
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        await task

    asyncio.run(main())

    assert len(renewals) == 3


def broken():
    raise OperationalError("UPDATE", {"token": "secret"}, OSError("gone"))


def test_a_database_that_is_unavailable_is_asked_again(caplog):
    """The parameters that a driver's error shows are not logged."""
    tried = threading.Event()
    tries = []

    def renew():
        tries.append(1)
        if len(tries) < 3:
            broken()
        tried.set()

    renewal = ThreadRenewal(renew, RECORD, TINY, HOUR)
    assert tried.wait(60)
    renewal.stop()

    assert {record.getMessage() for record in caplog.records} == {
        f"cannot renew the lease of request {RECORD}: OperationalError; retried before it expires"
    }


def test_a_task_asks_again_and_ends_when_the_lease_is_lost():
    failures = [OSError(), OSError(), outbox.LeaseLost()]

    async def renew():
        raise failures.pop(0)

    async def main():
        TaskRenewal(renew, RECORD, TINY, HOUR)
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        await task

    asyncio.run(main())

    assert failures == []


@pytest.mark.parametrize(
    ("error", "again", "warnings"),
    [(outbox.AlreadyAnswered(), False, 0), (outbox.LeaseLost(), False, 1), (OSError(), True, 1)],
)
def test_only_what_may_pass_is_tried_again(caplog, error, again, warnings):
    with caplog.at_level(logging.INFO):
        assert retries_after(error, RECORD) is again

    assert len(caplog.records) == warnings
