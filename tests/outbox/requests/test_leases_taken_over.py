"""A leased claim that is taken over: the same child keys for both owners, and one answer, the second one's."""

import asyncio
from datetime import timedelta

import pytest
from support.database import REQUEST, TABLES, Order
from support.leases import KEY, Shop, charge_key
from support.retention import shift

import outbox
from outbox.requests import lease_records

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
