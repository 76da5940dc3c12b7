"""What MySQL does otherwise than MariaDB. Tests of the fixture `mariadb` run on both: nothing depends on the difference."""

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.concurrency import TEST_TIMEOUT, at_once
from support.database import CHARGE, PAYLOAD, REQUEST, TABLES, Database, statements_of
from support.entries import claim, put, quota, settle

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox import migrations
from outbox.errors import ConfigurationError, KeyInFlight
from outbox.sessions.session import flush_all
from outbox.sql.dialect import dialect_of
from outbox.sql.key_locks import try_lock
from outbox.sql.mysql import settings
from outbox.sql.schema.tables import define_tables

THREADS = 50


# --- which server it is


@pytest.mark.differs("mysql", "a MariaDB is needed")
@pytest.mark.owner
def test_a_mariadb_with_a_url_of_mysql_is_served_as_a_mariadb(mariadb: Database, ob: outbox.Outbox) -> None:
    url = mariadb.url.set(drivername="mysql+pymysql")
    TABLES.metadata.drop_all(mariadb.engine)
    migrations.upgrade(url)

    database = Database(url)
    put(database, ob, count=3)
    store = DatabaseStore(database.engine, ob.configuration)
    claimed = claim(store, quota())
    settled = settle(store, *[(entry, Settle("delivered", 1)) for entry in claimed])

    assert len(settled) == 3
    with database.engine.connect() as connection:
        assert dialect_of(connection).name == "mariadb"
        made = connection.exec_driver_sql("SHOW CREATE TABLE outbox_entry").one()[1]
    database.dispose()
    assert "utf8mb4_nopad_bin" in made


def test_a_driver_whose_errors_are_unknown_is_refused(mariadb: Database, ob: outbox.Outbox) -> None:
    engine = mariadb.new_engine()
    engine.dialect.driver = "mysqlconnector"

    with Session(engine) as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="n:1")
        with pytest.raises(ConfigurationError, match="the driver is mysqlconnector, and the outbox runs on M"):
            session.commit()

    assert mariadb.entries == []


def test_the_settings_are_asked_without_a_warning_of_the_server(mysql: Database) -> None:
    """Drivers print it for each connection."""
    with mysql.engine.connect() as connection:
        connection.execute(settings.MYSQL.settings).one()

        assert connection.exec_driver_sql("SHOW WARNINGS").all() == []


@pytest.mark.parametrize(
    ("variable", "refused"),
    [
        ("SELECT 'wsrep_on', 'ON'", "a node of Percona XtraDB Cluster"),
        ("SELECT 'group_replication_single_primary_mode', 'OFF'", "group replication is in multi-primary mode"),
    ],
)
def test_a_server_beside_which_another_one_writes_is_refused(
    mysql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, variable: str, refused: str
) -> None:
    monkeypatch.setattr(settings, "_CLUSTER", sa.text(variable))

    with pytest.raises(ConfigurationError, match=refused):
        put(mysql, ob)

    assert mysql.entries == []


# --- locks of keys


def test_of_many_threads_with_one_request_key_one_runs_the_handler(mariadb: Database, ob: outbox.Outbox) -> None:
    engine = mariadb.new_engine(pool_size=THREADS)
    handled: list[int] = []

    def request() -> int:
        with (
            Session(engine) as session,
            session.begin(),
            ob.idempotent(session, "k", scope="a", content=REQUEST) as block,
        ):
            if block.replayed:
                return 200
            handled.append(1)
            ob.enqueue(session, CHARGE, PAYLOAD)
            block.respond(201, b"done")
        return 201

    answers = at_once(THREADS, request)

    assert len(handled) == 1
    assert len(mariadb.records) == len(mariadb.entries) == len(mariadb.queue) == 1
    assert {type(answer) if isinstance(answer, Exception) else answer for answer in answers} <= {200, 201, KeyInFlight}


def test_a_key_that_another_transaction_has_is_not_waited_for(mariadb: Database) -> None:
    id = uuid4()
    with mariadb.engine.connect() as one, mariadb.engine.connect() as other:
        assert try_lock(one, TABLES, id).taken
        assert try_lock(one, TABLES, id).taken
        assert not try_lock(other, TABLES, id).taken
        for connection in (one, other):  # nothing outlives the transaction
            assert connection.scalar(sa.text("SELECT RELEASE_ALL_LOCKS()")) == 0
        one.rollback()

        assert try_lock(other, TABLES, id).taken


