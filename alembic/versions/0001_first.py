"""Every table, index and function of the first release.

From the first release on this file is frozen: it holds what the revision made, whatever `outbox/sql/schema.py` holds later.
`outbox/sql/schema.py` and `outbox/sql/functions.py` say what each of them is for.
"""

from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NEVER = "9999-12-31T00:00:00+00:00"


def instant(dialect: str) -> sa.types.TypeEngine[Any]:
    """A point in time to the microsecond; on MariaDB in UTC."""
    if dialect == "mariadb":
        from sqlalchemy.dialects.mysql import DATETIME

        return DATETIME(fsp=6)
    return sa.BigInteger() if dialect == "sqlite" else sa.DateTime(timezone=True)


def instant_range(dialect: str) -> tuple[str, str]:
    """The first and the last that are stored: what every driver reads back in every time zone."""
    if dialect == "sqlite":
        return "0", "253402214400000000"
    zone = "" if dialect == "mariadb" else "+00:00"
    return f"'1970-01-01 00:00:00{zone}'", f"'9999-12-31 00:00:00{zone}'"


MARIADB: dict[str, Any] = {
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}
LONG = 2**32 - 1
STEPWISE = ("mariadb", "portable")
"""Where each statement may commit by itself, as on MariaDB and CockroachDB: a run may find what one before it has made."""

