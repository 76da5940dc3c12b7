"""mysqlclient as the driver of the app, the dispatcher and the migrations: what holds with PyMySQL holds with it.

`OUTBOX_TEST_MARIADB_DRIVER=mysqldb` lets every test of MariaDB use it.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import ALL, CHARGE, PAYLOAD, REQUEST, TABLES, Database, Order
from support.entries import dispatcher
from support.mariadb_server import with_driver

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.errors import ConfigurationError, NoTransaction
from outbox.sql.connections.engines import engine_of
from outbox.sql.connections.transactions import is_aborted
from outbox.sql.errors.driver import is_passing, is_timeout, sqlstate
from outbox.sql.key_locks import try_lock

pytest.importorskip("MySQLdb", reason="mysqlclient is not installed")


@pytest.fixture
def engine(mariadb: Database) -> Iterator[sa.Engine]:
    made = sa.create_engine(with_driver(mariadb.url, "mysqldb"))
    yield made
    made.dispose()


def test_a_request_and_its_effect_are_written_replayed_and_sent(
    mariadb: Database, engine: sa.Engine, ob: outbox.Outbox
) -> None:
    payload = {"note": "ünï ✓ 🙂 100 % 'quoted' \\ \x00"}

    def place_order() -> outbox.Response:
        with Session(engine) as session, session.begin():
            with ob.idempotent(session, "k", scope="a", content=REQUEST) as claim:
                if not claim.replayed:
                    session.add(Order(customer="ada", amount=2000))
                    ob.enqueue(session, CHARGE, payload)
                    claim.respond(201, {"order": "placed"})
            return claim.require_response()

    answers = [place_order(), place_order()]
    crm = MemoryAdapter()
    settled = asyncio.run(dispatcher(engine, ob, adapters={"stripe": crm}).run_once())

    assert answers[0].body == answers[1].body == b'{"order":"placed"}'
    assert settled == 1
    assert [delivery.payload for delivery in crm.deliveries] == [payload]
    assert mariadb.counts() == ALL | {"queue": 0}
    assert [row.state for row in mariadb.rows(TABLES.settlement)] == ["delivered"]


def test_many_entries_of_a_flush_keep_their_order_and_instants(
    mariadb: Database, engine: sa.Engine, ob: outbox.Outbox
) -> None:
    due_at = datetime.now(UTC).replace(microsecond=123456) + timedelta(days=1)
    with Session(engine) as session, session.begin():
        for number in range(300):
            ob.enqueue(
                session, CHARGE, PAYLOAD, parent=f"n:{number}", ordering_key="o" if number % 2 else None, due=due_at
            )

    in_group = [row for row in mariadb.queue if row.ordering_key]
    by_parent = {row.id: int(row.parent[2:]) for row in mariadb.entries}

    assert len(by_parent) == 300
    assert {row.due_at for row in mariadb.entries} == {due_at}
    numbers = [by_parent[row.id] for row in sorted(in_group, key=lambda row: row.position)]
    assert numbers == list(range(1, 300, 2))


def test_its_errors_have_the_codes_by_which_everything_decides(mariadb: Database, engine: sa.Engine) -> None:
    secret = "not-to-be-seen"
    row = {"kid": secret, "secret_check": "x", "recorded_at": datetime.now(UTC)}
    with engine.connect() as connection, engine.connect() as other:
        connection.execute(TABLES.kid.insert(), row)
        with pytest.raises(sa.exc.IntegrityError) as duplicate:
            connection.execute(TABLES.kid.insert(), row)
        other.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 0")
        with pytest.raises(sa.exc.OperationalError) as locked:
            other.execute(TABLES.kid.insert(), row)
        with pytest.raises(sa.exc.DBAPIError) as check:
            other.execute(sa.text("INSERT INTO outbox_meta (id, environment, number) VALUES (7, 'x', 1)"))

    assert secret not in str(duplicate.value)
    assert secret not in str(duplicate.value.orig)
    errors = [duplicate.value, locked.value, check.value]
    assert [sqlstate(error.orig) for error in errors] == ["23505", "55P03", "23514"]
    assert [is_passing(error) for error in errors] == [False, True, False]
    assert is_timeout(locked.value)


def test_a_killed_connection_is_passing_and_the_pool_replaces_it(mariadb: Database, engine: sa.Engine) -> None:
    with engine.connect() as connection, mariadb.observer.connect() as killer:
        killer.exec_driver_sql(f"KILL {connection.scalar(sa.text('SELECT connection_id()'))}")
        with pytest.raises(sa.exc.DBAPIError) as lost:
            connection.execute(sa.text("SELECT 1"))

    assert is_passing(lost.value)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1


def test_a_transaction_that_the_server_has_undone_is_noticed(
    mariadb: Database, engine: sa.Engine, ob: outbox.Outbox
) -> None:
    with engine.begin() as connection:
        for number in (1, 2):
            connection.execute(sa.insert(Order).values(id=number, customer="ada", amount=number))
    change = sa.update(Order).values(amount=7)

    with Session(engine) as session, mariadb.begin() as other, ThreadPoolExecutor(1) as beside:
        session.execute(change.where(Order.id == 1))
        other.execute(change.where(Order.id == 2))
        other.add_all(
            [Order(customer="eve", amount=n) for n in range(100, 150)]
        )  # the one that has written less is ended
        other.flush()
        waiting = beside.submit(other.execute, change.where(Order.id == 1))
        with pytest.raises(sa.exc.OperationalError) as deadlock:
            session.execute(change.where(Order.id == 2))
        waiting.result()
        undone = is_aborted(session.connection())
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        with pytest.raises(NoTransaction, match="MariaDB has undone this transaction"):
            session.commit()

    assert (sqlstate(deadlock.value.orig), undone) == ("40P01", True)


def test_a_lock_that_is_not_free_is_not_taken(engine: sa.Engine, ob: outbox.Outbox) -> None:
    id = uuid4()
    with engine.connect() as first, engine.connect() as second:
        assert try_lock(first, TABLES, id).taken
        assert not try_lock(second, TABLES, id).taken


def test_a_session_at_another_level_or_without_binary_prefix_is_refused(mariadb: Database, ob: outbox.Outbox) -> None:
    url = with_driver(mariadb.url, "mysqldb").difference_update_query(["init_command", "binary_prefix"])

    for query, refused in [
        ({"binary_prefix": "1"}, "is at REPEATABLE-READ"),
        ({}, r"add \?binary_prefix=1 to the URL"),
    ]:
        given = sa.create_engine(url.update_query_dict(query))
        with Session(given) as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
            with pytest.raises(ConfigurationError, match=refused):
                session.commit()


def test_an_engine_of_a_url_is_set_as_it_must_be(mariadb: Database) -> None:
    url = with_driver(mariadb.url, "mysqldb").difference_update_query(["init_command", "binary_prefix"])
    asked = sa.text("SELECT @@innodb_lock_wait_timeout, @@tx_isolation, CHARSET(:bytes)")

    with engine_of(url).connect() as connection:
        settings = connection.execute(asked.bindparams(sa.bindparam("bytes", b"\xff", type_=sa.LargeBinary))).one()

    assert tuple(settings) == (5, "READ-COMMITTED", "binary")


@pytest.mark.owner
def test_it_migrates(mariadb: Database, engine: sa.Engine) -> None:
    migrations.upgrade(engine.url, prefix="migrated_")

    migrations.check(engine, prefix="migrated_")
    migrations.downgrade(engine.url, prefix="migrated_")
