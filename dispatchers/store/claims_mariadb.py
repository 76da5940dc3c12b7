"""The statements of `claims_plain` for MariaDB, as text: to build them in SQLAlchemy took several times as long as to run them.

The text has ids as hexadecimal literals, and whole batches are read in the driver's own values. All else are parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Dialect, Table

from dispatchers.flow_control.quota import Quota
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.claimed_row import Lease, LockedRow
from dispatchers.stored_outcome import CANCELLED_PATTERN
from outbox.sql.schema import SCHEMA_VERSION, STATEMENTS_MAX, Tables

TEXT_CHARS_MAX = 2**18
"""Of the results and reasons of one INSERT: max_allowed_packet is 16 MiB by default."""


# --- claim


def read_state(
    connection: Connection, tables: Tables, asked: Sequence[str]
) -> tuple[datetime, bool, int | None, set[str]]:
    """The clock, whether sending is suspended, the number of the database's identity, and which of the asked destinations are
    throttled, as `is_throttled` has it.
    """
    names = _Names.of(connection, tables)
    rows = _run(connection, f"{names.state} ({_marks(asked) or 'NULL'})", tuple(asked)).all()
    now, is_suspended, number, _ = rows[0]
    return now.replace(tzinfo=UTC), bool(is_suspended), number, {row[3] for row in rows if row[3] is not None}


def lock_due(
    connection: Connection, tables: Tables, quota: Quota, request: ClaimRequest, now: datetime, scope: str | None
) -> list[LockedRow]:
    """Lock the oldest due entries, then read them: a lock on a join would lock the entries' own rows too."""
    names = _Names.of(connection, tables)
    conditions, parameters = _due(names, quota, request, now, scope)
    due = (
        f"SELECT id FROM {names.queue} WHERE {' AND '.join(conditions)} ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED"
    )
    ids = [row[0] for row in _run(connection, due, (*parameters, quota.permits))]
    if not ids:
        return []
    found = {row[0]: row for row in _run(connection, f"{names.reading} ({_literals(ids)})")}
    return [_locked_row(found[id]) for id in ids if id in found]


def _due(
    names: "_Names", quota: Quota, request: ClaimRequest, now: datetime, scope: str | None
) -> tuple[list[str], list[Any]]:
    """As `claimable_at`, with what this process serves and may call."""
    earliest = quota.due_from if quota.recent is None else max(quota.due_from, now - quota.recent)
    conditions = ["destination = %s"] if scope is None else ["fair = %s", "scope = %s"]
    conditions += ["due_at >= %s", "due_at <= %s", "(lease_until IS NULL OR lease_until < %s)"]
    parameters: list[Any] = [quota.destination] if scope is None else [quota.destination, scope]
    parameters += [_naive(earliest), _naive(min(now, request.cutoff)), _naive(now)]
    if request.unserved is not None:
        operations = f"operation IN ({_marks(request.unserved)}) OR " if request.unserved else ""
        unserved = (
            f"SELECT 1 FROM {names.entry} AS e WHERE e.id = {names.queue}.id AND ({operations}schema_version > %s)"
        )
        conditions.append(f"(outcome LIKE %s OR NOT EXISTS ({unserved}))")
        parameters += [CANCELLED_PATTERN, *request.unserved, SCHEMA_VERSION]
    if request.only is not None:
        conditions.append(f"id IN ({_literals(id.bytes for id in request.only) or 'NULL'})")
    if request.callbacks:
        conditions.append(f"(callback IS NULL OR callback IN ({_marks(request.callbacks)}))")
        parameters += sorted(request.callbacks)
    else:
        conditions.append("callback IS NULL")
    return conditions, parameters


def lease(
    connection: Connection, tables: Tables, ids: Sequence[UUID], lease: Lease, request: ClaimRequest, now: datetime
) -> None:
    """Lease these rows, which are locked."""
    names = _Names.of(connection, tables)
    change = (
        f"UPDATE {names.queue} SET state = 'sending', lease_until = %s, lease_token = {_literals([request.token.bytes])},"
        " leased_at = %s, first_leased_at = COALESCE(first_leased_at, %s), deliveries = deliveries + 1,"
        " attempts = attempts + %s, maybe_sent = %s, in_doubt_since = %s, sent_as = %s"
        f" WHERE id IN ({_literals(id.bytes for id in ids)})"
    )
    at, until = _naive(now), _naive(now + request.lease)
    doubt = None if lease.in_doubt_since is None else _naive(lease.in_doubt_since)
    _run(connection, change, (until, at, at, int(lease.taken_over), lease.maybe_sent, doubt, lease.sent_as))


# --- settle


def read_callbacks(connection: Connection, tables: Tables) -> tuple[datetime, frozenset[str]]:
    """The clock, and the recorded callbacks."""
    rows = _run(connection, _Names.of(connection, tables).callbacks).all()
    return rows[0][0].replace(tzinfo=UTC), frozenset(row[1] for row in rows if row[1] is not None)


