"""The first release: its tables and indexes, and on PostgreSQL its sequence and functions.

From the first release on this file is frozen, and `outbox/migrations/first_tables.py` with it: they hold what the revision
made, whatever `outbox/sql/` holds later. `outbox/sql/schema/functions.py` says what each function is for.
"""

from collections.abc import Callable
from functools import partial

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.schema import CreateSequence, DropSequence

from outbox.migrations.first_tables import Maker, create_tables, kind_of

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NEVER = "9999-12-31T00:00:00+00:00"
Quoted = Callable[[str], str]


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    has_functions = kind_of(op).has_functions
    if has_functions:
        op.execute(CreateSequence(sa.Sequence(f"{prefix}position", schema=schema)))
    create_tables(Maker(op, schema, prefix))
    if has_functions:
        quoted = partial(_quoted, op, schema, prefix)
        _create_cancel(op, quoted)
        _create_body_of(op, quoted)
        _create_claim_key(op, quoted)


def _create_cancel(op: Operations, quoted: Quoted) -> None:
    entry, queue, settlement, meta = map(quoted, ("entry", "queue", "settlement", "meta"))
    cancel = quoted("cancel")
    cancellable = (
        "q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent"
        f" AND NOT EXISTS (SELECT FROM {settlement} AS s WHERE s.id = q.id)"
        f" AND NOT EXISTS (SELECT FROM {meta} AS m WHERE m.suspended_reason IS NOT NULL OR CASE WHEN m.timeline IS NOT NULL"
        " THEN m.timeline <> substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END)"
    )
    op.execute(f"""
CREATE FUNCTION {cancel}(entry_id uuid, why text DEFAULT NULL) RETURNS boolean LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    SELECT q.id FROM {queue} AS q WHERE {cancellable} FOR UPDATE;
    UPDATE {queue} AS q SET due_at = CASE
        WHEN q.due_at = '{NEVER}' AND q.suspended_reason IS NULL THEN GREATEST(e.due_at, now()) ELSE q.due_at END
    FROM {entry} AS e WHERE e.id = q.id AND q.id = (
        SELECT n.id FROM {queue} AS n
        WHERE n.ordering_key = (SELECT q.ordering_key FROM {queue} AS q WHERE {cancellable})
            AND n.position > (SELECT q.position FROM {queue} AS q WHERE {cancellable}) AND n.state IN ('pending', 'retry')
        ORDER BY n.position LIMIT 1 FOR UPDATE
    );
    WITH cancelled AS (
        DELETE FROM {queue} AS q WHERE {cancellable}
        RETURNING q.id, q.deliveries, q.attempts, q.key_epoch
    ), settled AS (
        INSERT INTO {settlement} (id, state, deliveries, attempts, key_epoch, reason, settled_at)
        SELECT c.id, 'cancelled', c.deliveries, c.attempts, c.key_epoch, why, clock_timestamp() FROM cancelled AS c
    )
    SELECT EXISTS (SELECT FROM cancelled);
END""")
    op.execute(f"REVOKE ALL ON FUNCTION {cancel}(uuid, text) FROM PUBLIC")


def _create_body_of(op: Operations, quoted: Quoted) -> None:
    op.execute(f"""
CREATE FUNCTION {quoted("body_of")}(record_id uuid, on_day date) RETURNS bytea LANGUAGE plpgsql STABLE
AS $read$
DECLARE
    found bytea;
BEGIN
    EXECUTE $one$SELECT body FROM {quoted("body")} WHERE id = $1 AND day = $2$one$ INTO found USING record_id, on_day;
    RETURN found;
END
$read$""")


def _create_claim_key(op: Operations, quoted: Quoted) -> None:
    record, tombstone = quoted("record"), quoted("tombstone")
    body_of, claim_key = quoted("body_of"), quoted("claim_key")
    op.execute(f"""
CREATE FUNCTION {claim_key}(
    wanted uuid, lock_number bigint, OUT status smallint, OUT body bytea, OUT headers text, OUT fingerprint bytea,
    OUT fingerprint_version smallint, OUT expired boolean, OUT buried boolean, OUT lease_until timestamptz,
    OUT asked_at timestamptz, OUT locked boolean, OUT keeps_snapshot boolean
) LANGUAGE plpgsql AS $claim$
BEGIN
    locked := false;
    keeps_snapshot := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
    LOOP
        SELECT r.status, CASE WHEN r.body_day IS NULL THEN r.body ELSE {body_of}(r.id, r.body_day) END,
            r.headers, r.fingerprint, r.fingerprint_version, NOT (r.state = 'accepted' OR r.replay_until > clock_timestamp()),
            COALESCE(t.forget_at > clock_timestamp(), false), r.lease_until, clock_timestamp()
        INTO status, body, headers, fingerprint, fingerprint_version, expired, buried, lease_until, asked_at
        FROM (SELECT wanted AS id) AS w LEFT JOIN {record} AS r ON r.id = w.id LEFT JOIN {tombstone} AS t ON t.id = w.id;
        EXIT WHEN locked OR buried OR NOT COALESCE(expired, true);
        locked := pg_try_advisory_xact_lock(lock_number);
        EXIT WHEN NOT locked;
    END LOOP;
END
$claim$""")


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    kind = kind_of(op)
    if kind.has_functions:
        _drop_functions(op, schema, prefix)
    apart = (
        "tombstone",
        "mismatch",
        "record",
        "kid",
        "meta",
        "proposal",
        "audit",
        "event",
        "send_count",
        "dispatcher",
        "schedule",
        "callback",
        "blocked_group",
        "destination",
    )
    again = {"if_exists": True} if kind.is_stepwise else {}
    if kind.is_stepwise:
        op.drop_table(f"{prefix}key_lock", schema=schema, **again)
    for table in (*apart, "settlement", "queue", "entry"):
        op.drop_table(prefix + table, schema=schema, **again)
    if kind.has_functions:
        op.execute(DropSequence(sa.Sequence(f"{prefix}position", schema=schema)))


def _drop_functions(op: Operations, schema: str | None, prefix: str) -> None:
    """The functions, and what `outbox db partition` may have added: its table and its functions."""
    quoted = partial(_quoted, op, schema, prefix)
    body = quoted("body")
    name = body.replace("'", "''")
    op.execute(f"""
DO $outbox$ BEGIN
    IF to_regclass('{name}') IS NOT NULL THEN
        DROP FUNCTION {quoted("move_body")}() CASCADE;
        DROP FUNCTION {quoted("add_body_days")}();
        DROP TABLE {body};
    END IF;
END $outbox$""")
    for guard in ("guard_queue", "guard_entries", "guard_ids", "guard_audit"):  # `outbox db roles` may have made them
        op.execute(f"DROP FUNCTION IF EXISTS {quoted(guard)}() CASCADE")
    op.execute(f"DROP FUNCTION {quoted('claim_key')}(uuid, bigint)")
    op.execute(f"DROP FUNCTION {quoted('body_of')}(uuid, date)")
    op.execute(f"DROP FUNCTION {quoted('cancel')}(uuid, text)")


def _quoted(op: Operations, schema: str | None, prefix: str, name: str) -> str:
    table = sa.Table(prefix + name, sa.MetaData(), schema=schema)
    return op.get_context().dialect.identifier_preparer.format_table(table)
