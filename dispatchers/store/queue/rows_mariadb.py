"""The statements of `claims_rows` for MariaDB, as text: to build them in SQLAlchemy took several times as long as to run them.

MySQL has all of them but those that end a batch: `rows_mysql`.

Each batch takes few statements, because while a thread waits for an answer others take Python's lock, and it waits again until
they leave it: one SELECT reads all that a claim needs, and a compound statement ends a batch. The text has ids as hexadecimal
literals, because the driver needs several microseconds for each parameter.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Dialect, Table

from dispatchers.flow_control.fair_share import FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.claimed_row import Lease, LockedRow
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sql.clock import database_now
from outbox.sql.dialect import dialect_rendered
from outbox.sql.mariadb.entry import run_counted
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.sql.statements import deletion
from outbox.times import MICROSECOND, NEVER

ENDS_ALONE: bool = True

MAX_TEXT_CHARS = 2**18
"""The limit for the results and reasons in one INSERT: max_allowed_packet is 16 MiB by default."""


# --- claim


def allowed(
    connection: Connection, tables: Tables, request: ClaimRequest, rounds: FairCursor
) -> tuple[datetime, Sequence[Quota]]:
    """Each statement that claims reads the clock itself, and checks what is throttled."""
    is_fair = any(quota.destination in rounds for quota in request.quotas)
    return database_now(connection) if is_fair else NEVER, request.quotas


def lock_due(
    connection: Connection,
    tables: Tables,
    quota: Quota,
    request: ClaimRequest,
    scope: str | None,
    now: datetime = NEVER,
) -> tuple[list[LockedRow], datetime]:
    """Lock the oldest due entries and read them; returns the time of this, too. It finds none while sending is suspended, if the
    database was set back, and while the destination is throttled.

    Only the inner SELECT locks: a lock on the join would lock the entries' own rows too. Its index is forced: by another one, as
    MariaDB may prefer while the table is small, it would lock all due rows before it sorts them.
    """
    names = Names.of(connection, tables)
    conditions, parameters = _due(names, quota, request, scope)
    reading = names.reading.format(index=names.index(quota, scope), conditions=" AND ".join(conditions))
    found = run(connection, reading, (*parameters, quota.permits)).all()
    if not found:
        return [], NEVER
    outcomes = _read_outcomes(connection, names, [row[0] for row in found if row[_OUTCOME]])
    rows = [_locked_row(row, outcomes) for row in found]
    return sorted(rows, key=attrgetter("queued_at")), datetime.fromisoformat(found[0][-1])


def _read_outcomes(connection: Connection, names: "Names", ids: Sequence[bytes]) -> dict[bytes, str]:
    """The outcomes of locked rows. Few rows have one, and a long one would make a claim's inner SELECT write rows to a file."""
    if not ids:
        return {}
    found = run(connection, f"SELECT id, outcome FROM {names.queue} WHERE id IN ({literals(ids)})")
    return {row[0]: row[1] for row in found}


def _allowed(names: "Names", quota: Quota, request: ClaimRequest) -> tuple[list[str], list[Any]]:
    """The conditions under which entries of a destination may be claimed now, as `is_throttled` has it."""
    conditions = [f"NOT EXISTS ({names.suspended})", f"{names.number} >= %s"]
    parameters: list[Any] = [request.seen]
    if not quota.admitted:
        conditions.append(f"NOT EXISTS ({names.throttled})")
        parameters.append(quota.destination)
    return conditions, parameters