@pytest.mark.parametrize("names_schema", [False, True])
def test_two_transactions_that_find_a_key_free_do_not_both_insert_it(mysql: Database, names_schema: bool) -> None:
    """The other service may name the database as its schema."""
    id, others = uuid4(), []
    tables = define_tables(sa.MetaData(), schema=mysql.url.database) if names_schema else TABLES
    with mysql.engine.connect() as one, mysql.engine.connect() as other:

        @sa.event.listens_for(one, "before_cursor_execute")
        def lock_meanwhile(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
            if statement.startswith("INSERT INTO outbox_key_lock"):
                others.append(try_lock(other, tables, id).taken)

        assert try_lock(one, TABLES, id).taken

    assert others == [False]


def test_a_process_that_stops_while_it_takes_a_lock_does_not_stop_others(mysql: Database, ob: outbox.Outbox) -> None:
    named: list[str] = []
    with mysql.engine.connect() as stopped:
        with mysql.begin() as session, statements_of(mysql.engine) as sent:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="n:1", ordering_key="ada")
            flush_all(session)
            named += [statement for statement in sent if "GET_LOCK" in statement]
        assert stopped.exec_driver_sql(named[0]).scalar() == 1

        with statements_of(mysql.engine) as sent, mysql.begin() as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="n:2", ordering_key="ada")

    assert sorted(row.position for row in mysql.queue) == [1, 2]
    assert len([statement for statement in sent if "GET_LOCK" in statement]) <= 3


def test_a_second_flush_with_the_same_ordering_key_does_not_wait(mariadb: Database, ob: outbox.Outbox) -> None:
    """Though another transaction waits for the key meanwhile."""
    waits = threading.Event()

    def enqueue_after() -> None:
        waits.set()
        with mariadb.begin() as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="n:other", ordering_key="ada")

    with ThreadPoolExecutor(1) as beside, mariadb.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="n:1", ordering_key="ada")
        flush_all(session)
        other = beside.submit(enqueue_after)
        assert waits.wait(TEST_TIMEOUT)
        ob.enqueue(session, CHARGE, PAYLOAD, parent="n:2", ordering_key="ada")
        flush_all(session)
        session.commit()
        other.result(TEST_TIMEOUT)

    by_position = sorted(mariadb.queue, key=lambda row: row.position)
    parents = {entry.id: entry.parent for entry in mariadb.entries}
    assert [parents[row.id] for row in by_position] == ["n:1", "n:2", "n:other"]


# --- statements that return nothing


@pytest.mark.parametrize("present", [[], [1], [0, 1, 2]])
def test_of_several_entries_only_those_that_exist_are_left_out(
    mariadb: Database, ob: outbox.Outbox, present: list[int]
) -> None:
    for numbers in (present, range(3)):
        with mariadb.begin() as session:
            for number in numbers:
                ob.enqueue(session, CHARGE, {"by": len(numbers)}, parent=f"n:{number}", if_exists="ignore")

    assert len(mariadb.entries) == len(mariadb.queue) == 3
    kept = {entry.parent for entry in mariadb.entries if bytes(entry.payload) != b'{"by":3}'}
    assert kept == ({f"n:{number}" for number in present} if len(present) < 3 else set())


@pytest.mark.parametrize(("count", "statements"), [(1, 2), (5, 2)])
def test_entries_are_written_by_two_statements(mysql: Database, ob: outbox.Outbox, count: int, statements: int) -> None:
    with statements_of(mysql.engine) as sent:
        put(mysql, ob, count=count)

    assert sum("outbox_" in statement for statement in sent) == statements


@pytest.mark.parametrize("lost", [0, 2])
def test_a_batch_ends_with_two_statements_or_three(mysql: Database, ob: outbox.Outbox, lost: int) -> None:
    """With three, if the lease of an entry was lost meanwhile."""
    put(mysql, ob, count=5)
    store = DatabaseStore(mysql.engine, ob.configuration)
    claimed = claim(store, quota())
    for entry in claimed[:lost]:
        mysql.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == entry.id).values(lease_token=uuid4()))

    with statements_of(mysql.engine) as sent:
        settled = settle(store, *[(entry, Settle("failed", 1, reason="no")) for entry in claimed])

    assert settled == {entry.id for entry in claimed[lost:]}
    of_entries = [statement for statement in sent if "id IN (X'" in statement or "ROW(X'" in statement]
    assert len(of_entries) == (3 if lost else 2)
