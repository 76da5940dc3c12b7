"""The tables and indexes of the first release: revision 0001 creates them.

From the first release on this file is frozen, as the revision is: it holds what the revision made, whatever
`outbox/sql/schema/tables.py` holds later. `outbox/sql/schema/tables.py` says what each of them is for.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.schema import SchemaItem

LONG = 2**32 - 1
ID = sa.Uuid().with_variant(sa.BINARY(16), "mariadb", "mysql")
TEXT = sa.Text().with_variant(sa.Text(LONG), "mariadb", "mysql")
BINARY = sa.LargeBinary().with_variant(sa.LargeBinary(LONG), "mariadb", "mysql")


@dataclass(frozen=True)
class Kind:
    """What the revision makes in another way on another database.

    at: a point in time to the microsecond. zone: of an instant as text. is_stepwise: whether each statement may commit by
    itself, as on MariaDB, MySQL and CockroachDB: a run may find what one before it has made. has_index_if_not_exists: whether
    CREATE INDEX can allow for that.
    """

    at: sa.types.TypeEngine[Any] = field(default_factory=partial(sa.DateTime, timezone=True))
    zone: str = "+00:00"
    is_true: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    is_stepwise: bool = False
    has_index_if_not_exists: bool = True
    has_functions: bool = False
    stores_integers: bool = False


def _of_innodb(collation: str) -> dict[str, Any]:
    """SQLAlchemy has two names for a MariaDB: that of the URL, and `mysql`."""
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {f"{name}_{option}": value for name in ("mariadb", "mysql") for option, value in options.items()}


KINDS = {
    "postgresql": Kind(has_functions=True),
    "portable": Kind(is_stepwise=True),
    "mariadb": Kind(
        at=DATETIME(fsp=6),
        zone="",
        options=_of_innodb("utf8mb4_nopad_bin"),
        is_stepwise=True,
    ),
    "mysql": Kind(
        at=DATETIME(fsp=6),
        zone="",
        options=_of_innodb("utf8mb4_0900_bin"),
        is_stepwise=True,
        has_index_if_not_exists=False,
    ),
    "sqlite": Kind(at=sa.BigInteger(), is_true=" = 1", stores_integers=True),
}


def kind_of(op: Operations) -> Kind:
    context = op.get_context()
    return KINDS["mariadb" if getattr(context.dialect, "is_mariadb", False) else context.dialect.name]


@dataclass(frozen=True)
class Maker:
    """Makes tables and indexes in one schema, under one prefix, in the types of one database."""

    op: Operations
    schema: str | None
    prefix: str

    @property
    def kind(self) -> Kind:
        return kind_of(self.op)

    @property
    def at(self) -> sa.types.TypeEngine[Any]:
        return self.kind.at

    @property
    def is_true(self) -> str:
        return self.kind.is_true

    def table(self, name: str, *items: SchemaItem) -> sa.Table:
        options = self._again | self.kind.options
        return self.op.create_table(self.prefix + name, *items, schema=self.schema, **options)

    def index(self, name: str, table: str, columns: list[str], where: str | None = None) -> None:
        if not self.kind.has_index_if_not_exists:
            self._prepare_index(self.prefix + name, self.prefix + table, columns)
            return
        condition = None if where is None else sa.text(where)
        wheres: dict[str, Any] = {"postgresql_where": condition, "sqlite_where": condition}
        wheres |= self._again
        self.op.create_index(self.prefix + name, self.prefix + table, columns, schema=self.schema, **wheres)

    def _prepare_index(self, name: str, table: str, columns: list[str]) -> None:
        """Create the index unless it exists, also where someone runs the printed SQL again."""
        names = self.op.get_context().dialect.identifier_preparer
        on = names.format_table(sa.table(table, schema=self.schema))
        create = f"CREATE INDEX {names.quote(name)} ON {on} ({', '.join(map(names.quote, columns))})"
        database = "DATABASE()" if self.schema is None else _literal(self.schema)
        found = (
            f"SELECT * FROM information_schema.statistics WHERE table_schema = {database}"
            f" AND table_name = {_literal(table)} AND index_name = {_literal(name)}"
        )
        self.op.execute(f"SET @outbox_index = IF(EXISTS ({found}), 'DO 0', {_literal(create)})")
        for statement in ("PREPARE outbox_index FROM @outbox_index", "EXECUTE outbox_index"):
            self.op.execute(statement)
        self.op.execute("DEALLOCATE PREPARE outbox_index")

    def check(self, name: str, condition: str) -> sa.CheckConstraint:
        return sa.CheckConstraint(condition, name=self.prefix + name)

    def storable(self, name: str, *columns: str) -> sa.CheckConstraint:
        """The check that these columns are instants which every driver reads back in every time zone."""
        if self.kind.stores_integers:
            low, high = "0", "253402214400000000"
        else:
            zone = self.kind.zone
            low, high = f"'1970-01-01 00:00:00{zone}'", f"'9999-12-31 00:00:00{zone}'"
        return self.check(name, " AND ".join(f"{column} BETWEEN {low} AND {high}" for column in columns))

    def store_with(self, table: sa.Table, parameters: str) -> None:
        if self.kind.has_functions:
            ddl = sa.DDL(f"ALTER TABLE %(fullname)s SET ({parameters})")  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
            self.op.execute(ddl.against(table))

    @property
    def _again(self) -> dict[str, Any]:
        return {"if_not_exists": True} if self.kind.is_stepwise else {}


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def create_tables(make: Maker) -> None:
    _entry(make)
    _queue(make)
    _settlement_and_flow_control(make)
    _callbacks_schedules_and_dispatchers(make)
    _history(make)
    _identity(make)
    _requests(make)
    if make.kind.is_stepwise:
        make.table("key_lock", sa.Column("id", ID, primary_key=True))


def _entry(make: Maker) -> None:
    make.table(
        "entry",
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
        sa.Column("due_at", make.at, nullable=False),
        sa.Column("created_at", make.at, nullable=False),
        make.storable("entry_instants", "due_at", "created_at"),
    )
    make.index("entry_record", "entry", ["record_id"], where="record_id <> parent_id")


def _queue(make: Maker) -> None:
    queue = make.table(
        "queue",
        sa.Column("id", ID, primary_key=True),
        sa.Column("destination", sa.String(255), nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("due_at", make.at, nullable=False),
        sa.Column("lease_until", make.at),
        sa.Column("lease_token", ID),
        sa.Column("leased_at", make.at),
        sa.Column("first_leased_at", make.at),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("maybe_sent", sa.Boolean(), nullable=False),
        sa.Column("in_doubt_since", make.at),
        sa.Column("key_epoch", sa.SmallInteger(), nullable=False),
        sa.Column("sent_as", sa.String(255)),
        sa.Column("ordering_key", sa.String(255)),
        sa.Column("position", sa.BigInteger()),
        sa.Column("suspended_reason", TEXT),
        sa.Column("outcome", TEXT),
        sa.Column("waiting_since", make.at),
        sa.Column("fair", sa.String(255)),
        sa.Column("scope", sa.String(255)),
        sa.Column("callback", sa.String(160)),
        sa.Column("known", sa.String(255)),
        make.check("queue_state", "state IN ('pending', 'sending', 'retry', 'uncertain')"),
        make.check(
            "queue_lease",
            "(state = 'sending') = (lease_token IS NOT NULL)"
            " AND (lease_token IS NULL) = (lease_until IS NULL)"
            " AND (lease_token IS NULL) = (leased_at IS NULL)",
        ),
        make.check("queue_doubt", "in_doubt_since IS NULL OR maybe_sent"),
        make.check(
            "queue_counts",
            "deliveries BETWEEN 0 AND 1000000000 AND attempts BETWEEN 0 AND 1000000000"
            " AND key_epoch BETWEEN 0 AND 32000",
        ),
        make.storable("queue_instants", "due_at"),
    )
    make.index("queue_due", "queue", ["destination", "due_at"])
    make.index("queue_fair", "queue", ["fair", "scope", "due_at"], where="fair IS NOT NULL")
    make.index("queue_group", "queue", ["ordering_key", "position"], where="ordering_key IS NOT NULL")
    make.index("queue_callback", "queue", ["callback"], where="callback IS NOT NULL")
    make.index("queue_known", "queue", ["known", "due_at"], where="known IS NOT NULL")
    make.index("queue_in_doubt", "queue", ["in_doubt_since", "id"], where=f"maybe_sent{make.is_true}")
    make.store_with(
        queue,
        "fillfactor = 33, autovacuum_vacuum_scale_factor = 0,"
        " autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0",
    )


def _settlement_and_flow_control(make: Maker) -> None:
    make.table(
        "settlement",
        sa.Column("id", ID, primary_key=True),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("result", TEXT),
        sa.Column("reason", TEXT),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("key_epoch", sa.SmallInteger(), nullable=False),
        sa.Column("settled_at", make.at, nullable=False),
        make.check("settlement_state", "state IN ('delivered', 'failed', 'cancelled')"),
    )
    make.index("settlement_settled", "settlement", ["settled_at", "id"])

    make.table(
        "destination",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("paused_reason", TEXT),
        sa.Column("cooldown_until", make.at),
        sa.Column("breaker", sa.String(9), nullable=False),
        sa.Column("breaker_until", make.at),
        sa.Column("breaker_failures", sa.Integer(), nullable=False),
        sa.Column("rate_per_second", sa.Float()),
        sa.Column("changed_at", make.at, nullable=False),
        sa.Column("breaker_token", ID),
        sa.Column("rate_at", make.at),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", make.at),
        sa.Column("max_permits", sa.Integer()),
        sa.Column("permits_taken", TEXT),
        make.check("destination_breaker", "breaker IN ('closed', 'open', 'half_open')"),
    )

    make.table(
        "blocked_group",
        sa.Column("ordering_key", sa.String(255), primary_key=True),
        sa.Column("entry_id", ID, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("since", make.at, nullable=False),
    )


def _callbacks_schedules_and_dispatchers(make: Maker) -> None:
    make.table(
        "callback",
        sa.Column("name", sa.String(160), primary_key=True),
        sa.Column("recorded_at", make.at, nullable=False),
        sa.Column("started_at", make.at, nullable=False),
    )

    make.table(
        "schedule",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("expression", TEXT, nullable=False),
        sa.Column("since", make.at, nullable=False),
        sa.Column("enqueued_to", make.at, nullable=False),
        sa.Column("next_at", make.at),
        sa.Column("recent", TEXT, nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("paused_reason", TEXT),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", make.at),
        sa.Column("triggered_at", make.at),
        sa.Column("triggered_by", sa.String(255)),
        make.check("schedule_triggered", "(triggered_at IS NULL) = (triggered_by IS NULL)"),
    )

    make.table(
        "dispatcher",
        sa.Column("id", ID, primary_key=True),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("since", make.at, nullable=False),
        sa.Column("seen_at", make.at, nullable=False),
        sa.Column("in_flight", sa.Integer(), nullable=False),
        sa.Column("declared", TEXT, nullable=False),
    )

    make.table(
        "send_count",
        sa.Column("minute", make.at, primary_key=True),
        sa.Column("destination", sa.String(255), primary_key=True),
        sa.Column("result", sa.String(16), primary_key=True),
        sa.Column("bucket", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("sends", sa.BigInteger(), nullable=False),
    )


def _history(make: Maker) -> None:
    make.table(
        "event",
        # Integer on SQLite: only INTEGER PRIMARY KEY counts up by itself
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("entry_id", ID, nullable=False),
        sa.Column("at", make.at, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("delivery", sa.Integer()),
        sa.Column("actor", sa.String(255)),
        sa.Column("reason", TEXT),
        make.check("event_kind", "kind IN ('attempt', 'decision', 'lookup')"),
    )
    make.index("event_entry", "event", ["entry_id"])

    make.table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", make.at, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", TEXT, nullable=False),
        sa.Column("reason", TEXT),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("login", sa.String(255)),
        make.check(
            "audit_kind",
            "kind IN ('entry', 'entries', 'proposed_entry', 'destination', 'ordering_group', 'request', 'database',"
            " 'schedule')",
        ),
        make.check("audit_count", "count >= 0 AND (count = 1 OR kind IN ('entries', 'database'))"),
    )
    make.index("audit_at", "audit", ["at", "id"])

    make.table(
        "proposal",
        sa.Column("id", ID, primary_key=True),
        sa.Column("at", make.at, nullable=False),
        sa.Column("expires_at", make.at, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("sentence", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("decision", TEXT, nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("decided_by", sa.String(255)),
        sa.Column("decided_at", make.at),
        make.check("proposal_state", "state IN ('open', 'confirmed', 'withdrawn')"),
        make.check(
            "proposal_decided",
            "(state = 'open') = (decided_by IS NULL) AND (decided_by IS NULL) = (decided_at IS NULL)",
        ),
    )
    make.index("proposal_at", "proposal", ["at", "id"])


def _identity(make: Maker) -> None:
    make.table(
        "meta",
        sa.Column("id", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("environment", sa.String(64)),
        sa.Column("system_identifier", sa.String(32)),
        sa.Column("timeline", sa.String(8)),
        sa.Column("lsn", sa.String(32)),
        sa.Column("suspended_reason", TEXT),
        sa.Column("checked_at", make.at),
        sa.Column("number", sa.BigInteger()),
        sa.Column("place", sa.String(64)),
        sa.Column("resumed_at", make.at),
        sa.Column("resumed_by", sa.String(255)),
        sa.Column("resumed_reason", TEXT),
        make.check("meta_single", "id = 1"),
    )

    make.table(
        "kid",
        sa.Column("kid", sa.String(64), primary_key=True),
        sa.Column("secret_check", sa.String(16), nullable=False),
        sa.Column("recorded_at", make.at, nullable=False),
    )


def _requests(make: Maker) -> None:
    record = make.table(
        "record",
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
        sa.Column("lease_until", make.at),
        sa.Column("created_at", make.at, nullable=False),
        sa.Column("answered_at", make.at),
        sa.Column("replay_until", make.at, nullable=False),
        sa.Column("keep_until", make.at, nullable=False),
        sa.Column("body_day", sa.Date()),
        make.check("record_state", "state IN ('accepted', 'leased', 'succeeded', 'failed')"),
        make.check(
            "record_answer",
            "(state IN ('succeeded', 'failed')) = (answered_at IS NOT NULL)"
            " AND (answered_at IS NULL OR (status IS NOT NULL AND body IS NOT NULL AND headers IS NOT NULL))",
        ),
        make.check(
            "record_lease",
            "(state = 'leased') = (lease_token IS NOT NULL) AND (lease_token IS NULL) = (lease_until IS NULL)",
        ),
        make.storable("record_instants", "lease_until", "created_at", "answered_at", "replay_until", "keep_until"),
    )
    make.index("record_keep", "record", ["keep_until", "id"])
    make.index("record_open", "record", ["state", "created_at", "id"], where="state IN ('accepted', 'leased')")
    make.index("record_body", "record", ["body_day", "keep_until"], where="body_day IS NOT NULL")
    make.store_with(record, "fillfactor = 90")

    make.table(
        "mismatch",
        sa.Column("id", ID, sa.ForeignKey(record.c.id, ondelete="CASCADE"), primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("first_at", make.at, nullable=False),
        sa.Column("last_at", make.at, nullable=False),
    )
    make.index("mismatch_last", "mismatch", ["last_at", "id"])

    make.table(
        "tombstone",
        sa.Column("id", ID, primary_key=True),
        sa.Column("env", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(255), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("fingerprint_version", sa.SmallInteger(), nullable=False),
        sa.Column("forget_at", make.at, nullable=False),
    )
    make.index("tombstone_forget", "tombstone", ["forget_at", "id"])
