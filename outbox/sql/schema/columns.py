"""The columns, constraints and indexes of each table; each index with the statements that it serves."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    and_,
    column,
    literal,
    text,
)

from outbox.sql.schema.column_types import ID, LONG_BINARY, LONG_TEXT, Instant
from outbox.times import EPOCH, NEVER

MAX_COUNT = 1_000_000_000
"""How often an entry can be claimed: once a second, for 31 years."""

OPEN = "('accepted', 'leased')"
"""The states of a record that has no final answer yet, as SQL."""


def _storable(name: str, *instants: str) -> CheckConstraint:
    """A constraint for values that every driver can read in every time zone, and that every claim finds."""
    low, high = literal(EPOCH, Instant), literal(NEVER, Instant)
    return CheckConstraint(and_(*(column(instant, Instant).between(low, high) for instant in instants)), name=name)


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


def _key_columns() -> list[Column[Any]]:
    return [
        Column("env", String(64), nullable=False),
        Column("scope", String(255), nullable=False),
        Column("source", String(64), nullable=False),
        Column("parent", String(255), nullable=False),
    ]


def entry(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        *_key_columns(),
        Column("operation", String(128), nullable=False),
        Column("discriminator", String(255), nullable=False),
        Column("kid", String(64), nullable=False),
        Column("tag", LargeBinary(32), nullable=False),
        Column("parent_id", ID, nullable=False),
        Column("record_id", ID),
        Column("destination", String(255), nullable=False),
        Column("payload", LONG_BINARY, nullable=False),
        Column("options", LONG_TEXT, nullable=False),
        Column("headers", LONG_TEXT, nullable=False),
        Column("ordering_key", String(255)),
        Column("schema_version", SmallInteger, nullable=False),
        Column("due_at", Instant, nullable=False),
        Column("created_at", Instant, nullable=False),
        _storable(f"{prefix}entry_instants", "due_at", "created_at"),
        # serves the completion of an accepted request: its entries under other parents. Its own are found by parent_id
        _partial(f"{prefix}entry_record", "record_id", where="record_id <> parent_id"),
    ]


def queue(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        Column("destination", String(255), nullable=False),
        Column("state", String(9), nullable=False),
        Column("due_at", Instant, nullable=False),
        Column("lease_until", Instant),
        Column("lease_token", ID),
        Column("leased_at", Instant),
        Column("first_leased_at", Instant),
        Column("deliveries", Integer, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("maybe_sent", Boolean, nullable=False),
        Column("in_doubt_since", Instant),
        Column("key_epoch", SmallInteger, nullable=False),
        Column("sent_as", String(255)),
        Column("ordering_key", String(255)),
        Column("position", BigInteger),
        Column("suspended_reason", LONG_TEXT),
        Column("outcome", LONG_TEXT),
        Column("waiting_since", Instant),  # when it first became due, if it was only released since
        Column("fair", String(255)),  # the destination, if it is fair; otherwise NULL, like
        Column("scope", String(255)),  # the parent's scope
        # the entry waits for a dispatcher with this callback: `dispatchers.store.app_code.callback_registry`
        Column("callback", String(160)),
        Column(
            "known", String(255)
        ),  # the destination, if `outcome` holds the entry's end: then nothing is sent; otherwise NULL
        CheckConstraint("state IN ('pending', 'sending', 'retry', 'uncertain')", name=f"{prefix}queue_state"),
        # all columns of a lease are set or none, and they are set in the state `sending` only
        CheckConstraint(
            "(state = 'sending') = (lease_token IS NOT NULL)"
            " AND (lease_token IS NULL) = (lease_until IS NULL)"
            " AND (lease_token IS NULL) = (leased_at IS NULL)",
            name=f"{prefix}queue_lease",
        ),
        CheckConstraint("in_doubt_since IS NULL OR maybe_sent", name=f"{prefix}queue_doubt"),
        # far below the limits of the types, so that a claim cannot overflow
        CheckConstraint(
            f"deliveries BETWEEN 0 AND {MAX_COUNT} AND attempts BETWEEN 0 AND {MAX_COUNT} AND key_epoch BETWEEN 0 AND 32000",
            name=f"{prefix}queue_counts",
        ),
        _storable(f"{prefix}queue_instants", "due_at"),
        *_queue_indexes(prefix),
    ]


def _queue_indexes(prefix: str) -> list[Index]:
    return [
        # serves the claim: the oldest due rows of each destination. No lease column is in any index, so leases stay HOT
        Index(f"{prefix}queue_due", "destination", "due_at"),
        # serves the claim of a fair destination: the scopes one after another, and the oldest due rows of each. A condition on
        # `fair` can use no other index. An index by `destination` could read the waiting rows of all scopes
        _partial(f"{prefix}queue_fair", "fair", "scope", "due_at", where="fair IS NOT NULL"),
        # serves the head of an ordering key's group
        _partial(f"{prefix}queue_group", "ordering_key", "position", where="ordering_key IS NOT NULL"),
        # serves the dispatchers with a callback: the entries that wait for it
        _partial(f"{prefix}queue_callback", "callback", where="callback IS NOT NULL"),
        # serves the claim of what needs no send, whatever waits before it or holds its destination
        _partial(f"{prefix}queue_known", "known", "due_at", where="known IS NOT NULL"),
        # serves the list of uncertain entries, oldest doubt first: they are among these. Not by `state`, which each claim
        # changes: leases stay HOT, as these two columns change only when doubt begins or ends
        Index(
            f"{prefix}queue_in_doubt",
            "in_doubt_since",
            "id",
            postgresql_where=text("maybe_sent"),
            sqlite_where=text("maybe_sent = 1"),
        ),
    ]


def settlement(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        Column("state", String(9), nullable=False),
        Column("result", LONG_TEXT),
        Column("reason", LONG_TEXT),
        Column("deliveries", Integer, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("key_epoch", SmallInteger, nullable=False),
        Column("settled_at", Instant, nullable=False),
        CheckConstraint("state IN ('delivered', 'failed', 'cancelled')", name=f"{prefix}settlement_state"),
        # serves retention: the entries that were settled long enough ago, in the order of retention. The id is in it, because
        # thousands of rows may have one instant. Not a block range index: new rows fill the pages that retention frees, so
        # each range soon has rows of every age
        Index(f"{prefix}settlement_settled", "settled_at", "id"),
    ]


def destination(prefix: str) -> list[Any]:
    return [
        Column("name", String(255), primary_key=True),
        Column("paused", Boolean, nullable=False),
        Column("paused_reason", LONG_TEXT),
        Column("cooldown_until", Instant),
        Column("breaker", String(9), nullable=False),
        Column("breaker_until", Instant),
        Column("breaker_failures", Integer, nullable=False),
        Column("rate_per_second", Float),
        Column("changed_at", Instant, nullable=False),
        Column("breaker_token", ID),
        Column("rate_at", Instant),
        Column("decided_by", String(255)),
        Column("decided_at", Instant),
        Column("max_permits", Integer),
        Column("permits_taken", LONG_TEXT),  # the permits of each claim: `dispatchers.flow_control.state`
        CheckConstraint("breaker IN ('closed', 'open', 'half_open')", name=f"{prefix}destination_breaker"),
    ]


def blocked_group() -> list[Any]:
    return [
        Column("ordering_key", String(255), primary_key=True),
        Column("entry_id", ID, nullable=False),
        Column("reason", LONG_TEXT, nullable=False),
        Column("since", Instant, nullable=False),
    ]


def callback() -> list[Any]:
    return [
        Column("name", String(160), primary_key=True),  # the callback's kind and its operation or prefix
        Column("recorded_at", Instant, nullable=False),
        Column("started_at", Instant, nullable=False),  # when a dispatcher with it last started
    ]


def schedule(prefix: str) -> list[Any]:
    return [
        Column("name", String(128), primary_key=True),
        Column("expression", LONG_TEXT, nullable=False),  # of the dispatchers that enqueue its instants
        Column("since", Instant, nullable=False),
        # every instant up to it was enqueued or skipped: retention may delete the entries, and none is enqueued again
        Column("enqueued_to", Instant, nullable=False),
        Column("next_at", Instant),  # the first instant after it; NULL: there is none
        Column(
            "recent", LONG_TEXT, nullable=False
        ),  # the last instants, as JSON: `dispatchers.store.records.schedules`
        Column("paused", Boolean, nullable=False),
        Column("paused_reason", LONG_TEXT),
        Column("decided_by", String(255)),
        Column("decided_at", Instant),
        Column(
            "triggered_at", Instant
        ),  # when an operator has triggered it, until a dispatcher has called its function
        Column("triggered_by", String(255)),
        CheckConstraint("(triggered_at IS NULL) = (triggered_by IS NULL)", name=f"{prefix}schedule_triggered"),
    ]


def dispatcher() -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),  # of one run of a process
        Column("host", String(255), nullable=False),
        Column("pid", Integer, nullable=False),
        Column("version", String(64), nullable=False),
        Column("since", Instant, nullable=False),
        Column("seen_at", Instant, nullable=False),
        Column("in_flight", Integer, nullable=False),
        Column("declared", LONG_TEXT, nullable=False),  # its settings and operations: `dispatchers.process.heartbeat`
    ]


def send_count() -> list[Any]:
    return [
        # serves the sums of the last hour, and the deletion of older ones
        Column("minute", Instant, primary_key=True),
        Column("destination", String(255), primary_key=True),
        Column("result", String(16), primary_key=True),  # `dispatchers.telemetry.tally`, as is the bucket of durations
        Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
        Column("sends", BigInteger, nullable=False),
    ]


def event(prefix: str) -> list[Any]:
    return [
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("entry_id", ID, nullable=False),
        Column("at", Instant, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("delivery", Integer),
        Column("actor", String(255)),
        Column("reason", LONG_TEXT),
        CheckConstraint("kind IN ('attempt', 'decision', 'lookup')", name=f"{prefix}event_kind"),
        # serves the history of one entry
        Index(f"{prefix}event_entry", "entry_id"),
    ]


def audit(prefix: str) -> list[Any]:
    return [
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("at", Instant, nullable=False),
        Column("actor", String(255), nullable=False),
        Column("action", String(32), nullable=False),
        Column("kind", String(16), nullable=False),  # of the target
        Column("target", LONG_TEXT, nullable=False),
        Column("reason", LONG_TEXT),
        Column("count", Integer, nullable=False),
        Column("login", String(255)),  # of the database, as `outbox.migrations.role_guards` writes it
        CheckConstraint(
            "kind IN ('entry', 'entries', 'proposed_entry', 'destination', 'ordering_group', 'request', 'database',"
            " 'schedule')",
            name=f"{prefix}audit_kind",
        ),
        CheckConstraint(
            "count >= 0 AND (count = 1 OR kind IN ('entries', 'database'))",
            name=f"{prefix}audit_count",
        ),
        # serves the audit log, newest first, and retention, oldest first
        Index(f"{prefix}audit_at", "at", "id"),
    ]


def proposal(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        Column("at", Instant, nullable=False),
        Column("expires_at", Instant, nullable=False),
        Column("actor", String(255), nullable=False),
        Column("sentence", LONG_TEXT, nullable=False),
        Column("reason", LONG_TEXT, nullable=False),
        Column("decision", LONG_TEXT, nullable=False),  # as JSON: `dispatchers.admin.decide.proposals`
        Column("state", String(9), nullable=False),
        Column("decided_by", String(255)),
        Column("decided_at", Instant),
        CheckConstraint("state IN ('open', 'confirmed', 'withdrawn')", name=f"{prefix}proposal_state"),
        CheckConstraint(
            "(state = 'open') = (decided_by IS NULL) AND (decided_by IS NULL) = (decided_at IS NULL)",
            name=f"{prefix}proposal_decided",
        ),
        # serves the list of proposals, newest first, and retention, oldest first
        Index(f"{prefix}proposal_at", "at", "id"),
    ]


def meta(prefix: str) -> list[Any]:
    return [
        Column("id", SmallInteger, primary_key=True, autoincrement=False),
        Column("environment", String(64)),
        Column("system_identifier", String(32)),
        Column("timeline", String(8)),
        Column("lsn", String(32)),
        Column("suspended_reason", LONG_TEXT),
        Column("checked_at", Instant),
        Column("number", BigInteger),
        Column("place", String(64)),
        Column("resumed_at", Instant),
        Column("resumed_by", String(255)),
        Column("resumed_reason", LONG_TEXT),
        CheckConstraint("id = 1", name=f"{prefix}meta_single"),
    ]


def kid() -> list[Any]:
    return [
        Column("kid", String(64), primary_key=True),
        # `keys.secret_check`: it reveals nothing about the secret
        Column("secret_check", String(16), nullable=False),
        Column("recorded_at", Instant, nullable=False),
    ]


def record(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        *_key_columns(),
        Column("kid", String(64), nullable=False),
        Column("state", String(9), nullable=False),
        Column("fingerprint", LargeBinary(32), nullable=False),
        Column("fingerprint_version", SmallInteger, nullable=False),
        Column("status", SmallInteger),
        Column("body", LONG_BINARY),
        Column("headers", LONG_TEXT),
        Column("completion", String(128)),
        Column("lease_token", ID),
        Column("lease_until", Instant),
        Column("created_at", Instant, nullable=False),
        Column("answered_at", Instant),
        Column("replay_until", Instant, nullable=False),
        Column("keep_until", Instant, nullable=False),
        Column("body_day", Date),  # the partition with the body, if it is not here: `outbox.sql.schema.body_partitions`
        CheckConstraint("state IN ('accepted', 'leased', 'succeeded', 'failed')", name=f"{prefix}record_state"),
        # all columns of an answer are set or none; a claim in one transaction becomes visible only with its answer
        CheckConstraint(
            "(state IN ('succeeded', 'failed')) = (answered_at IS NOT NULL)"
            " AND (answered_at IS NULL OR (status IS NOT NULL AND body IS NOT NULL AND headers IS NOT NULL))",
            name=f"{prefix}record_answer",
        ),
        CheckConstraint(
            "(state = 'leased') = (lease_token IS NOT NULL) AND (lease_token IS NULL) = (lease_until IS NULL)",
            name=f"{prefix}record_lease",
        ),
        _storable(f"{prefix}record_instants", "lease_until", "created_at", "answered_at", "replay_until", "keep_until"),
        # serves retention: the records that no retry may use any more, in the order of retention
        Index(f"{prefix}record_keep", "keep_until", "id"),
        # serves the dispatcher's search for accepted requests without open entries, and the gauges of open requests
        _partial(f"{prefix}record_open", "state", "created_at", "id", where=f"state IN {OPEN}"),
        # serves retention: whether a record still needs a day's bodies
        _partial(f"{prefix}record_body", "body_day", "keep_until", where="body_day IS NOT NULL"),
    ]


def mismatch(prefix: str, schema: str | None) -> list[Any]:
    """How many requests came with the key of a record, and differed. They are written apart: `outbox.sessions.mismatches`."""
    record = f"{prefix}record.id" if schema is None else f"{schema}.{prefix}record.id"
    return [
        # an app or maintenance that deletes the record needs no right on this table
        Column("id", ID, ForeignKey(record, ondelete="CASCADE"), primary_key=True, autoincrement=False),
        Column("requests", BigInteger, nullable=False),
        Column("first_at", Instant, nullable=False),
        Column("last_at", Instant, nullable=False),
        # serves the list of mismatched requests, the latest first
        Index(f"{prefix}mismatch_last", "last_at", "id"),
    ]


def tombstone(prefix: str) -> list[Any]:
    return [
        Column("id", ID, primary_key=True, autoincrement=False),
        Column("env", String(64), nullable=False),
        Column("scope", String(255), nullable=False),
        Column("source", String(64), nullable=False),
        Column("fingerprint", LargeBinary(32), nullable=False),
        Column("fingerprint_version", SmallInteger, nullable=False),
        Column("forget_at", Instant, nullable=False),
        # serves retention: the tombstones whose last child's window has passed, in the order of retention
        Index(f"{prefix}tombstone_forget", "forget_at", "id"),
    ]
