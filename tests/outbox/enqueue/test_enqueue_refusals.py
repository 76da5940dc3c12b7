"""What `enqueue` refuses: at once, by name, and with nothing written."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.database import CHARGE, NOTHING, PAYLOAD, Order

import outbox

CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
NOT_JSON = "the payload is not JSON: {}; write dates, decimals and ids as text or numbers"
REFUSED = {
    "no parent": (
        {"parent": None},
        outbox.ParentRequired,
        "enqueue needs parent=, the key of what caused the effect (e.g. parent='invoice:42'); leave it out only inside an"
        " outbox.idempotent block, where the parent is the request",
    ),
    "an empty parent": ({"parent": ""}, outbox.InvalidValue, "parent '': has 0 bytes of UTF-8; 1 to 255 are allowed"),
    "a parent that is no text": ({"parent": 42}, outbox.InvalidValue, "parent 42: must be a str, not int"),
    "an unhashable parent": ({"parent": ["a"]}, outbox.InvalidValue, "parent ['a']: must be a str, not list"),
    "an operation in upper case": (
        {"operation": "Stripe.create"},
        outbox.InvalidValue,
        "operation 'Stripe.create': must be lower-case words joined by dots, e.g. 'stripe.refunds.create'",
    ),
    "an operation that is no text": ({"operation": 7}, outbox.InvalidValue, "operation 7: must be a str, not int"),
    "an unhashable operation": (
        {"operation": ["mail.send"]},
        outbox.InvalidValue,
        "operation ['mail.send']: must be a str, not list",
    ),
    "a discriminator that is no text": (
        {"discriminator": 7},
        outbox.InvalidValue,
        "discriminator 7: must be a str, not int",
    ),
    "an empty destination": (
        {"destination": ""},
        outbox.InvalidValue,
        "destination '': has 0 bytes of UTF-8; 1 to 255 are allowed",
    ),
    "an empty ordering key": (
        {"ordering_key": ""},
        outbox.InvalidValue,
        "ordering_key '': has 0 bytes of UTF-8; 1 to 255 are allowed",
    ),
    "an unknown option": (
        {"options": {"acount": "acct_9"}},
        outbox.InvalidValue,
        "option 'acount': is unknown; known options are ['account', 'api_version']; outbox.configure(options=...)"
        " adds others",
    ),
    "options that are no mapping": (
        {"options": ["account"]},
        outbox.InvalidValue,
        "options ['account']: must be a mapping, not list",
    ),
    "an option that is no JSON": (
        {"options": {"account": b"acct_9"}},
        outbox.NotSerializable,
        "the options is not JSON: Object of type bytes is not JSON serializable; write dates, decimals and ids as"
        " text or numbers",
    ),
    "a naive datetime": (
        {"due": datetime(2030, 1, 1)},
        outbox.InvalidValue,
        "due datetime.datetime(2030, 1, 1, 0, 0): has no time zone: give an aware datetime, e.g. datetime.now(UTC)",
    ),
    "a negative timedelta": (
        {"due": timedelta(seconds=-1)},
        outbox.InvalidValue,
        "due datetime.timedelta(days=-1, seconds=86399): a timedelta counts from now and must not be negative",
    ),
    "a due that is no time": (
        {"due": 3600},
        outbox.InvalidValue,
        "due 3600: must be an aware datetime or a timedelta, not int",
    ),
    "an unknown if_exists": (
        {"if_exists": "replace"},
        outbox.InvalidValue,
        "if_exists 'replace': must be 'raise' or 'ignore'",
    ),
    "a decimal": (
        {"payload": {"amount": Decimal("20.00")}},
        outbox.NotSerializable,
        NOT_JSON.format("Object of type Decimal is not JSON serializable"),
    ),
    "not a number": (
        {"payload": {"amount": float("nan")}},
        outbox.NotSerializable,
        NOT_JSON.format("it contains NaN or an infinity"),
    ),
    "infinity": (
        {"payload": float("-inf")},
        outbox.NotSerializable,
        NOT_JSON.format("it contains NaN or an infinity"),
    ),
    "a lone surrogate": (
        {"payload": "\ud800"},
        outbox.NotSerializable,
        NOT_JSON.format("it contains a lone surrogate, which UTF-8 cannot encode"),
    ),
    "names that would meet": (
        {"payload": {"lines": [{1: "a", "1": "b"}]}},
        outbox.NotSerializable,
        NOT_JSON.format("a member's name is int, and must be text"),
    ),
    "a payload that holds itself": ({"payload": CIRCLE}, outbox.NotSerializable, NOT_JSON.format("it contains itself")),
}


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_at_once_and_nothing_is_written(sqlite, ob, changed, error, text):
    arguments = {"operation": CHARGE, "payload": PAYLOAD, "parent": "invoice:42"} | changed

    with sqlite.session() as session:
        with pytest.raises(error) as caught:
            ob.enqueue(session, **arguments)
        session.add(Order(customer="ada", amount=2000))
        session.commit()

    assert str(caught.value) == text
    assert sqlite.counts() == {"orders": 1, "records": 0, "entries": 0, "queue": 0}


def test_a_payload_nested_without_end_is_refused(sqlite, ob):
    payload: list[object] = []
    for _ in range(200_000):
        payload = [payload]

    with sqlite.session() as session, pytest.raises(outbox.NotSerializable, match="it is nested too deeply"):
        ob.enqueue(session, CHARGE, payload, parent="invoice:42")


@pytest.mark.parametrize("due", [timedelta.max, timedelta(days=366 * 10_000)])
def test_a_due_time_beyond_what_databases_can_hold_is_refused_at_once(sqlite, ob, due):
    with sqlite.session() as session, pytest.raises(outbox.InvalidValue, match=r"^due datetime\.timedelta"):
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", due=due)


def test_an_integer_too_long_to_be_written_is_refused_for_what_it_is(sqlite, ob):
    with sqlite.session() as session, pytest.raises(outbox.NotSerializable) as caught:
        ob.enqueue(session, CHARGE, 10**5000, parent="invoice:42")

    assert "holds itself" not in str(caught.value)


def test_a_session_of_another_library_is_refused_by_name(ob):
    with pytest.raises(outbox.OutboxError, match="a Session or AsyncSession is needed, not str"):
        ob.enqueue("session", CHARGE, PAYLOAD, parent="invoice:42")


# --- autocommit

AUTOCOMMIT = (
    "the connection is in autocommit mode, so an entry could not commit together with the business rows: use a session"
    " whose engine has no isolation_level='AUTOCOMMIT'"
)


def autocommit_by_engine(database):
    return Session(database.unprepared_engine(isolation_level="AUTOCOMMIT"))


def autocommit_by_execution_options(database):
    return Session(database.engine.execution_options(isolation_level="AUTOCOMMIT"))


def autocommit_by_driver(database):
    driver = {"autocommit": True} if database.name == "postgresql" else {"isolation_level": None}
    return Session(database.unprepared_engine(connect_args=driver))


@pytest.mark.differs("mariadb", "its engine cannot be in autocommit by the driver")
@pytest.mark.differs("portable", "its engine cannot be in autocommit by the driver")
@pytest.mark.parametrize("open_session", [autocommit_by_engine, autocommit_by_execution_options, autocommit_by_driver])
def test_an_autocommit_connection_is_refused_and_nothing_is_written(database, ob, open_session):
    with open_session(database) as session:
        session.add(Order(customer="ada", amount=2000))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        with pytest.raises(outbox.NoTransaction) as caught:
            session.commit()

    assert str(caught.value) == AUTOCOMMIT
    assert database.counts() == NOTHING


def test_an_async_autocommit_connection_is_refused_and_nothing_is_written(database, ob):
    async def commit():
        async with AsyncSession(database.async_engine().execution_options(isolation_level="AUTOCOMMIT")) as session:
            session.add(Order(customer="ada", amount=2000))
            ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
            await session.commit()

    with pytest.raises(outbox.NoTransaction):
        asyncio.run(commit())

    assert database.counts() == NOTHING


def test_an_unprepared_sqlite_is_good_enough_for_entries_alone(sqlite, ob):
    with Session(sqlite.unprepared_engine()) as session:
        session.add(Order(customer="ada", amount=2000))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        session.flush()
        session.rollback()
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:43")
        session.commit()

    assert [entry.parent for entry in sqlite.entries] == ["invoice:43"]
    assert sqlite.orders == []


def test_another_database_is_refused_by_name(ob):
    engine = sa.create_mock_engine("oracle://", print)
    connection = type("Connection", (), {"dialect": engine.dialect})()

    with pytest.raises(
        outbox.ConfigurationError, match="the outbox runs on postgresql, sqlite, mariadb and mysql, not on 'oracle'"
    ):
        outbox.sql.connections.transactions.require_transaction(connection, None)
