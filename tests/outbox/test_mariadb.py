"""What MariaDB does otherwise than the other databases, one test for each difference."""

import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import CHARGE, PAYLOAD, REQUEST, TABLES, Database, Order, statements_of

import outbox
from outbox import migrations
from outbox.errors import ConfigurationError, NoTransaction, RequestUndone, SchemaError
from outbox.http.transaction import undone_by_conflict
from outbox.sql.clock import database_now
from outbox.sql.connections.engines import engine_of
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import DEADLOCK, is_passing, is_timeout, lost_savepoint, sqlstate
from outbox.sql.key_locks import lock_ids, try_lock, wait_for_lock
from outbox.sql.mariadb.errors import SAVEPOINT_MISSING, number_of
from outbox.sql.schema.tables import key_lock

READ_COMMITTED = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


def enqueue(engine: sa.Engine, ob: outbox.Outbox, **settings: Any) -> None:
    with Session(engine) as session, session.begin():
        ob.enqueue(session, CHARGE, PAYLOAD, **{"parent": "invoice:42"} | settings)


# --- what the session must be


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ({"init_command": "DO 1"}, "is at REPEATABLE-READ, and on M.+ the outbox needs READ COMMITTED"),
        ({"init_command": "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"}, "is at SERIALIZABLE"),
        ({"sql_mode": "IGNORE_SPACE"}, "sql_mode lacks STRICT_TRANS_TABLES"),
        ({"sql_mode": "STRICT_TRANS_TABLES,ANSI_QUOTES"}, "sql_mode has NO_BACKSLASH_ESCAPES or ANSI_QUOTES"),
        pytest.param(
            {"sql_mode": "STRICT_TRANS_TABLES,EMPTY_STRING_IS_NULL"},
            "sql_mode has NO_BACKSLASH_ESCAPES or ANSI_QUOTES",
            marks=pytest.mark.differs("mysql", "it has no such mode"),
        ),
        ({"charset": "latin1"}, "the connection's character set is latin1, and the outbox needs utf8mb4"),
    ],
)
def test_a_session_that_would_change_what_is_written_is_refused(
    mariadb: Database, ob: outbox.Outbox, query: dict[str, str], refused: str
) -> None:
    engine = sa.create_engine(mariadb.url.update_query_dict({"init_command": READ_COMMITTED} | query))

    with pytest.raises(ConfigurationError, match=refused):
        enqueue(engine, ob)

    assert mariadb.entries == []


def test_a_level_that_was_set_on_the_engine_is_accepted(mariadb: Database, ob: outbox.Outbox) -> None:
    url = mariadb.url.update_query_dict({"init_command": "DO 1"})

    enqueue(sa.create_engine(url, isolation_level="READ COMMITTED"), ob)
    enqueue(sa.create_engine(url).execution_options(isolation_level="READ COMMITTED"), ob, parent="invoice:43")

    assert len(mariadb.entries) == 2


@pytest.mark.parametrize("name", ["client", "connection", "results"])
def test_each_character_set_of_the_connection_must_be_utf8mb4(mariadb: Database, ob: outbox.Outbox, name: str) -> None:
    engine = mariadb.new_engine(isolation_level="READ COMMITTED")
    sa.event.listen(engine, "connect", lambda made, _: made.query(f"SET character_set_{name} = latin1"))

    with pytest.raises(ConfigurationError, match="the connection's character set is latin1"):
        enqueue(engine, ob, parent="fällig")

    assert mariadb.entries == []


