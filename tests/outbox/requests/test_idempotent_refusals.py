"""Every request, answer and connection that a claim refuses: its error, its status, its text, and nothing stored."""

import asyncio
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, REQUEST, Order

import outbox

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

MISSING = "the request has no idempotency key: send one, e.g. a UUID, and repeat it with each retry"
MALFORMED = "the idempotency key is malformed: parent "
KEYS = {
    "none": (None, outbox.KeyMissing, MISSING),
    "empty": ("", outbox.KeyMissing, MISSING),
    "too long": (
        "k" * 256,
        outbox.KeyMalformed,
        MALFORMED + f"'{'k' * 79}... (258 characters): has 256 bytes of UTF-8; 1 to 255 are allowed",
    ),
    "too long in UTF-8": (
        "é" * 128,
        outbox.KeyMalformed,
        MALFORMED + f"'{'é' * 79}... (130 characters): has 256 bytes of UTF-8; 1 to 255 are allowed",
    ),
    "with a NUL": ("a\0b", outbox.KeyMalformed, MALFORMED + r"'a\x00b': contains a NUL character"),
    "with a lone surrogate": (
        "\ud800",
        outbox.KeyMalformed,
        MALFORMED + r"'\ud800': contains a lone surrogate, which UTF-8 cannot encode",
    ),
    "no text": (b"retry-001", outbox.KeyMalformed, MALFORMED + "b'retry-001': must be a str, not bytes"),
}


@pytest.mark.parametrize(("key", "error", "text"), KEYS.values(), ids=KEYS.keys())
def test_a_key_that_cannot_be_used_is_a_400(client, database, key, error, text):
    with pytest.raises(error) as caught:
        client.request(key=key)

    assert caught.value.status == 400
    assert str(caught.value) == text
    assert database.counts() == NOTHING


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"scope": ""}, "scope '': may be empty only for source 'app', not 'http': give the caller's id"),
        ({"scope": None}, "scope None: must be a str, not NoneType"),
        ({"source": ""}, "source '': has 0 bytes of UTF-8; 1 to 64 are allowed"),
        (
            {"retention": timedelta(0)},
            "retention datetime.timedelta(0): must be a timedelta of more than 0 s, and 36525 days at most",
        ),
        ({"retention": 24}, "retention 24: must be a timedelta of more than 0 s, and 36525 days at most"),
        (
            {"retention": timedelta(days=36526)},
            "retention datetime.timedelta(days=36526): must be a timedelta of more than 0 s, and 36525 days at most",
        ),
        (
            {"wait": 5},
            "wait 5: must be a timedelta of 0 s or more, and 36525 days at most, or None to refuse immediately",
        ),
    ],
)
def test_settings_outside_their_limits_are_refused_by_name(client, database, changed, text):
    with pytest.raises(outbox.InvalidValue) as caught:
        client.request(**changed)

    assert str(caught.value) == text
    assert database.counts() == NOTHING


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"amount": float("nan")}, "nan in the request is not a JSON number"),
        ({"tags": {1, 2}}, "a set in the request is not a JSON value"),
        ("\ud800", "the request contains a lone surrogate, which UTF-8 cannot encode"),
    ],
)
def test_a_request_without_a_fingerprint_is_refused(client, database, request_, text):
    with pytest.raises(outbox.NotSerializable) as caught:
        client.request(content=request_)

    assert str(caught.value) == text
    assert database.counts() == NOTHING


# --- answers