def delete_ended(
    connection: Connection, tables: Tables, ids: Sequence[UUID], token: UUID, key_epoch: int, *, is_proof: bool
) -> list[dict[str, Any]]:
    """Delete the queue rows that are this claim's, or may take proof; returns what their settlements keep of them."""
    names = _Names.of(connection, tables)
    ours = f"lease_token = {_literals([token.bytes])} AND NOT EXISTS ({names.suspended})"
    if is_proof:
        ours = f"({ours}) OR (key_epoch = {int(key_epoch)} AND state IN ('sending', 'retry', 'uncertain'))"
    gone = f"DELETE FROM {names.queue} WHERE id IN ({_literals(id.bytes for id in ids)}) AND ({ours})"
    rows = _run(connection, f"{gone} RETURNING id, deliveries, attempts, key_epoch")
    kept = ("deliveries", "attempts", "key_epoch")
    return [{"id": UUID(bytes=row[0]), **dict(zip(kept, row[1:], strict=True))} for row in rows]


def insert_settlements(connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]]) -> None:
    names = _Names.of(connection, tables)
    for part in _parts(rows):
        values, parameters = [], []
        for row in part:
            values.append(f"(X'{row['id'].hex}', %s, %s, %s, %s, %s, %s, %s)")
            numbers = (row["deliveries"], row["attempts"], row["key_epoch"])
            parameters += [row["state"], row["result"], row["reason"], *numbers, _naive(row["settled_at"])]
        _run(connection, f"{names.settling} {', '.join(values)}", tuple(parameters))


def _parts(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    part: list[dict[str, Any]] = []
    chars = 0
    for row in rows:
        length = len(row["result"] or "") + len(row["reason"] or "")
        if part and chars + length > TEXT_CHARS_MAX:
            yield part
            part, chars = [], 0
        part.append(row)
        chars += length
    yield part


# --- text and values


class _Names:
    """The names of the tables, and the statements that do not vary."""

    def __init__(self, dialect: Dialect, tables: Tables) -> None:
        def name(table: Table) -> str:
            return dialect.identifier_preparer.format_table(table)

        self.queue, self.entry = name(tables.queue), name(tables.entry)
        self.suspended = f"SELECT 1 FROM {name(tables.meta)} WHERE suspended_reason IS NOT NULL"
        number = f"SELECT number FROM {name(tables.meta)}"
        throttled = "(d.paused OR d.breaker <> 'closed' OR d.cooldown_until > UTC_TIMESTAMP(6))"
        self.state = (
            f"SELECT UTC_TIMESTAMP(6), EXISTS ({self.suspended}), ({number}), d.name FROM (SELECT 1) AS o"
            f" LEFT JOIN {name(tables.destination)} AS d ON {throttled} AND d.name IN"
        )
        self.callbacks = (
            f"SELECT UTC_TIMESTAMP(6), c.name FROM (SELECT 1) AS o LEFT JOIN {name(tables.callback)} AS c ON TRUE"
        )
        self.settling = (
            f"INSERT INTO {name(tables.settlement)}"
            " (id, state, result, reason, deliveries, attempts, key_epoch, settled_at) VALUES"
        )
        self.reading = (
            f"SELECT {', '.join(_COLUMNS)} FROM {self.queue} AS q JOIN {self.entry} AS e ON e.id = q.id"
            f" LEFT JOIN {name(tables.record)} AS r ON r.id = e.record_id AND r.state = 'accepted'"
            f" LEFT JOIN {name(tables.settlement)} AS s ON s.id = q.id WHERE q.id IN"
        )

    @staticmethod
    def of(connection: Connection, tables: Tables) -> "_Names":
        return _names(connection.dialect, tables)


@lru_cache(STATEMENTS_MAX)
def _names(dialect: Dialect, tables: Tables) -> _Names:
    return _Names(dialect, tables)


_COLUMNS = LockedRow.columns(queue="q", entry="e", record="r", settlement="s")
_IDS = [LockedRow._fields.index(name) for name in ("id", "lease_token", "record_id")]
_INSTANTS = [
    LockedRow._fields.index(name)
    for name in ("queued_at", "first_leased_at", "leased_at", "in_doubt_since", "due_at", "created_at")
]
_MAYBE_SENT = LockedRow._fields.index("maybe_sent")


def _locked_row(row: Sequence[Any]) -> LockedRow:
    values = list(row)
    for index in _IDS:
        if values[index] is not None:
            values[index] = UUID(bytes=values[index])
    for index in _INSTANTS:
        if values[index] is not None:
            values[index] = values[index].replace(tzinfo=UTC)
    values[_MAYBE_SENT] = bool(values[_MAYBE_SENT])
    return LockedRow._make(values)


def _run(connection: Connection, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
    return connection.exec_driver_sql(statement, parameters)


def _literals(ids: Iterable[bytes]) -> str:
    return ", ".join([f"X'{id.hex()}'" for id in ids])


def _marks(values: Iterable[object]) -> str:
    return ", ".join(["%s" for _ in values])


def _naive(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(tzinfo=None)
