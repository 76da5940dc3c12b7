"""How much an enqueue writes to the database's log where its tables are large and none of their pages was written lately."""

import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import Database

import outbox

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