def test_the_level_of_one_transaction_says_nothing_about_the_next(mariadb: Database, ob: outbox.Outbox) -> None:
    """A dispatcher, or `migrations.check`, sets its own level on connections of an app's engine."""
    url = mariadb.url.update_query_dict({"init_command": "DO 1"})
    lax, strict = (sa.create_engine(url, pool_size=1, isolation_level=level) for level in (None, "READ COMMITTED"))
    enqueue(lax.execution_options(isolation_level="READ COMMITTED"), ob)

    with pytest.raises(ConfigurationError, match="is at REPEATABLE-READ"):
        enqueue(lax, ob, parent="invoice:43")
    with pytest.raises(ConfigurationError, match="is at SERIALIZABLE"):
        enqueue(strict.execution_options(isolation_level="SERIALIZABLE"), ob, parent="invoice:43")
    enqueue(strict, ob, parent="invoice:43")

    assert len(mariadb.entries) == 2


def test_an_engine_of_the_dispatcher_waits_five_seconds_for_a_row(mariadb: Database) -> None:
    url = mariadb.url.difference_update_query(["init_command"])

    with engine_of(url).connect() as connection:
        waits = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one()
        level = dialect_of(connection).isolation_level(connection)

    assert (waits, level) == (5, "READ COMMITTED")


