"""On PostgreSQL, the function by which a request asks for its key in one round trip.

Frozen: it says what this revision made, whatever `outbox/functions.py` says today. What it means is said there.

Touches no table.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    claim_key, body_of, record, tombstone = (
        _quoted(op, schema, prefix, name) for name in ("claim_key", "body_of", "record", "tombstone")
    )
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
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"DROP FUNCTION {_quoted(op, schema, prefix, 'claim_key')}(uuid, bigint)")


def _quoted(op: Operations, schema: str | None, prefix: str, name: str) -> str:
    table = sa.Table(prefix + name, sa.MetaData(), schema=schema)
    return op.get_context().dialect.identifier_preparer.format_table(table)
