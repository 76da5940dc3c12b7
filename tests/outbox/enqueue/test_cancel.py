"""Cancelling an entry in the app's own transaction, while it is certain that it was never sent."""

import asyncio
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.database import Database, Order
from support.entries import CLEAN, change, claim, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from outbox.times import EPOCH

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]


def cancel(database: Database, ob: outbox.Outbox, id: UUID) -> bool:
    with database.begin() as session:
        return ob.cancel(session, id)


def test_a_waiting_entry_is_cancelled_and_never_sent(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    service = MemoryAdapter()

    cancelled = cancel(database, ob, id)
    run_once(database, ob, adapters={"crm": service})

    assert cancelled is True
    assert queue_row(database, id) is None
    settled = settlement_row(database, id)
    assert (settled.state, settled.deliveries, settled.attempts, settled.key_epoch) == ("cancelled", 0, 0, 0)
    assert {name: getattr(settled, name) for name in CLEAN} == CLEAN
    assert service.deliveries == []


@pytest.mark.parametrize("id", ["42", str(UUID(int=1)), None])
def test_what_is_no_id_is_refused_and_the_transaction_lives_on(
    database: Database, ob: outbox.Outbox, id: object
) -> None:
    with database.begin() as session:
        session.add(Order(customer="ada", amount=2000))
        for ask in (lambda: ob.cancel(session, id), lambda: ob.request_status(session, id, scope="acct_1")):  # type: ignore[call-overload]
            with pytest.raises(outbox.InvalidValue) as refused:
                ask()
            assert str(refused.value).endswith(f"id {id!r}: must be a uuid.UUID, not {type(id).__name__}")

    assert database.counts()["orders"] == 1


def test_an_entry_is_cancelled_once(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    assert [cancel(database, ob, id), cancel(database, ob, id)] == [True, False]


@pytest.mark.parametrize(
    "found",
    [
        {"maybe_sent": True, "in_doubt_since": EPOCH, "state": "retry"},
        {"maybe_sent": True, "in_doubt_since": EPOCH, "state": "uncertain"},
        {"state": "uncertain"},
    ],
    ids=["may have been sent", "uncertain", "uncertain without doubt"],
)
def test_what_may_have_been_sent_is_not_cancelled(
    database: Database, ob: outbox.Outbox, found: dict[str, object]
) -> None:
    id = put_one(database, ob)
    change(database, id, **found)

    assert cancel(database, ob, id) is False

    assert state(database, id) == found["state"]


def test_an_entry_that_waits_for_its_next_attempt_is_cancelled(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    change(database, id, state="retry", deliveries=3, attempts=2, key_epoch=1)

    assert cancel(database, ob, id)

    settled = settlement_row(database, id)
    assert (settled.deliveries, settled.attempts, settled.key_epoch) == (3, 2, 1)


def test_an_entry_that_is_being_sent_is_not_cancelled(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    claim(DatabaseStore(database.dispatchers_engine, ob.configuration))

    assert cancel(database, ob, id) is False

    assert state(database, id) == "sending"


def test_a_delivered_or_unknown_entry_is_not_cancelled(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert cancel(database, ob, id) is False
    assert cancel(database, ob, uuid4()) is False

    assert state(database, id) == "delivered"


def test_the_cancelling_lives_and_dies_with_the_transaction(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    with database.session() as session:
        session.add(Order(customer="ada", amount=1))
        assert ob.cancel(session, id)
        session.rollback()

    assert state(database, id) == "pending"
    assert database.orders == []


def test_what_this_session_enqueued_can_be_cancelled_at_once(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        entry = ob.enqueue(session, "crm.upsert", {}, parent="order:1", due=timedelta(hours=1))
        assert ob.cancel(session, entry.id)

    assert state(database, entry.id) == "cancelled"


def test_with_an_async_session_it_is_awaited(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    async def work() -> bool:
        async with database.async_session() as session, session.begin():
            return await ob.cancel(session, id)

    assert asyncio.run(work()) is True
    assert state(database, id) == "cancelled"


def test_in_autocommit_mode_it_is_refused(postgresql: Database, ob: outbox.Outbox) -> None:
    id = put_one(postgresql, ob)
    engine = postgresql.new_engine(isolation_level="AUTOCOMMIT")

    with sa.orm.Session(engine) as session, pytest.raises(outbox.NoTransaction):
        ob.cancel(session, id)

    assert state(postgresql, id) == "pending"


@pytest.mark.owner
def test_tables_under_another_schema_and_prefix_have_their_own_function(postgresql: Database) -> None:
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", schema="My Schema", prefix="weird-prefix_")
    tables = ob.configuration.tables
    functions = sa.text("SELECT count(*) FROM pg_proc WHERE proname = 'weird-prefix_cancel'")
    with postgresql.engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("My Schema"))
        tables.metadata.create_all(connection)

    with postgresql.begin() as session:
        entry = ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        assert ob.cancel(session, entry.id)

    assert postgresql.rows(tables.queue) == []
    assert [row.state for row in postgresql.rows(tables.settlement)] == ["cancelled"]
    with postgresql.engine.begin() as connection:
        assert connection.scalar(functions) == 1
        tables.metadata.drop_all(connection)
        assert connection.scalar(functions) == 0
