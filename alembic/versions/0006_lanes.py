"""PostgreSQL's function by which the app cancels an entry lets the next of its lane come.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

No table is touched. On SQLite there is no such function, and nothing to do.
"""

from collections.abc import Callable

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

NEVER = "9999-12-31T00:00:00+00:00"


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    quoted = _quoting(op, schema, prefix)
    if quoted is None:
        return
    entry, queue = quoted("entry"), quoted("queue")
    cancellable = "q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent"
    op.execute(f"""
CREATE OR REPLACE FUNCTION {quoted("cancel")}(entry_id uuid) RETURNS boolean LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    SELECT q.id FROM {queue} AS q WHERE {cancellable} FOR UPDATE;
    UPDATE {queue} AS q SET due_at = CASE
        WHEN q.due_at = '{NEVER}' AND q.hold IS NULL THEN GREATEST(e.due_at, now()) ELSE q.due_at END
    FROM {entry} AS e WHERE e.id = q.id AND q.id = (
        SELECT n.id FROM {queue} AS n, {queue} AS q
        WHERE {cancellable} AND n.ordering_key = q.ordering_key AND n.position > q.position AND n.state IN ('pending', 'retry')
        ORDER BY n.position LIMIT 1 FOR UPDATE OF n
    );
    WITH cancelled AS (
        DELETE FROM {queue} AS q WHERE {cancellable}
        RETURNING q.id, q.deliveries, q.attempts, q.key_epoch
    ), settled AS (
        INSERT INTO {quoted("settlement")} (id, state, deliveries, attempts, key_epoch, settled_at)
        SELECT c.id, 'cancelled', c.deliveries, c.attempts, c.key_epoch, clock_timestamp() FROM cancelled AS c
    )
    SELECT EXISTS (SELECT FROM cancelled);
END""")


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    quoted = _quoting(op, schema, prefix)
    if quoted is None:
        return
    op.execute(f"""
CREATE OR REPLACE FUNCTION {quoted("cancel")}(entry_id uuid) RETURNS boolean LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    WITH cancelled AS (
        DELETE FROM {quoted("queue")} AS q
        WHERE q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent
        RETURNING q.id, q.deliveries, q.attempts, q.key_epoch
    ), settled AS (
        INSERT INTO {quoted("settlement")} (id, state, deliveries, attempts, key_epoch, settled_at)
        SELECT c.id, 'cancelled', c.deliveries, c.attempts, c.key_epoch, clock_timestamp() FROM cancelled AS c
    )
    SELECT EXISTS (SELECT FROM cancelled);
END""")


def _quoting(op: Operations, schema: str | None, prefix: str) -> Callable[[str], str] | None:
    """How a table's or function's name is written; None where there are no functions."""
    dialect = op.get_context().dialect
    if dialect.name != "postgresql":
        return None

    def quoted(name: str) -> str:
        written: str = dialect.identifier_preparer.format_table(sa.Table(prefix + name, sa.MetaData(), schema=schema))
        return written

    return quoted