LARGE = b"x" * (256 * 1024 + 1)
NO_BODY = "the response body is not JSON: {}; write dates, decimals and ids as text or numbers"
ANSWERS = {
    "a status below 200": ((199,), "status 199: must be an int from 200 to 599"),
    "a status above 599": ((600,), "status 600: must be an int from 200 to 599"),
    "a status that is a bool": ((True,), "status True: must be an int from 200 to 599"),
    "a status as text": (("201",), "status '201': must be an int from 200 to 599"),
    "a cookie": (
        (200, None, {"set-Cookie": "session=1"}),
        "header 'set-Cookie': is never stored: a replay would send one client's cookie to another",
    ),
    "a header that is no text": (
        (200, None, {"Retry-After": 1}),
        "header 'Retry-After': name and value must be str, not str, int",
    ),
    "a header with a line break": (
        (200, None, {"X-Note": "a\r\nSet-Cookie: b"}),
        "header 'X-Note': contains a line break or NUL",
    ),
    "a header's name with a line break": (
        (200, None, {"X-Note\n": "a"}),
        r"header 'X-Note\n': contains a line break or NUL",
    ),
    "a header's name that is none": (
        (200, None, {"X Note": "a"}),
        "header 'X Note': must be a header's name: letters, digits and hyphens",
    ),
    "a header beyond Latin 1": (
        (200, None, {"X-Price": "20 €"}),
        "header 'X-Price': contains a character that a header must not have, or begins or ends with a blank: percent-encode it",
    ),
    "a header with a control character": (
        (200, None, {"X-Note": "a\x1b[31m"}),
        "header 'X-Note': contains a character that a header must not have, or begins or ends with a blank: percent-encode it",
    ),
    "a body of a status that has none": (
        (204, {"order": 42}),
        "status 204: has no body: leave the body out, or answer with 200",
    ),
    "a body that is no JSON": (
        (200, {"at": timedelta(1)}),
        NO_BODY.format("Object of type timedelta is not JSON serializable"),
    ),
    "a body with a lone surrogate": (
        (200, {"name": "\ud800"}),
        NO_BODY.format("it contains a lone surrogate, which UTF-8 cannot encode"),
    ),
    "a body that is too large": ((200, LARGE), "the response body has 262145 bytes, the maximum is 262144"),
}


@pytest.mark.parametrize("verb", ["respond", "reject"])
@pytest.mark.parametrize(("answer", "text"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_cannot_be_kept_is_refused_and_another_may_follow(client, database, verb, answer, text):
    def answer_twice(session, claim):
        session.add(Order(customer="ada", amount=2000))
        with pytest.raises((outbox.InvalidValue, outbox.NotSerializable)) as caught:
            getattr(claim, verb)(*answer)
        assert str(caught.value) == text
        claim.respond(201)

    client.request(answer_twice)

    assert database.counts() == {"orders": 1, "records": 1, "entries": 0, "queue": 0}


@pytest.mark.parametrize("verb", ["respond", "reject"])
def test_a_text_with_a_lone_surrogate_is_refused_as_an_answer(sqlite, ob, verb):
    with sqlite.begin() as session, ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
        with pytest.raises(outbox.NotSerializable, match="lone surrogate"):
            getattr(claim, verb)(200, "\ud800")
        claim.respond(201)


def test_before_its_answer_a_claim_has_none(client):
    seen = []

    def ask(session, claim):
        seen.append(claim.response)
        with pytest.raises(outbox.NotAnswered, match="the request with key 'retry-001' has no answer yet"):
            assert claim.require_response()
        seen.append(claim.respond(201))

    client.request(ask)

    assert seen == [None, outbox.Response(201)]


# --- connections


def test_a_claim_on_an_autocommit_connection_is_refused(postgresql, ob):
    with Session(postgresql.unprepared_engine(isolation_level="AUTOCOMMIT")) as session:
        session.add(Order(customer="ada", amount=2000))
        with pytest.raises(outbox.NoTransaction, match="the connection is in autocommit mode"):
            ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST).__enter__()

    assert postgresql.records == []


def test_a_claim_on_an_unprepared_sqlite_is_refused(sqlite, ob):
    with Session(sqlite.unprepared_engine()) as session, pytest.raises(outbox.ConfigurationError) as caught:
        ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST).__enter__()

    assert str(caught.value) == (
        "on SQLite a claim reads and then writes in one transaction, which needs BEGIN IMMEDIATE: call"
        " outbox.prepare_sqlite(engine) once after create_engine()"
    )


