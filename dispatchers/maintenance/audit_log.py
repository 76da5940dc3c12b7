"""Deletes the oldest rows of the audit log, and the oldest proposals."""

from datetime import datetime, timedelta

from sqlalchemy import Connection, Table, delete, select

from dispatchers.store.protocol import Run
from outbox.sql.clock import database_now
from outbox.sql.schema.tables import Tables

AUDIT_KEPT_FOR = timedelta(days=400)
"""Longer than the entries: an auditor asks for a year, and begins some weeks after its end."""

MAX_ROWS = 5000  # in one run: some 50 ms. Operators write far fewer in the time between two


async def forget_old_decisions(run: Run, tables: Tables) -> int:
    """Delete the rows of decisions that are older than `AUDIT_KEPT_FOR`, the oldest first; returns how many."""
    return await run(lambda connection: delete_old_decisions(connection, tables))


def delete_old_decisions(connection: Connection, tables: Tables) -> int:
    """`forget_old_decisions` in the caller's transaction."""
    before = database_now(connection) - AUDIT_KEPT_FOR
    return sum(_delete_older(connection, table, before) for table in (tables.audit, tables.proposal))


def _delete_older(connection: Connection, table: Table, before: datetime) -> int:
    at, id = table.c.at, table.c.id
    oldest = select(id).where(at < before).order_by(at, id).limit(MAX_ROWS).with_for_update(skip_locked=True)
    ids = connection.execute(oldest).scalars().all()
    return connection.execute(delete(table).where(id.in_(ids))).rowcount
