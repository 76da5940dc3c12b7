"""How entries are written: on MariaDB, where a failed statement undoes only itself, and how little PostgreSQL logs of it."""

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import CHARGE, PAYLOAD, TABLES, Database, Order

import outbox
from outbox.errors import NoTransaction
from outbox.sql.errors.statement import is_ours
from outbox.sql.schema.tables import define_tables

REFUSED_BY_SETTING = (
    "CREATE TRIGGER refuse BEFORE INSERT ON outbox_queue FOR EACH ROW IF @refuse THEN SIGNAL SQLSTATE '45000'; END IF"
)


@pytest.mark.owner
@pytest.mark.parametrize("count", [1, 2])
def test_an_entry_without_its_queue_row_cannot_be_committed(mariadb: Database, ob: outbox.Outbox, count: int) -> None:
    """With `if_exists="ignore"` the second try of the commit would take the entry that is left for an earlier one."""
    mariadb.execute(sa.text(REFUSED_BY_SETTING))

    with mariadb.session() as session:
        session.execute(sa.text("SET @refuse = 1"))
        session.add(Order(customer="ada", amount=1))
        for number in range(count):
            ob.enqueue(session, CHARGE, PAYLOAD, parent=f"invoice:{number}", if_exists="ignore")
        with pytest.raises(sa.exc.DBAPIError):
            session.flush()
        session.connection().execute(sa.text("SET @refuse = 0"))
        with pytest.raises(NoTransaction, match="a part of it, after another error"):
            session.commit()

    assert mariadb.counts() == {"orders": 0, "records": 0, "entries": 0, "queue": 0}


@pytest.mark.owner
@pytest.mark.parametrize("count", [1, 2])
def test_after_a_failed_savepoint_other_entries_are_written(mariadb: Database, ob: outbox.Outbox, count: int) -> None:
    mariadb.execute(sa.text(REFUSED_BY_SETTING))

    with mariadb.session() as session:
        session.execute(sa.text("SET @refuse = 1"))
        savepoint = session.begin_nested()
        for number in range(count):
            ob.enqueue(session, CHARGE, PAYLOAD, parent=f"invoice:{number}")
        with pytest.raises(sa.exc.DBAPIError):
            savepoint.commit()
        savepoint.rollback()
        session.execute(sa.text("SET @refuse = 0"))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:kept")
        session.commit()

    assert [entry.parent for entry in mariadb.entries] == ["invoice:kept"]
    assert len(mariadb.queue) == 1


def test_a_flush_that_is_longer_than_a_packet_is_written(mariadb: Database, ob: outbox.Outbox) -> None:
    """The server takes 16 MiB in one statement."""
    with mariadb.begin() as session:
        for number in range(90):
            ob.enqueue(session, CHARGE, {"quotes": '"' * 50_000}, parent=f"invoice:{number}")

    with mariadb.observer.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(TABLES.entry)) == 90


def test_a_database_whose_name_mariadb_quotes_is_recognised_in_statements() -> None:
    define_tables(sa.MetaData(), schema="shop-2")

    assert is_ours("INSERT INTO `shop-2`.outbox_entry (id) VALUES (1)")
    assert not is_ours("INSERT INTO `shop-3`.outbox_entry (id) VALUES (1)")


# --- How much an enqueue writes to the database's log where its tables are large and none of their pages was written
# lately.


ROWS = 100_000
PARENTS, ENTRIES = 30, 10  # entries under each parent
MAX_BYTES = 3_000  # an entry; 2,000 were measured, and 10,000 where each entry's id was of its own

FILL = f"""
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id,
        destination, payload, options, headers, schema_version, due_at, created_at)
    SELECT gen_random_uuid(), 'test', '', 'app', 'order:' || n, 'crm.upsert', '', 'k1', sha256(n::text::bytea),
        gen_random_uuid(), 'crm', '{{}}', '{{}}', '{{}}', 1, now(), now()
    FROM generate_series(1, {ROWS}) AS n
"""


def test_the_entries_of_one_request_share_the_pages_that_they_change(postgresql: Database, ob: outbox.Outbox) -> None:
    postgresql.execute(sa.text(FILL))
    with postgresql.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM outbox_entry")
        connection.exec_driver_sql("CHECKPOINT")  # the first change of a page after it writes the whole page

    with postgresql.engine.connect() as connection:
        before = wal_written(connection)
        for parent in range(PARENTS):
            with Session(connection) as session:
                for number in range(ENTRIES):
                    ob.enqueue(session, "crm.upsert", {}, parent=f"request:{parent}", discriminator=str(number))
                session.commit()
        written = wal_written(connection) - before

    assert 0 < written / (PARENTS * ENTRIES) <= MAX_BYTES


def wal_written(connection: sa.Connection) -> int:
    """By this connection, where the server reports that (18 and later); else by the whole server."""
    if connection.dialect.server_version_info < (18,):  # type: ignore[operator]  # known once connected
        return int(connection.exec_driver_sql("SELECT pg_current_wal_insert_lsn() - '0/0'").scalar_one())
    connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    connection.commit()
    written = connection.exec_driver_sql("SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())").scalar_one()
    connection.commit()
    return int(written)
