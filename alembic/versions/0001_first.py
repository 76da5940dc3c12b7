"""Every table of the first release.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What the tables mean is said there.
"""

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def instant(dialect: str) -> sa.types.TypeEngine[Any]:
    """A point in time to the microsecond. All that differs between databases by type; MariaDB's DATETIME(6) will stand here."""
    return sa.BigInteger() if dialect == "sqlite" else sa.DateTime(timezone=True)


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    dialect = op.get_context().dialect
    at = instant(dialect.name)

    def index(name: str, table: str, columns: list[str], where: str | None = None) -> None:
        condition = None if where is None else sa.text(where)
        op.create_index(
            prefix + name, prefix + table, columns, schema=schema, postgresql_where=condition, sqlite_where=condition
        )

    def store_with(table: sa.Table, parameters: str) -> None:
        if dialect.name == "postgresql":
            op.execute(sa.DDL(f"ALTER TABLE %(fullname)s SET ({parameters})").against(table))

    if dialect.supports_sequences:
        op.execute(CreateSequence(sa.Sequence(f"{prefix}position", schema=schema)))

    op.create_table(
        f"{prefix}entry",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(255), nullable=False),
        sa.Column("operation", sa.String(128), nullable=False),
        sa.Column("discriminator", sa.String(255), nullable=False),
        sa.Column("kid", sa.String(64), nullable=False),
        sa.Column("tag", sa.LargeBinary(32), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=False),
        sa.Column("record_id", sa.Uuid()),
        sa.Column("destination", sa.String(255), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("headers", sa.Text(), nullable=False),
        sa.Column("ordering_key", sa.String(255)),
        sa.Column("schema_version", sa.SmallInteger(), nullable=False),
        sa.Column("due_at", at, nullable=False),
        sa.Column("created_at", at, nullable=False),
        schema=schema,
    )
    index("entry_parent", "entry", ["parent_id"])
    index("entry_record", "entry", ["record_id"], where="record_id <> parent_id")

    queue = op.create_table(
        f"{prefix}queue",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("destination", sa.String(255), nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("due_at", at, nullable=False),
        sa.Column("lease_until", at),
        sa.Column("lease_token", sa.Uuid()),
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
        sa.Column("hold", sa.Text()),
        sa.Column("outcome", sa.Text()),
        sa.CheckConstraint("state IN ('pending', 'sending', 'retry', 'uncertain')", name=f"{prefix}queue_state"),
        sa.CheckConstraint(
            "(state = 'sending') = (lease_token IS NOT NULL)"
            " AND (lease_token IS NULL) = (lease_until IS NULL)"
            " AND (lease_token IS NULL) = (leased_at IS NULL)",
            name=f"{prefix}queue_lease",
        ),
        sa.CheckConstraint("in_doubt_since IS NULL OR maybe_sent", name=f"{prefix}queue_doubt"),
        sa.CheckConstraint("deliveries >= 0 AND attempts >= 0 AND key_epoch >= 0", name=f"{prefix}queue_counts"),
        schema=schema,
    )
    index("queue_due", "queue", ["destination", "due_at"])
    index("queue_lane", "queue", ["ordering_key", "position"], where="ordering_key IS NOT NULL")
    store_with(
        queue,
        "fillfactor = 33, autovacuum_vacuum_scale_factor = 0,"
        " autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0",
    )

    op.create_table(
        f"{prefix}settlement",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("result", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("key_epoch", sa.SmallInteger(), nullable=False),
        sa.Column("settled_at", at, nullable=False),
        sa.CheckConstraint("state IN ('delivered', 'failed', 'cancelled')", name=f"{prefix}settlement_state"),
        schema=schema,
    )

    op.create_table(
        f"{prefix}destination",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("paused_reason", sa.Text()),
        sa.Column("cool_until", at),
        sa.Column("breaker", sa.String(9), nullable=False),
        sa.Column("breaker_until", at),
        sa.Column("breaker_failures", sa.Integer(), nullable=False),
        sa.Column("rate_per_second", sa.Float()),
        sa.Column("changed_at", at, nullable=False),
        sa.CheckConstraint("breaker IN ('closed', 'open', 'half_open')", name=f"{prefix}destination_breaker"),
        schema=schema,
    )

    op.create_table(
        f"{prefix}halted",
        sa.Column("ordering_key", sa.String(255), primary_key=True),
        sa.Column("entry_id", sa.Uuid(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", at, nullable=False),
        schema=schema,
    )

    op.create_table(
        f"{prefix}event",
        # Integer on SQLite: only INTEGER PRIMARY KEY counts up by itself
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("entry_id", sa.Uuid(), nullable=False),
        sa.Column("at", at, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("delivery", sa.Integer()),
        sa.Column("actor", sa.String(255)),
        sa.Column("reason", sa.Text()),
        sa.CheckConstraint("kind IN ('attempt', 'decision')", name=f"{prefix}event_kind"),
        schema=schema,
    )
    index("event_entry", "event", ["entry_id"])

    op.create_table(
        f"{prefix}meta",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("environment", sa.String(64)),
        sa.Column("system_identifier", sa.String(32)),
        sa.Column("timeline", sa.String(8)),
        sa.Column("lsn", sa.String(32)),
        sa.Column("held_reason", sa.Text()),
        sa.Column("checked_at", at),
        sa.Column("number", sa.BigInteger()),
        sa.Column("place", sa.String(64)),
        sa.Column("resumed_at", at),
        sa.Column("resumed_by", sa.String(255)),
        sa.Column("resumed_reason", sa.Text()),
        sa.CheckConstraint("id = 1", name=f"{prefix}meta_single"),
        schema=schema,
    )

    record = op.create_table(
        f"{prefix}record",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(255), nullable=False),
        sa.Column("kid", sa.String(64), nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("status", sa.SmallInteger()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("headers", sa.Text()),
        sa.Column("completion", sa.String(128)),
        sa.Column("lease_token", sa.Uuid()),
        sa.Column("lease_until", at),
        sa.Column("created_at", at, nullable=False),
        sa.Column("answered_at", at),
        sa.Column("replay_until", at, nullable=False),
        sa.Column("keep_until", at, nullable=False),
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
        schema=schema,
    )
    index("record_keep", "record", ["keep_until"])
    store_with(record, "fillfactor = 90")

    op.create_table(
        f"{prefix}tombstone",
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("forget_at", at, nullable=False),
        schema=schema,
    )
    index("tombstone_forget", "tombstone", ["forget_at"])


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for table in ("tombstone", "record", "meta", "event", "halted", "destination", "settlement", "queue", "entry"):
        op.drop_table(prefix + table, schema=schema)
    if op.get_context().dialect.supports_sequences:
        op.execute(DropSequence(sa.Sequence(f"{prefix}position", schema=schema)))
