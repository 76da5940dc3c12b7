"""What a leased claim refuses, by name; who waits for whom, and which of several concurrent requests gets the lease."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.database import ALL, NOTHING, PAYLOAD, Order
from support.leases import RECEIPT, Shop
from support.retention import clean, elapse, settle_all

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]


@pytest.fixture
def shop(database, ob):
    return Shop(database, ob)


def fail(claim):
    raise ZeroDivisionError


# --- settings


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"lease": timedelta(0)},
            "lease datetime.timedelta(0): must be a timedelta of at least 1 s, and 36525 days at most",
        ),
        ({"lease": 60}, "lease 60: must be a timedelta of at least 1 s, and 36525 days at most"),
        (
            {"renew_for": timedelta(0)},
            "renew_for datetime.timedelta(0): must be a timedelta of more than 0 s, and 36525 days at most, or None for no"
            " renewals in the background",
        ),
        (
            {"wait": 5},
            "wait 5: must be a timedelta of 0 s or more, and 36525 days at most, or None to refuse immediately",
        ),
        (
            {"retention": timedelta(0)},
            "retention datetime.timedelta(0): must be a timedelta of more than 0 s, and 36525 days at most",
        ),
        ({"scope": ""}, "scope '': may be empty only for source 'app', not 'http': give the caller's id"),
    ],
)
def test_settings_outside_their_limits_are_refused_by_name(shop, changed, text):
    with pytest.raises(outbox.InvalidValue) as caught:
        shop.request(**changed)

    assert str(caught.value) == text
    assert shop.database.counts() == NOTHING


def test_a_session_is_no_source_of_transactions(shop):
    text = "outbox.leased begins transactions of its own: give it an Engine, an AsyncEngine or a sessionmaker, not {}"
    sessions = sessionmaker(shop.database.engine)
    with shop.database.session() as session:
        for source in (session, scoped_session(sessions), None):
            with pytest.raises(outbox.ClaimError) as caught:
                shop.block(source)
            assert str(caught.value) == text.format(type(source).__name__)


def test_a_source_of_the_other_kind_is_refused(shop):
    async def enter(source):
        async with shop.block(source):
            pass

    asynchronous = shop.database.async_engine()
    for source in (asynchronous, async_sessionmaker(asynchronous)):
        with pytest.raises(outbox.ClaimError) as caught:
            shop.block(source).__enter__()
        kind = type(source).__name__
        assert str(caught.value) == f"'with' needs an Engine or a sessionmaker, not {kind}: use 'async with'"
    for source in (shop.database.engine, sessionmaker(shop.database.engine)):
        with pytest.raises(outbox.ClaimError) as caught:
            asyncio.run(enter(source))
        kind = type(source).__name__
        wanted = f"'async with' needs an AsyncEngine or an async_sessionmaker, not {kind}: use 'with'"
        assert str(caught.value) == wanted


def test_sessionmakers_serve_as_engines_do(shop, database):
    with shop.block(sessionmaker(database.engine)) as claim:
        claim.renew()
        claim.respond(201)

    async def request():
        async with shop.block(async_sessionmaker(database.async_engine()), key="retry-002") as claim:
            await claim.renew()
            await claim.respond(201)

    asyncio.run(request())

    assert [record.state for record in database.records] == ["succeeded", "succeeded"]


def test_an_autocommit_engine_is_refused(postgresql, ob):
    with pytest.raises(outbox.NoTransaction):
        Shop(postgresql, ob).block(postgresql.new_engine(isolation_level="AUTOCOMMIT")).__enter__()


def test_an_unprepared_sqlite_is_refused(sqlite, ob):
    with pytest.raises(outbox.ConfigurationError, match="BEGIN IMMEDIATE"):
        Shop(sqlite, ob).block(sqlite.unprepared_engine()).__enter__()


# --- inside


def test_a_replay_has_no_lease_to_work_under(shop, database):
    shop.request()
    text = "{}: the request with key 'retry-001' has one already. Check claim.replayed first and return claim.response"

    with shop.block(database.engine) as claim, database.session() as session:
        assert claim.replayed
        for verb, work in (
            ("child_key after an answer", lambda: claim.child_key(RECEIPT)),
            ("respond after an answer", lambda: claim.respond(200)),
            ("renew after an answer", claim.renew),
            ("work inside a replay", lambda: claim.fence(session)),
        ):
            with pytest.raises(outbox.AlreadyAnswered) as caught:
                work()
            assert str(caught.value) == text.format(verb)


def test_a_second_answer_is_refused(shop, database):
    with shop.block(database.engine) as claim:
        claim.respond(201)
        with pytest.raises(outbox.AlreadyAnswered, match="respond after an answer"):
            claim.respond(500)

    assert shop.record().status == 201


def test_before_its_answer_a_claim_has_none(shop):
    def ask(claim):
        with pytest.raises(outbox.NotAnswered, match="the request with key 'retry-001' has no answer yet"):
            assert claim.require_response()

    shop.request(ask)


def test_an_accept_inside_a_fence_is_refused(shop, database):
    with pytest.raises(outbox.ClaimError) as caught:
        shop.request(write=lambda session, fence: fence.accept("checkout"))

    assert str(caught.value) == (
        "accept inside a fence: a leased claim ends with its final answer, so call fence.respond(); to answer a request"
        " later, call claim.accept() in an outbox.idempotent block"
    )
    assert shop.record().state == "leased"


def test_a_commit_inside_a_fence_is_refused(shop, database):
    def commit(session, fence):
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    with pytest.raises(outbox.ClaimOpen):
        shop.request(write=commit)

    assert database.orders == []


def test_an_answer_that_cannot_be_kept_is_refused_and_another_may_follow(shop, database):
    with shop.block(database.engine) as claim:
        with pytest.raises(outbox.InvalidValue):
            claim.respond(200, None, {"Set-Cookie": "session=1"})
        claim.respond(201)

    assert shop.record().status == 201


def test_enqueue_outside_of_a_fence_needs_a_parent(shop, database):
    def enqueue_beside(claim):
        with pytest.raises(outbox.ParentRequired), database.begin() as session:
            shop.ob.enqueue(session, RECEIPT, PAYLOAD)

    shop.request(enqueue_beside)


def test_a_block_that_was_not_entered_cannot_be_left(shop):
    with pytest.raises(outbox.ClaimError, match=r"the outbox\.leased block was never entered"):
        shop.block(shop.database.engine).__exit__(None, None, None)


def test_a_tombstoned_key_is_refused(shop, database):
    shop.request()
    elapse(database, timedelta(days=20))
    settle_all(database)
    elapse(database, timedelta(days=11))
    clean(database)
    assert database.records == []

    with pytest.raises(outbox.KeyExpired):
        shop.request()


def test_an_error_of_the_database_does_not_hide_the_handlers_own(shop, database, monkeypatch, caplog):
    def break_down(connection, lease):
        raise OSError

    monkeypatch.setattr("outbox.requests.lease_records.end", break_down)

    with pytest.raises(ZeroDivisionError):
        shop.request(fail)

    assert [record.getMessage() for record in caplog.records] == [
        f"cannot release the lease of request {shop.record().id}: OSError; the lease expires by itself"
    ]


# --- waiting


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_who_waits_gets_the_answer_of_the_one_that_works(database, ob, is_async):
    shop, waiting = Shop(database, ob), Shop(database, ob, is_async=is_async)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(waiting.request(fail, wait=timedelta(seconds=30))))

    shop.request(lambda claim: thread.start())
    thread.join()

    assert [answer.status for answer in answers] == [201]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_who_has_waited_long_enough_gets_the_rest_of_the_lease(database, ob, is_async):
    def wait_until_timeout(claim):
        with pytest.raises(outbox.KeyInFlight) as caught:
            Shop(database, ob).request(fail, wait=timedelta(milliseconds=150))
        assert caught.value.retry_after > timedelta(seconds=50)

    if is_async:
        with Shop(database, ob).block(database.engine) as claim:
            with pytest.raises(outbox.KeyInFlight):
                Shop(database, ob, is_async=True).request(fail, wait=timedelta(milliseconds=150))
            claim.respond(201)
    else:
        Shop(database, ob).request(wait_until_timeout)


# --- several at the same time


@pytest.mark.parametrize("level", [None, "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("after_an_attempt", [False, True], ids=["new", "take-over"])
def test_of_several_at_once_one_gets_the_lease_and_the_others_a_409(postgresql, ob, level, after_an_attempt):
    shop = Shop(postgresql, ob)
    engine = postgresql.new_engine(pool_size=8, **({"isolation_level": level} if level else {}))
    if after_an_attempt:
        with pytest.raises(ZeroDivisionError):
            shop.request(fail)
    barrier = threading.Barrier(8)

    def take(number):
        barrier.wait()
        try:
            shop.block(engine).__enter__()
        except outbox.KeyInFlight:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))

    assert sum(taken) == 1
    assert shop.record().state == "leased"


def test_under_repeatable_read_a_fence_that_comes_first_sees_the_renewals(postgresql, ob):
    shop = Shop(postgresql, ob)
    strict = postgresql.new_engine(isolation_level="REPEATABLE READ")
    with shop.block(strict) as claim:
        claim.renew()
        with Session(strict) as session, session.begin(), claim.fence(session) as fence:
            shop.place_order(session, fence)

    assert postgresql.counts() == ALL


def test_a_fence_takes_an_async_session_and_a_sync_one_each_in_its_own_way(database, ob):
    shop = Shop(database, ob)

    async def fence_wrongly(claim):
        async with AsyncSession(database.async_engine()) as session:
            with claim.fence(session):
                pass

    with shop.block(database.engine) as claim:
        with pytest.raises(outbox.ClaimError, match="use 'async with'"):
            asyncio.run(fence_wrongly(claim))
        claim.respond(201)