def test_prepare_sqlite_refuses_another_database(postgresql):
    with pytest.raises(outbox.ConfigurationError, match="an engine for SQLite, not for 'postgresql'"):
        outbox.prepare_sqlite(postgresql.engine)


def test_a_prepared_engine_commits_to_a_log_on_disk(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox.prepare_sqlite(engine)

    with engine.connect() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]

    assert settings == ["wal", 2]  # 2: FULL, a commit outlives a power cut
    engine.dispose()


def test_prepare_sqlite_may_be_called_twice(sqlite):
    outbox.prepare_sqlite(sqlite.engine)

    with sqlite.begin() as session:
        session.add(Order(customer="ada", amount=2000))

    assert len(sqlite.orders) == 1


def test_async_with_on_a_session_says_to_use_with(sqlite, ob):
    async def misuse():
        with sqlite.session() as session:
            async with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST):
                pass

    with pytest.raises(outbox.ClaimError, match="'async with' needs an AsyncSession, not Session: use 'with'"):
        asyncio.run(misuse())


def test_with_on_an_async_session_says_to_use_async_with(sqlite, ob):
    async def misuse():
        async with sqlite.async_session() as session:
            with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST):
                pass

    with pytest.raises(outbox.ClaimError, match="'async with'"):
        asyncio.run(misuse())


# --- in flight


def claim_of(ob, session, **settings):
    return ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST, **settings)


def test_a_key_in_flight_is_refused_at_once_and_the_transaction_lives_on(postgresql, ob):
    with postgresql.begin() as first, claim_of(ob, first) as claim:
        with postgresql.begin() as second:
            second.add(Order(customer="second", amount=1))
            with pytest.raises(outbox.KeyInFlight) as caught:
                claim_of(ob, second).__enter__()
        claim.respond(201)

    assert caught.value.status == 409
    assert caught.value.retry_after == timedelta(seconds=1)
    assert str(caught.value) == "a request with key 'retry-001' is being processed now: retry in 1 s"
    assert postgresql.counts() == {"orders": 1, "records": 1, "entries": 0, "queue": 0}


def test_a_key_in_flight_on_sqlite_is_refused_after_its_busy_timeout(sqlite, ob):
    impatient = sqlite.new_engine(connect_args={"timeout": 0.01})

    with sqlite.begin() as first, claim_of(ob, first) as claim:
        with Session(impatient) as second, pytest.raises(outbox.KeyInFlight) as caught:
            claim_of(ob, second).__enter__()
        claim.respond(201)

    assert caught.value.retry_after == timedelta(seconds=1)
    assert len(sqlite.records) == 1


def test_other_keys_are_not_in_flight(postgresql, ob):
    with postgresql.begin() as first, claim_of(ob, first) as claim:
        with (
            postgresql.begin() as second,
            ob.idempotent(second, "retry-002", scope="acct_1", content=REQUEST) as other,
        ):
            other.respond(202)
        claim.respond(201)

    assert sorted(record.status for record in postgresql.records) == [201, 202]


def lock_timeout(session):
    return session.scalar(sa.text("SHOW lock_timeout"))


@pytest.mark.parametrize(("own", "wait"), [("0", timedelta(milliseconds=20)), ("7s", timedelta(0))])
def test_a_wait_that_times_out_spares_the_callers_transaction_and_timeout(postgresql, ob, own, wait):
    with postgresql.begin() as first, claim_of(ob, first) as claim:
        with postgresql.begin() as second:
            second.add(Order(customer="second", amount=1))
            second.execute(sa.text(f"SET LOCAL lock_timeout = '{own}'"))
            with pytest.raises(outbox.KeyInFlight):
                claim_of(ob, second, wait=wait).__enter__()
            assert lock_timeout(second) == own
            ob.enqueue(second, CHARGE, PAYLOAD, parent="second")
        claim.respond(201)

    assert postgresql.counts() == ALL