def _due(names: "Names", quota: Quota, request: ClaimRequest, scope: str | None) -> tuple[list[str], list[Any]]:
    """The condition `claimable_at`, with what allows claims at all, and what this process serves and may call."""
    conditions, parameters = _allowed(names, quota, request)
    column = "known" if quota.known else "destination"
    conditions += [f"{column} = %s"] if scope is None else ["fair = %s", "scope = %s"]
    parameters += [quota.destination] if scope is None else [quota.destination, scope]
    conditions += [
        "due_at >= %s",
        "due_at <= LEAST(UTC_TIMESTAMP(6), %s)",
        "(lease_until IS NULL OR lease_until < UTC_TIMESTAMP(6))",
    ]
    parameters += [_naive(quota.due_from), _naive(request.cutoff)]
    if quota.recent is not None:
        conditions.append("due_at >= UTC_TIMESTAMP(6) - INTERVAL %s MICROSECOND")
        parameters.append(quota.recent // MICROSECOND)
    if request.unserved is not None:
        operations = f"operation IN ({_marks(request.unserved)}) OR " if request.unserved else ""
        unserved = (
            f"SELECT 1 FROM {names.entry} AS e WHERE e.id = {names.queue}.id AND ({operations}schema_version > %s)"
        )
        conditions.append(f"(outcome LIKE %s OR NOT EXISTS ({unserved}))")
        parameters += [CANCELLED_PATTERN, *request.unserved, request.readable]
    if request.only is not None:
        conditions.append(f"id IN ({literals(id.bytes for id in request.only) or 'NULL'})")
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
    names = Names.of(connection, tables)
    change = (
        f"UPDATE {names.queue} SET state = 'sending', lease_until = %s, lease_token = {literals([request.token.bytes])},"
        " leased_at = %s, first_leased_at = COALESCE(first_leased_at, %s), deliveries = deliveries + 1,"
        " attempts = attempts + %s, maybe_sent = %s, in_doubt_since = %s, sent_as = %s"
        f" WHERE id IN ({literals(id.bytes for id in ids)})"
    )
    at, until = _naive(now), _naive(now + request.lease)
    doubt = None if lease.in_doubt_since is None else _naive(lease.in_doubt_since)
    run(connection, change, (until, at, at, int(lease.taken_over), lease.maybe_sent, doubt, lease.sent_as))


# --- settle


def end(
    connection: Connection,
    tables: Tables,
    ended: Sequence[tuple[ClaimedEntry, Settle]],
    now: datetime,
    callbacks: str | None,
) -> set[UUID]:
    """Insert settlements and delete the queue rows, of entries of one claim with equal key epochs and states; returns the ids.

    It settles nothing if the recorded callbacks are not `callbacks`. The INSERT comes first: it locks the queue rows, checks the
    leases, and takes over what the settlements keep of the rows. If it leaves some out, another statement deletes the queue rows.
    """
    names = Names.of(connection, tables)
    settled: set[UUID] = set()
    for part in parts(names, ended, callbacks):
        ids = literals(id.bytes for id in part.ids)
        insertion = names.insertion.format(outcomes=", ".join(part.rows), state=part.state, ours=part.ours)
        statement = (
            f"BEGIN NOT ATOMIC IF {part.unchanged} THEN {insertion};"
            f" IF ROW_COUNT() = {len(part.ids)} THEN {names.deletion} WHERE id IN ({ids}); END IF; ELSE DO 0; END IF; END"
        )
        written = run_counted(connection, statement, (*part.recorded, *part.texts))
        if written >= len(part.ids):  # otherwise it has deleted nothing, so `written` is what it has inserted
            settled.update(part.ids)
        elif written:
            deleting = f"{names.deletion} WHERE id IN ({ids}) AND {names.ended} RETURNING id"
            settled.update([UUID(bytes=row[0]) for row in run(connection, deleting)])
    return settled


class Part(NamedTuple):
    """Entries that one statement ends, as text: a row for each of them, and the conditions.

    unchanged: that the recorded callbacks are those that are expected. ours: that a queue row is still that of the claim.
    recorded, texts: the parameters of `unchanged`, and of the rows.
    """

    ids: list[UUID]
    rows: list[str]
    state: str
    unchanged: str
    ours: str
    recorded: tuple[Any, ...]
    texts: tuple[str, ...]


def parts(names: "Names", ended: Sequence[tuple[ClaimedEntry, Settle]], callbacks: str | None) -> Iterator[Part]:
    """The entries in parts, none of which has more text than a statement may have."""
    entry, change = ended[0]
    ours = f"q.lease_token = X'{entry.lease_token.hex}' AND NOT EXISTS ({names.suspended})"
    if change.state == "delivered":
        ours = f"({ours}) OR (q.key_epoch = {int(entry.key_epoch)} AND q.state IN ('sending', 'retry', 'uncertain'))"
    recorded = () if callbacks is None else (len(callbacks.split(",")) if callbacks else 0, callbacks)
    unchanged = "TRUE" if callbacks is None else names.unchanged
    for some in _parts([_outcome(*ending) for ending in ended]):
        ids, rows = [outcome.id for outcome in some], [outcome.text for outcome in some]
        texts = tuple(text for outcome in some for text in outcome.texts)
        yield Part(ids, rows, change.state, unchanged, ours, recorded, texts)


class _Outcome(NamedTuple):
    """A row of an ending statement, as text, and the parameters in it."""

    id: UUID
    text: str
    texts: list[str]


def _outcome(entry: ClaimedEntry, change: Settle) -> _Outcome:
    given = [None if change.result is None else json.dumps(change.result), change.reason]
    result, reason = ["NULL" if text is None else "%s" for text in given]
    row = f"(X'{entry.id.hex}', {int(change.attempts)}, {result}, {reason})"
    return _Outcome(entry.id, row, [text for text in given if text is not None])


def _parts(outcomes: Sequence[_Outcome]) -> Iterator[list[_Outcome]]:
    part: list[_Outcome] = []
    chars = 0
    for outcome in outcomes:
        length = sum(map(len, outcome.texts))
        if part and chars + length > MAX_TEXT_CHARS:
            yield part
            part, chars = [], 0
        part.append(outcome)
        chars += length
    yield part


# --- text and values


class Names:
    """The names of the tables, and the statements that do not vary."""

    def __init__(self, dialect: Dialect, tables: Tables) -> None:
        def name(table: Table) -> str:
            return dialect.identifier_preparer.format_table(table)

        self.queue, self.entry, self.settlement = name(tables.queue), name(tables.entry), name(tables.settlement)
        quote = dialect.identifier_preparer.quote
        self._indexes = {name: quote(f"{tables.queue.name}_{name}") for name in ("due", "fair", "known")}
        self.suspended = (
            f"SELECT 1 FROM {name(tables.meta)} WHERE suspended_reason IS NOT NULL"
            f" OR timeline <> {dialect_rendered(dialect).timeline}"
        )
        self.number = f"COALESCE((SELECT number FROM {name(tables.meta)}), 0)"
        self.throttled = (
            f"SELECT 1 FROM {name(tables.destination)} AS d"
            " WHERE d.name = %s AND (d.paused OR d.breaker <> 'closed' OR d.cooldown_until > UTC_TIMESTAMP(6))"
        )
        self.reading = (
            f"SELECT STRAIGHT_JOIN {_COLUMNS}, {_text_of('UTC_TIMESTAMP(6)')} FROM"
            f" (SELECT {_OF_QUEUE} FROM {self.queue} FORCE INDEX ({{index}})"
            " WHERE {conditions} ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED) AS q"
            f" JOIN {self.entry} AS e ON e.id = q.id"
            f" LEFT JOIN {name(tables.record)} AS r ON r.id = e.record_id AND r.state = 'accepted'"
            f" LEFT JOIN {self.settlement} AS s ON s.id = q.id"
        )
        self.unchanged = (
            "(SELECT COUNT(*) = %s AND COUNT(*) = COALESCE(SUM(FIND_IN_SET(c.name, %s) > 0), 0)"
            f" FROM {name(tables.callback)} AS c)"
        )
        self.insertion = (
            f"INSERT INTO {self.settlement} (id, state, result, reason, deliveries, attempts, key_epoch, settled_at)"
            " WITH o (id, attempts, result, reason) AS (VALUES {outcomes})"
            " SELECT STRAIGHT_JOIN q.id, '{state}', o.result, o.reason, q.deliveries, GREATEST(q.attempts, o.attempts),"
            f" q.key_epoch, UTC_TIMESTAMP(6) FROM o JOIN {self.queue} AS q ON q.id = o.id WHERE {{ours}} FOR UPDATE"
        )
        self.deletion = deletion(dialect, tables.queue.c.id)
        self.ended = f"EXISTS (SELECT 1 FROM {self.settlement} AS s WHERE s.id = {self.queue}.id)"

    def index(self, quota: Quota, scope: str | None) -> str:
        """The index that serves the claim."""
        return self._indexes["known" if quota.known else "due" if scope is None else "fair"]

    @staticmethod
    def of(connection: Connection, tables: Tables) -> "Names":
        return _names(connection.dialect, tables)


@lru_cache(MAX_STATEMENTS)
def _names(dialect: Dialect, tables: Tables) -> Names:
    return Names(dialect, tables)


def _text_of(instant: str) -> str:
    """The instant as `datetime.fromisoformat` reads it, in a tenth of the time of the drivers' own conversion."""
    return f"CONCAT({instant}, '+00:00')"


_INSTANT_NAMES = ("queued_at", "first_leased_at", "leased_at", "in_doubt_since", "due_at", "created_at")
_INSTANTS = [LockedRow._fields.index(name) for name in _INSTANT_NAMES]
_IDS = [LockedRow._fields.index(name) for name in ("id", "lease_token", "record_id")]
_MAYBE_SENT = LockedRow._fields.index("maybe_sent")
_OUTCOME = LockedRow._fields.index("outcome")
_READ = LockedRow.columns(queue="q", entry="e", record="r", settlement="s")
_COLUMNS = ", ".join(_text_of(column) if index in _INSTANTS else column for index, column in enumerate(_READ))
_OF_QUEUE = (
    ", ".join(column.removeprefix("q.") for column in _READ if column.startswith("q.") and column != "q.outcome")
    + ", outcome IS NOT NULL AS outcome"
)


def _locked_row(row: Sequence[Any], outcomes: Mapping[bytes, str]) -> LockedRow:
    values = list(row[:-1])
    values[_OUTCOME] = outcomes.get(row[0])
    for index in _IDS:
        if values[index] is not None:
            values[index] = UUID(bytes=values[index])
    for index in _INSTANTS:
        if values[index] is not None:
            values[index] = datetime.fromisoformat(values[index])
    values[_MAYBE_SENT] = bool(values[_MAYBE_SENT])
    return LockedRow._make(values)


def run(connection: Connection, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
    return connection.exec_driver_sql(statement, parameters)


def literals(ids: Iterable[bytes]) -> str:
    return ", ".join([f"X'{id.hex()}'" for id in ids])


def _marks(values: Iterable[object]) -> str:
    return ", ".join(["%s" for _ in values])


def _naive(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(tzinfo=None)
