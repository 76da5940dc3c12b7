"""Nothing is cancelled in a database that may have forgotten what was sent.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Nothing is rewritten. On PostgreSQL the function by which the app cancels is replaced: from now on it cancels nothing while
every dispatcher holds, or on a timeline that is not the one marked.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

NEVER = "9999-12-31T00:00:00+00:00"
REMEMBERS = """ AND NOT EXISTS (SELECT FROM {meta} AS m WHERE m.held_reason IS NOT NULL OR CASE WHEN m.timeline IS NOT NULL \
THEN m.timeline <> substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END)"""


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    _replace_cancel(op, schema, prefix, REMEMBERS)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    _replace_cancel(op, schema, prefix, "")


def _replace_cancel(op: Operations, schema: str | None, prefix: str, condition: str) -> None:
    dialect = op.get_context().dialect
    if dialect.name != "postgresql":
        return

    def quoted(name: str) -> str:
        return dialect.identifier_preparer.format_table(sa.Table(prefix + name, sa.MetaData(), schema=schema))

    entry, queue = quoted("entry"), quoted("queue")
    cancellable = "q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent"
    cancellable += condition.format(meta=quoted("meta"))
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
