"""A leased claim that is taken over or renewed: the same child keys for both owners, and one answer, the second one's."""

import asyncio
import logging
import threading
from datetime import timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from sqlalchemy.exc import OperationalError
from support.daemons import wait_for
from support.database import REQUEST, TABLES, Order
from support.leases import KEY, Shop, charge_key
from support.retention import shift

import outbox
from outbox.requests import lease_records, lease_renewal
from outbox.requests.lease_renewal import TaskRenewal, ThreadRenewal, retries_after

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

LEASED = {"orders": 0, "records": 1, "entries": 0, "queue": 0}
LOST = (
    "the lease on key 'retry-001' expired and another attempt took the request over: nothing of this attempt is stored. Both"
    " attempts used the same child keys at outside services. The client must send the request again"
)


@pytest.fixture(params=["sync", "async"])
def shop(request, database, ob):
    return Shop(database, ob, is_async=request.param == "async")


@pytest.fixture
def other(database, ob):
    """Another process, asked in the middle of a request."""
    return Shop(database, ob)


def fail(claim):
    raise ZeroDivisionError


def test_who_takes_over_has_the_same_child_keys_also_after_a_rotation(shop, database):
    keys = []
    rotated = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32)), "k2": bytes(32)}, current="k2"), env="test")

    def note_and_fail(claim):
        keys.append(charge_key(claim))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.request(note_and_fail)
    Shop(database, rotated, is_async=shop.is_async).request(lambda claim: keys.append(charge_key(claim)))

    assert len(keys) == 2
    assert len(set(keys)) == 1
    (entry,) = database.entries
    assert entry.kid == "k1"


def test_a_key_ring_without_the_first_attempts_secret_takes_nothing_over(database, ob):
    with pytest.raises(ZeroDivisionError):
        Shop(database, ob).request(fail)
    before = database.records
    stranger = outbox.Outbox(outbox.Keyring({"k2": bytes(32)}), env="test")

    with pytest.raises(outbox.ConfigurationError, match="no secret for kid 'k1'; the key ring has"):
        Shop(database, stranger).request(fail)

    assert database.records == before


def test_a_slow_owner_cannot_answer_after_the_take_over(shop, other, database):
    def be_overtaken(claim):
        other.run_out()
        assert other.request(write=lambda session, fence: fence.respond(200, "the second's")).status == 200

    with pytest.raises(outbox.LeaseLost) as caught:
        shop.request(be_overtaken)

    assert str(caught.value) == LOST
    assert database.counts() == LEASED
    assert other.request(fail).body == b"the second's"


def test_a_slow_owner_cannot_answer_while_the_second_attempt_works(shop, other, database):
    def be_overtaken(claim):
        other.run_out()
        other.block(database.engine).__enter__()

    with pytest.raises(outbox.LeaseLost):
        shop.request(be_overtaken)

    with pytest.raises(outbox.KeyInFlight):  # the slow owner has not ended a lease that is not its own
        other.request()


def test_a_transaction_that_lost_its_lease_cannot_commit_despite_a_catch(database, ob):
    shop = Shop(database, ob)
    claim = shop.block(database.engine).__enter__()
    shop.run_out()
    shop.request(write=lambda session, fence: fence.respond(200))

    with database.session() as session:
        session.add(Order(customer="ada", amount=2000))
        with pytest.raises(outbox.LeaseLost):
            claim.fence(session).__enter__()
        with pytest.raises(outbox.LeaseLost):
            session.commit()

    assert database.orders == []


def test_respond_and_renew_after_a_take_over_raise_and_change_nothing(database, ob):
    shop = Shop(database, ob)
    claim = shop.block(database.engine).__enter__()
    shop.run_out()
    shop.request(write=lambda session, fence: fence.respond(200, "the second's"))
    before = database.records

    with pytest.raises(outbox.LeaseLost):
        claim.respond(500)
    with pytest.raises(outbox.LeaseLost):
        claim.renew()

    assert database.records == before
    assert claim.response is None


def test_an_awaited_respond_or_renew_after_a_take_over_changes_nothing(database, ob):
    shop, other = Shop(database, ob, is_async=True), Shop(database, ob)

    async def be_overtaken():
        async with shop.block(database.async_engine()) as claim:
            other.run_out()
            other.request(write=lambda session, fence: fence.respond(200, "the second's"))
            with pytest.raises(outbox.LeaseLost):
                await claim.renew()
            await claim.respond(500)

    with pytest.raises(outbox.LeaseLost):
        asyncio.run(be_overtaken())

    assert shop.record().body == b"the second's"


def test_a_lease_that_ran_out_and_was_not_taken_over_still_answers(shop, other):
    assert shop.request(lambda claim: other.run_out()).status == 201


def test_while_a_fence_is_open_no_request_takes_over_even_after_the_lease(database, ob):
    shop = Shop(database, ob)
    impatient = database.new_engine(connect_args={"timeout": 0.05} if database.name == "sqlite" else {})

    with shop.block(database.engine) as claim:
        shop.run_out()
        with database.begin() as session, claim.fence(session) as fence:
            with pytest.raises(outbox.KeyInFlight):
                shop.block(impatient).__enter__()
            fence.respond(201)

    assert shop.request(fail).status == 201


def test_an_unfinished_request_past_its_retry_window_is_not_taken_over(shop):
    """What an earlier attempt did may be forgotten by the service: the same key would do it again."""
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    shift(shop.database, TABLES.record.c.replay_until, timedelta(hours=25))

    with pytest.raises(outbox.KeyExpired):
        shop.request()
    with pytest.raises(outbox.KeyExpired), shop.database.begin() as session:
        shop.ob.idempotent(session, KEY, scope="acct_1", content=REQUEST).__enter__()


def test_taking_over_does_not_move_the_retry_window(shop):
    with pytest.raises(ZeroDivisionError):
        shop.request(fail)
    before = shop.record().replay_until

    with pytest.raises(ZeroDivisionError):
        shop.request(fail)

    assert shop.record().replay_until == before


def test_renewing_begins_a_new_lease(database, ob):
    shop = Shop(database, ob)
    with shop.block(database.engine) as claim:
        shop.run_out()
        claim.renew()
        with pytest.raises(outbox.KeyInFlight):
            shop.request()
        claim.respond(201)


def test_a_lease_that_is_renewed_while_another_attempt_stalls_is_kept(postgresql, ob, monkeypatch):
    """The other attempt has read that the lease ran out; before it writes, the lease is renewed."""
    shop = Shop(postgresql, ob)
    read = lease_records._standing_lease
    with shop.block(postgresql.engine) as claim:
        shop.run_out()

        def stall(connection, key):
            current = read(connection, key)
            claim.renew()
            return current

        monkeypatch.setattr(lease_records, "_standing_lease", stall)
        with pytest.raises(outbox.KeyInFlight):
            shop.request()
        claim.respond(201)


# --- A lease that is renewed in the background: for as long as it was asked, and not a moment after it is lost or answered.


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