ID = sa.Uuid().with_variant(sa.BINARY(16), "mariadb")
TEXT = sa.Text().with_variant(sa.Text(LONG), "mariadb")
BINARY = sa.LargeBinary().with_variant(sa.LargeBinary(LONG), "mariadb")


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    dialect = op.get_context().dialect
    at = instant(dialect.name)
    again = {"if_not_exists": True} if dialect.name in STEPWISE else {}
    create_table = partial(op.create_table, **again, **(MARIADB if dialect.name == "mariadb" else {}))

    def index(name: str, table: str, columns: list[str], where: str | None = None) -> None:
        condition = None if where is None else sa.text(where)
        wheres: dict[str, Any] = {"postgresql_where": condition, "sqlite_where": condition}
        op.create_index(prefix + name, prefix + table, columns, schema=schema, **again, **wheres)

    is_true = " = 1" if dialect.name == "sqlite" else ""

    low, high = instant_range(dialect.name)

    def storable(name: str, *columns: str) -> sa.CheckConstraint:
        checked = " AND ".join(f"{column} BETWEEN {low} AND {high}" for column in columns)
        return sa.CheckConstraint(checked, name=prefix + name)

    def store_with(table: sa.Table, parameters: str) -> None:
        if dialect.name == "postgresql":
            op.execute(sa.DDL(f"ALTER TABLE %(fullname)s SET ({parameters})").against(table))

    if dialect.name == "postgresql":
        op.execute(CreateSequence(sa.Sequence(f"{prefix}position", schema=schema)))

    create_table(
        f"{prefix}entry",
        sa.Column("id", ID, primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(255), nullable=False),
        sa.Column("operation", sa.String(128), nullable=False),
        sa.Column("discriminator", sa.String(255), nullable=False),
        sa.Column("kid", sa.String(64), nullable=False),
        sa.Column("tag", sa.LargeBinary(32), nullable=False),
        sa.Column("parent_id", ID, nullable=False),
        sa.Column("record_id", ID),
        sa.Column("destination", sa.String(255), nullable=False),
        sa.Column("payload", BINARY, nullable=False),
        sa.Column("options", TEXT, nullable=False),
        sa.Column("headers", TEXT, nullable=False),
        sa.Column("ordering_key", sa.String(255)),
        sa.Column("schema_version", sa.SmallInteger(), nullable=False),
        sa.Column("due_at", at, nullable=False),
        sa.Column("created_at", at, nullable=False),
        storable("entry_instants", "due_at", "created_at"),
        schema=schema,
    )
    index("entry_record", "entry", ["record_id"], where="record_id <> parent_id")

    queue = create_table(
        f"{prefix}queue",
        sa.Column("id", ID, primary_key=True),
        sa.Column("destination", sa.String(255), nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("due_at", at, nullable=False),
        sa.Column("lease_until", at),
        sa.Column("lease_token", ID),
        sa.Column("leased_at", at),
        sa.Column("first_leased_at", at),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("maybe_sent", sa.Boolean(), nullable=False),
        sa.Column("in_doubt_since", at),
        sa.Column("key_epoch", sa.SmallInteger(), nullable=False),
        sa.Column("sent_as", sa.String(255)),
        sa.Column("ordering_key", sa.String(255)),
        sa.Column("position", sa.BigInteger()),
        sa.Column("suspended_reason", TEXT),
        sa.Column("outcome", TEXT),
        sa.Column("waiting_since", at),
        sa.Column("fair", sa.String(255)),
        sa.Column("scope", sa.String(255)),
        sa.Column("callback", sa.String(160)),
        sa.CheckConstraint("state IN ('pending', 'sending', 'retry', 'uncertain')", name=f"{prefix}queue_state"),
        sa.CheckConstraint(
            "(state = 'sending') = (lease_token IS NOT NULL)"
            " AND (lease_token IS NULL) = (lease_until IS NULL)"
            " AND (lease_token IS NULL) = (leased_at IS NULL)",
            name=f"{prefix}queue_lease",
        ),
        sa.CheckConstraint("in_doubt_since IS NULL OR maybe_sent", name=f"{prefix}queue_doubt"),
        sa.CheckConstraint(
            "deliveries BETWEEN 0 AND 1000000000 AND attempts BETWEEN 0 AND 1000000000 AND key_epoch BETWEEN 0 AND 32000",
            name=f"{prefix}queue_counts",
        ),
        storable("queue_instants", "due_at"),
        schema=schema,
    )
    index("queue_due", "queue", ["destination", "due_at"])
    index("queue_fair", "queue", ["fair", "scope", "due_at"], where="fair IS NOT NULL")
    index("queue_group", "queue", ["ordering_key", "position"], where="ordering_key IS NOT NULL")
    index("queue_callback", "queue", ["callback"], where="callback IS NOT NULL")
    index("queue_in_doubt", "queue", ["in_doubt_since", "id"], where=f"maybe_sent{is_true}")
    store_with(
        queue,
        "fillfactor = 33, autovacuum_vacuum_scale_factor = 0,"
        " autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0",
    )

    create_table(
        f"{prefix}settlement",
        sa.Column("id", ID, primary_key=True),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("result", TEXT),
        sa.Column("reason", TEXT),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("key_epoch", sa.SmallInteger(), nullable=False),
        sa.Column("settled_at", at, nullable=False),
        sa.CheckConstraint("state IN ('delivered', 'failed', 'cancelled')", name=f"{prefix}settlement_state"),
        schema=schema,
    )
    index("settlement_settled", "settlement", ["settled_at", "id"])

    create_table(
        f"{prefix}destination",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("paused_reason", TEXT),
        sa.Column("cooldown_until", at),
        sa.Column("breaker", sa.String(9), nullable=False),
        sa.Column("breaker_until", at),
        sa.Column("breaker_failures", sa.Integer(), nullable=False),
        sa.Column("rate_per_second", sa.Float()),
        sa.Column("changed_at", at, nullable=False),
        sa.Column("breaker_token", ID),
        sa.Column("rate_at", at),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", at),
        sa.Column("permits_max", sa.Integer()),
        sa.Column("permits_taken", TEXT),
        sa.CheckConstraint("breaker IN ('closed', 'open', 'half_open')", name=f"{prefix}destination_breaker"),
        schema=schema,
    )

    create_table(
        f"{prefix}blocked_group",
        sa.Column("ordering_key", sa.String(255), primary_key=True),
        sa.Column("entry_id", ID, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("since", at, nullable=False),
        schema=schema,
    )

    create_table(
        f"{prefix}callback",
        sa.Column("name", sa.String(160), primary_key=True),
        sa.Column("recorded_at", at, nullable=False),
        sa.Column("started_at", at, nullable=False),
        schema=schema,
    )

    create_table(
        f"{prefix}dispatcher",
        sa.Column("id", ID, primary_key=True),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("since", at, nullable=False),
        sa.Column("seen_at", at, nullable=False),
        sa.Column("in_flight", sa.Integer(), nullable=False),
        sa.Column("declared", TEXT, nullable=False),
        schema=schema,
    )

    create_table(
        f"{prefix}send_count",
        sa.Column("minute", at, primary_key=True),
        sa.Column("destination", sa.String(255), primary_key=True),
        sa.Column("result", sa.String(16), primary_key=True),
        sa.Column("bucket", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("sends", sa.BigInteger(), nullable=False),
        schema=schema,
    )

    create_table(
        f"{prefix}event",
        # Integer on SQLite: only INTEGER PRIMARY KEY counts up by itself
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("entry_id", ID, nullable=False),
        sa.Column("at", at, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("delivery", sa.Integer()),
        sa.Column("actor", sa.String(255)),
        sa.Column("reason", TEXT),
        sa.CheckConstraint("kind IN ('attempt', 'decision', 'lookup')", name=f"{prefix}event_kind"),
        schema=schema,
    )
    index("event_entry", "event", ["entry_id"])

    create_table(
        f"{prefix}audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", at, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", TEXT, nullable=False),
        sa.Column("reason", TEXT),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('entry', 'entries', 'destination', 'ordering_group', 'request', 'database')",
            name=f"{prefix}audit_kind",
        ),
        schema=schema,
    )
    index("audit_at", "audit", ["at", "id"])

    create_table(
        f"{prefix}proposal",
        sa.Column("id", ID, primary_key=True),
        sa.Column("at", at, nullable=False),
        sa.Column("expires_at", at, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("sentence", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("decision", TEXT, nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", at),
        sa.CheckConstraint("state IN ('open', 'confirmed', 'withdrawn')", name=f"{prefix}proposal_state"),
        sa.CheckConstraint(
            "(state = 'open') = (decided_by IS NULL) AND (decided_by IS NULL) = (decided_at IS NULL)",
            name=f"{prefix}proposal_decided",
        ),
        schema=schema,
    )
    index("proposal_at", "proposal", ["at", "id"])

    create_table(
        f"{prefix}meta",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("environment", sa.String(64)),
        sa.Column("system_identifier", sa.String(32)),
        sa.Column("timeline", sa.String(8)),
        sa.Column("lsn", sa.String(32)),
        sa.Column("suspended_reason", TEXT),
        sa.Column("checked_at", at),
        sa.Column("number", sa.BigInteger()),
        sa.Column("place", sa.String(64)),
        sa.Column("resumed_at", at),
        sa.Column("resumed_by", sa.String(255)),
        sa.Column("resumed_reason", TEXT),
        sa.CheckConstraint("id = 1", name=f"{prefix}meta_single"),
        schema=schema,
    )

    create_table(
        f"{prefix}kid",
        sa.Column("kid", sa.String(64), primary_key=True),
        sa.Column("secret_check", sa.String(16), nullable=False),
        sa.Column("recorded_at", at, nullable=False),
        schema=schema,
    )

    record = create_table(
        f"{prefix}record",
        sa.Column("id", ID, primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(255), nullable=False),
        sa.Column("kid", sa.String(64), nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("status", sa.SmallInteger()),
        sa.Column("body", BINARY),
        sa.Column("headers", TEXT),
        sa.Column("completion", sa.String(128)),
        sa.Column("lease_token", ID),
        sa.Column("lease_until", at),
        sa.Column("created_at", at, nullable=False),
        sa.Column("answered_at", at),
        sa.Column("replay_until", at, nullable=False),
        sa.Column("keep_until", at, nullable=False),
        sa.Column("body_day", sa.Date()),
        sa.CheckConstraint("state IN ('accepted', 'leased', 'succeeded', 'failed')", name=f"{prefix}record_state"),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'failed')) = (answered_at IS NOT NULL)"
            " AND (answered_at IS NULL OR (status IS NOT NULL AND body IS NOT NULL AND headers IS NOT NULL))",
            name=f"{prefix}record_answer",
        ),
        sa.CheckConstraint(
            "(state = 'leased') = (lease_token IS NOT NULL) AND (lease_token IS NULL) = (lease_until IS NULL)",
            name=f"{prefix}record_lease",
        ),
        storable("record_instants", "lease_until", "created_at", "answered_at", "replay_until", "keep_until"),
        schema=schema,
    )
    index("record_keep", "record", ["keep_until", "id"])
    index("record_open", "record", ["state", "created_at", "id"], where="state IN ('accepted', 'leased')")
    index("record_body", "record", ["body_day", "keep_until"], where="body_day IS NOT NULL")
    store_with(record, "fillfactor = 90")

    create_table(
        f"{prefix}mismatch",
        sa.Column("id", ID, sa.ForeignKey(record.c.id, ondelete="CASCADE"), primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("first_at", at, nullable=False),
        sa.Column("last_at", at, nullable=False),
        schema=schema,
    )
    index("mismatch_last", "mismatch", ["last_at", "id"])

    create_table(
        f"{prefix}tombstone",
        sa.Column("id", ID, primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("forget_at", at, nullable=False),
        schema=schema,
    )
    index("tombstone_forget", "tombstone", ["forget_at", "id"])

    if dialect.name in ("mariadb", "portable"):
        create_table(f"{prefix}key_lock", sa.Column("id", ID, primary_key=True), schema=schema)
    if dialect.name == "postgresql":
        _create_functions(op, schema, prefix)


def _create_functions(op: Operations, schema: str | None, prefix: str) -> None:
    quoted = partial(_quoted, op, schema, prefix)
    entry, queue, settlement, meta = quoted("entry"), quoted("queue"), quoted("settlement"), quoted("meta")
    record, tombstone, body = quoted("record"), quoted("tombstone"), quoted("body")
    cancel, body_of, claim_key = quoted("cancel"), quoted("body_of"), quoted("claim_key")
    cancellable = (
        "q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent"
        f" AND NOT EXISTS (SELECT FROM {settlement} AS s WHERE s.id = q.id)"
        f" AND NOT EXISTS (SELECT FROM {meta} AS m WHERE m.suspended_reason IS NOT NULL OR CASE WHEN m.timeline IS NOT NULL"
        " THEN m.timeline <> substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END)"
    )
    op.execute(f"""
CREATE FUNCTION {cancel}(entry_id uuid) RETURNS boolean LANGUAGE sql SECURITY DEFINER
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
        INSERT INTO {settlement} (id, state, deliveries, attempts, key_epoch, settled_at)
        SELECT c.id, 'cancelled', c.deliveries, c.attempts, c.key_epoch, clock_timestamp() FROM cancelled AS c
    )
    SELECT EXISTS (SELECT FROM cancelled);
END""")
    op.execute(f"REVOKE ALL ON FUNCTION {cancel}(uuid) FROM PUBLIC")
    op.execute(f"""
CREATE FUNCTION {body_of}(record_id uuid, on_day date) RETURNS bytea LANGUAGE plpgsql STABLE
AS $read$
DECLARE
    found bytea;
BEGIN
    EXECUTE $one$SELECT body FROM {body} WHERE id = $1 AND day = $2$one$ INTO found USING record_id, on_day;
    RETURN found;
END
$read$""")
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
    dialect = op.get_context().dialect
    if dialect.name == "postgresql":
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
        "callback",
        "blocked_group",
        "destination",
    )
    again = {"if_exists": True} if dialect.name in STEPWISE else {}
    if dialect.name in ("mariadb", "portable"):
        op.drop_table(f"{prefix}key_lock", schema=schema, **again)
    for table in (*apart, "settlement", "queue", "entry"):
        op.drop_table(prefix + table, schema=schema, **again)
    if dialect.name == "postgresql":
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
    op.execute(f"DROP FUNCTION IF EXISTS {quoted('guard_queue')}() CASCADE")  # `outbox db roles` may have made it
    op.execute(f"DROP FUNCTION {quoted('claim_key')}(uuid, bigint)")
    op.execute(f"DROP FUNCTION {quoted('body_of')}(uuid, date)")
    op.execute(f"DROP FUNCTION {quoted('cancel')}(uuid)")


def _quoted(op: Operations, schema: str | None, prefix: str, name: str) -> str:
    table = sa.Table(prefix + name, sa.MetaData(), schema=schema)
    return op.get_context().dialect.identifier_preparer.format_table(table)