def test_an_older_server_is_refused(mariadb: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect: Any = dialect_of(mariadb.engine)
    monkeypatch.setattr(type(dialect), "server", dialect.server._replace(version_min=(99, 1)))

    with pytest.raises(ConfigurationError, match=r"the outbox needs M\w+ 99\.1 or later, not \d"):
        enqueue(mariadb.engine, ob)


def test_the_clock_is_utc_whatever_the_sessions_time_zone(mariadb: Database) -> None:
    zone = mariadb.url.update_query_dict({"init_command": "SET time_zone = '+13:00'"})
    elsewhere = sa.create_engine(zone, isolation_level="READ COMMITTED")

    with mariadb.engine.connect() as here, elsewhere.connect() as there:
        assert abs(database_now(here) - database_now(there)) < timedelta(minutes=1)


# --- what the columns hold


def test_keys_that_differ_in_case_accents_or_spaces_at_the_end_are_others(mariadb: Database, ob: outbox.Outbox) -> None:
    for parent in ("invoice", "Invoice", "invoicé", "invoice "):
        enqueue(mariadb.engine, ob, parent=parent)

    with mariadb.session() as session:
        found = session.execute(sa.select(TABLES.entry.c.parent).where(TABLES.entry.c.parent == "invoice")).scalars()
        assert list(found) == ["invoice"]


def test_an_answer_of_more_than_64_kib_is_stored_whole(mariadb: Database, ob: outbox.Outbox) -> None:
    body, headers = b"x" * 100_000, {"X-Long": "y" * 70_000}
    with mariadb.begin() as session, ob.idempotent(session, "k", scope="a", content=REQUEST) as claim:
        claim.respond(201, body, headers=headers)

    (record,) = mariadb.records

    assert record.body == body
    assert "y" * 70_000 in record.headers


def test_one_entry_is_written_in_one_statement_as_several_are(mariadb: Database, ob: outbox.Outbox) -> None:
    fair = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", fair={"stripe"})
    at = datetime.now(UTC).replace(microsecond=123_456) + timedelta(days=1)
    spans: list[dict[str, Any]] = [{}, {"due": at}, {"due": timedelta(minutes=1, microseconds=7)}]

    with statements_of(mariadb.engine) as sent:
        for number, span in enumerate(spans):
            enqueue(mariadb.engine, fair, parent=f"alone:{number}", **span)
    with mariadb.begin() as session:
        for number, span in enumerate(spans):
            fair.enqueue(session, CHARGE, PAYLOAD, parent=f"together:{number}", **span)

    on_mysql = mariadb.server == "mysql"  # where the queue's row is another statement
    assert sum("outbox_" in statement for statement in sent) == len(spans) * (1 + on_mysql)
    rows = {entry.parent: (entry, queued) for entry, queued in zip(mariadb.entries, mariadb.queue, strict=True)}
    for number in range(len(spans)):
        (alone, alone_queued), (together, together_queued) = rows[f"alone:{number}"], rows[f"together:{number}"]
        own = {"id", "parent", "parent_id", "tag", "due_at", "created_at"}
        assert {**alone._asdict(), **dict.fromkeys(own)} == {**together._asdict(), **dict.fromkeys(own)}
        assert {**alone_queued._asdict(), **dict.fromkeys(own)} == {**together_queued._asdict(), **dict.fromkeys(own)}
        assert alone_queued.due_at == alone.due_at
        waits = [row.due_at - row.created_at for row in (alone, together)]
        assert abs(waits[0] - waits[1]) < timedelta(seconds=30)
    assert {row.due_at for name, (row, _) in rows.items() if name.endswith(":1")} == {at}
    assert rows["alone:2"][0].due_at - rows["alone:2"][0].created_at == timedelta(minutes=1, microseconds=7)


# --- locks of keys


def test_the_lock_of_a_key_ends_with_its_transaction_and_leaves_no_row(mariadb: Database) -> None:
    id = uuid4()
    with mariadb.engine.connect() as first, mariadb.engine.connect() as second:
        taken = try_lock(first, TABLES, id).taken
        again = try_lock(first, TABLES, id).taken
        meanwhile = try_lock(second, TABLES, id).taken
        waited = wait_for_lock(second, TABLES, id, timedelta(milliseconds=30))
        first.commit()
        afterwards = try_lock(second, TABLES, id).taken
        second.commit()

    assert (taken, again, meanwhile, waited, afterwards) == (True, True, False, False, True)
    assert mariadb.rows(key_lock(TABLES)) == []


def test_two_transactions_that_wait_for_each_others_keys_do_not_deadlock(mariadb: Database) -> None:
    ids = uuid4(), uuid4()
    with mariadb.engine.connect() as first, mariadb.engine.connect() as second:
        assert try_lock(first, TABLES, ids[0]).taken
        assert try_lock(second, TABLES, ids[1]).taken

        assert not wait_for_lock(first, TABLES, ids[1], timedelta(milliseconds=30))
        assert not wait_for_lock(second, TABLES, ids[0], timedelta(milliseconds=30))


def test_the_locks_of_other_keys_are_not_waited_for(mariadb: Database) -> None:
    """Without its index a DELETE of several locks reads all of them, and two transactions end with a deadlock."""
    with mariadb.engine.connect() as first, mariadb.engine.connect() as second:
        second.exec_driver_sql("SET innodb_lock_wait_timeout = 0")

        for connection in (first, second):
            lock_ids(connection, TABLES, [uuid4() for _ in range(20)])


def test_many_transactions_with_one_ordering_key_take_turns(mariadb: Database, ob: outbox.Outbox) -> None:
    """With a plain INSERT for the lock, all that wait get a shared lock, and most of them end with a deadlock."""
    begin_together = threading.Barrier(6)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                begin_together.wait()
                enqueue(mariadb.engine, ob, parent=f"invoice:{number}:{turn}", ordering_key="account:7")
        except BaseException as error:
            errors.append(error)
            begin_together.abort()

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert len({row.position for row in mariadb.queue}) == 30


# --- errors


def deadlock(mariadb: Database, session: Session) -> sa.exc.OperationalError:
    """Let the server end the session's transaction, which has written less than the other one."""
    change = sa.text("UPDATE shop_order SET amount = amount + 1 WHERE customer = :customer")
    with mariadb.begin() as other:
        other.add_all([Order(customer=name, amount=0) for name in ("ada", "bob")])
    both_wait = threading.Barrier(2)

    def work() -> None:
        with mariadb.begin() as other:
            other.add_all([Order(customer="eve", amount=n) for n in range(100, 150)])
            other.execute(change, {"customer": "bob"})
            both_wait.wait()
            other.execute(change, {"customer": "ada"})

    thread = threading.Thread(target=work)
    session.execute(change, {"customer": "ada"})
    thread.start()
    both_wait.wait()
    with pytest.raises(sa.exc.OperationalError) as caught:
        session.execute(change, {"customer": "bob"})
    thread.join()
    return caught.value


def test_after_a_deadlock_nothing_more_is_enqueued_in_the_transaction(mariadb: Database, ob: outbox.Outbox) -> None:
    with mariadb.session() as session:
        session.add(Order(customer="lost", amount=1))
        session.flush()
        error = deadlock(mariadb, session)
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        with pytest.raises(NoTransaction, match=r"M.+ has undone this transaction, after a deadlock"):
            session.commit()
        session.rollback()
        enqueue(mariadb.engine, ob)  # as the next transaction does

    assert (sqlstate(error.orig), is_passing(error), is_timeout(error)) == ("40P01", True, True)
    assert len(mariadb.entries) == 1
    assert "lost" not in [order.customer for order in mariadb.orders]


def test_a_deadlock_in_a_savepoint_is_a_conflict(mariadb: Database) -> None:
    """SQLAlchemy raises the error of its rollback to the savepoint, which is gone."""
    with (
        pytest.raises(RequestUndone, match="in favour of another one") as caught,
        undone_by_conflict(),
        mariadb.begin() as session,
        session.begin_nested(),
    ):
        raise deadlock(mariadb, session)

    error = caught.value.__cause__
    assert isinstance(error, sa.exc.OperationalError)
    assert (number_of(error.orig), sqlstate(error.orig)) == (SAVEPOINT_MISSING, DEADLOCK)
    assert (is_passing(error), lost_savepoint(error)) == (True, True)


@pytest.mark.parametrize("owns_session", [False, True])
def test_a_claim_whose_handler_swallows_a_deadlock_keeps_nothing(
    mariadb: Database, ob: outbox.Outbox, owns_session: bool
) -> None:
    def handler(session: Session, claim: outbox.Claim) -> None:
        session.add(Order(customer="lost", amount=1))
        session.flush()
        deadlock(mariadb, session)
        session.add(Order(customer="half", amount=1))
        claim.respond(201)

    def run(session: Session) -> None:
        if owns_session:
            ob.run_idempotent(session, "k", partial(handler, session), scope="a", content=REQUEST)
            return
        with ob.idempotent(session, "k", scope="a", content=REQUEST) as claim:
            handler(session, claim)
        session.commit()

    with mariadb.session() as session, pytest.raises(outbox.OutboxError):
        run(session)

    assert mariadb.records == []
    assert not {"lost", "half"} & {order.customer for order in mariadb.orders}


def test_the_error_of_a_duplicate_does_not_show_it(mariadb: Database, ob: outbox.Outbox) -> None:
    secret = "not-to-be-seen"
    with mariadb.engine.connect() as connection:
        row = {"kid": secret, "secret_check": "x", "recorded_at": database_now(connection)}
        connection.execute(TABLES.kid.insert(), row)
        with pytest.raises(sa.exc.IntegrityError) as caught:
            connection.execute(TABLES.kid.insert(), row)

    assert secret not in str(caught.value)
    assert secret not in str(caught.value.orig)
    assert sqlstate(caught.value.orig) == "23505"


@pytest.mark.owner
def test_a_missing_table_is_named_with_what_makes_it(mariadb: Database, ob: outbox.Outbox) -> None:
    mariadb.execute(sa.text("DROP TABLE outbox_key_lock"))

    with (
        pytest.raises(SchemaError, match="the outbox's table 'outbox_key_lock' does not exist"),
        mariadb.begin() as session,
    ):
        ob.idempotent(session, "k", scope="a", content=REQUEST).__enter__()
    with pytest.raises(SchemaError, match="lacks table outbox_key_lock"):
        migrations.check(mariadb.engine)


def test_a_transaction_may_lock_very_many_ordering_keys(mariadb: Database) -> None:
    """For so many ids in one statement the server would not use the index."""
    with mariadb.engine.begin() as connection:
        lock_ids(connection, TABLES, [uuid4() for _ in range(33_000)])

    assert mariadb.rows(key_lock(TABLES)) == []
