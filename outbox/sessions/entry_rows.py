"""How entries are written: both tables, any number of rows, one statement on PostgreSQL."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    Executable,
    Text,
    TextClause,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
    text,
)

from outbox.configuration import Configuration
from outbox.keys import Tag, encode_native
from outbox.sql.clock import clock, database_now, later
from outbox.sql.dialect import Dialect, Writes, dialect_of
from outbox.sql.mariadb import entry as mariadb
from outbox.sql.mariadb.entry import whole
from outbox.sql.mysql import entry as mysql
from outbox.sql.positions import lock_ordering_keys, next_position, take_positions
from outbox.sql.postgresql.bulk_values import Batch, Shape, batch_query, typed_columns
from outbox.sql.postgresql.fast_execute import execute
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.times import NEVER


class NewEntry(NamedTuple):
    """A validated entry that is not in the database yet: its values, in the order of `_COLUMNS`, and what to do with it.

    Without `due_at` and `delay` it is due at once, as it is if `due_at` is past.
    """

    id: UUID
    env: str
    scope: str
    source: str
    parent: str
    operation: str
    discriminator: str
    kid: str
    tag: Tag
    parent_id: UUID
    record_id: UUID | None
    destination: str
    payload: bytes
    options: str
    headers: str
    ordering_key: str | None
    due_at: datetime | None
    delay: timedelta | None
    keep_first: bool


class Entry:
    """An effect that was enqueued. Both fields are known before the entry is written.

    id: the entry's id.
    child_key: the key in its native form. An adapter may send it as a UUID or in hex. With `if_exists="ignore"`, writing this
        entry replaces `child_key` by the key of the first entry if the two differ. They differ after a key rotation.
    """

    __slots__ = ("_tag", "id")

    def __init__(self, id: UUID, tag: Tag) -> None:
        self.id = id
        self._tag = tag

    @property
    def child_key(self) -> str:
        return encode_native(self._tag)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and (self.id, self._tag) == (other.id, other._tag)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Entry(id={self.id!r}, child_key={self.child_key!r})"


def take_tag(entry: Entry, tag: Tag) -> None:
    """Let the app's handle show the tag under which the entry is stored."""
    entry._tag = tag


@dataclass(slots=True)
class PiggybackedInsert:
    """An INSERT of one row that may go with entries of its configuration, in their statement.

    sql: PostgreSQL's, its parameters by name. written: how many rows it wrote; None until it was run.
    """

    configuration: Configuration
    sql: str
    parameters: dict[str, Any]
    written: int | None = None


def insert_entries(
    connection: Connection,
    configuration: Configuration,
    entries: Sequence[NewEntry],
    piggybacked: PiggybackedInsert | None = None,
) -> set[UUID]:
    """Insert entries and their queue rows; returns the ids that were there before, left as they were.

    On PostgreSQL this is one statement, which includes the piggybacked insert, and two more for all entries with an ordering
    key. If no such statement is needed, the piggybacked insert is not written. The other databases do not take it.
    """
    writes = dialect_of(connection).writes
    if writes in _IN_BATCHES:
        with whole(connection):
            return _insert_in_batches(connection, configuration, entries, _IN_BATCHES[writes])
    if writes is Writes.ROWS:
        return _insert_one_by_one(connection, configuration, entries)
    ordered = [entry for entry in entries if entry.ordering_key is not None]
    if not ordered:
        return _insert_together(connection, configuration, entries, piggybacked)
    others = [entry for entry in entries if entry.ordering_key is None]
    present = _insert_together(connection, configuration, others, piggybacked) if others else set()
    return present | _insert_in_groups(connection, configuration, ordered)


def stored_tags(connection: Connection, tables: Tables, ids: Collection[UUID]) -> dict[UUID, Tag]:
    """The tags under which these entries are stored, by their ids."""
    entry = tables.entry
    rows = connection.execute(select(entry.c.id, entry.c.tag).where(entry.c.id.in_(ids)))
    return {row.id: Tag(bytes(row.tag)) for row in rows}


# Name and type of each of a new entry's values.
_COLUMNS = typed_columns(
    "id uuid, env text, scope text, source text, parent text, operation text, discriminator text, kid text, tag bytea,"
    " parent_id uuid, record_id uuid, destination text, payload bytea, options text, headers text, ordering_key text,"
    " due_at timestamptz, delay interval"
)

_IN_GROUP = _COLUMNS | {"position": "bigint"}


_values: Callable[[NewEntry], tuple[Any, ...]] = itemgetter(slice(len(_COLUMNS)))
_by_id = attrgetter("id.int")  # as PostgreSQL orders them


def _insert_together(
    connection: Connection,
    configuration: Configuration,
    entries: Sequence[NewEntry],
    piggybacked: PiggybackedInsert | None,
) -> set[UUID]:
    """Sorted by id, so that two transactions that write the same entries queue up instead of deadlocking."""
    tables, fair = configuration.tables, _fair(configuration, entries)
    batch = Batch(connection, _COLUMNS, list(map(_values, sorted(entries, key=_by_id))))
    if piggybacked is None:
        statement = _statement(tables, batch.shape, configuration.schema_version, is_fair=bool(fair))
        written = execute(connection, statement, batch.parameters | fair).rowcount
    else:
        statement = _accompanied(tables, batch.shape, piggybacked.sql, configuration.schema_version, is_fair=bool(fair))
        (row,) = execute(connection, statement, batch.parameters | piggybacked.parameters | fair).rows
        written, piggybacked.written = row
    return _present(connection, tables, entries, written)


def _insert_in_groups(connection: Connection, configuration: Configuration, entries: Sequence[NewEntry]) -> set[UUID]:
    """Entries with an ordering key, in the order in which they were enqueued."""
    tables, fair = configuration.tables, _fair(configuration, entries)
    positions = take_positions(connection, tables, [entry.ordering_key or "" for entry in entries])
    placed = sorted(zip(entries, positions, strict=True), key=lambda placed: _by_id(placed[0]))
    batch = Batch(connection, _IN_GROUP, [(*_values(entry), position) for entry, position in placed])
    statement = _group_statement(tables, batch.shape, configuration.schema_version, is_fair=bool(fair))
    written = execute(connection, statement, batch.parameters | fair).rowcount
    return _present(connection, tables, entries, written)


def _fair(configuration: Configuration, entries: Sequence[NewEntry]) -> dict[str, list[str]]:
    fair = configuration.fair
    if not fair or fair.isdisjoint(entry.destination for entry in entries):
        return {}
    return {"fair": list(fair)}


def _present(connection: Connection, tables: Tables, entries: Sequence[NewEntry], written: int) -> set[UUID]:
    """The ids that existed before the last statement. written: how many rows it inserted."""
    if written == len(entries):
        return set()
    ids = {entry.id for entry in entries}
    present = _present_before(connection, tables, ids) if written else ids
    return present if len(present) == len(ids) - written else ids  # a false DuplicateEntry is safe, a missed one is not


def _present_before(connection: Connection, tables: Tables, ids: set[UUID]) -> set[UUID]:
    """The `ids` that the last statement did not write, although it wrote others: asked only if there are duplicates.

    Rows of other transactions have another time. Of this transaction's rows, the last statement's have the highest number.
    """
    entry = tables.entry
    command = cast(cast(literal_column("cmin"), Text), BigInteger)
    rows = connection.execute(
        select(entry.c.id, entry.c.created_at == func.now(), command).where(entry.c.id.in_(ids))
    ).all()
    last = max(number for _, is_ours, number in rows if is_ours)
    return {id for id, is_ours, number in rows if not is_ours or number < last}


_FAIR = """, CASE WHEN destination = ANY (CAST(:fair AS text[])) THEN destination END AS fair,
                CASE WHEN destination = ANY (CAST(:fair AS text[])) THEN scope END AS scope"""
"""The queue row stores the scope for fair destinations only; other statements do not read it."""


@lru_cache(MAX_STATEMENTS)
def _statement(tables: Tables, shape: Shape, version: int, *, is_fair: bool) -> TextClause:
    """The INSERT into both tables. It returns only the count, which is nearly always enough."""
    written, queue = _insertions(tables, shape, version, is_fair)
    return text(f"WITH {written} {queue}")


@lru_cache(MAX_STATEMENTS)
def _accompanied(tables: Tables, shape: Shape, piggybacked: str, version: int, *, is_fair: bool) -> TextClause:
    """The insert of entries together with the piggybacked insert; returns both counts."""
    written, queue = _insertions(tables, shape, version, is_fair)
    return text(
        f"WITH {written}, queued AS ({queue} RETURNING 1), piggybacked AS ({piggybacked} RETURNING 1)"
        " SELECT (SELECT count(*) FROM queued), (SELECT count(*) FROM piggybacked)"
    )


def _insertions(tables: Tables, shape: Shape, version: int, is_fair: bool) -> tuple[str, str]:
    written = _written(tables, f"({batch_query(_COLUMNS, shape)}) AS n", version, is_fair)
    fair = ", fair, scope" if is_fair else ""
    queue = f"""
        INSERT INTO {quoted_table(tables.queue)}
            (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, ordering_key{fair})
        SELECT id, destination, 'pending', due_at, 0, 0, false, 0, ordering_key{fair} FROM written
        """
    return written, queue


def _written(tables: Tables, source: str, version: int, is_fair: bool) -> str:
    stored = ", ".join(name for name in _COLUMNS if name not in ("due_at", "delay"))
    return f"""
        written AS (
            INSERT INTO {quoted_table(tables.entry)} ({stored}, schema_version, due_at, created_at)
            SELECT {stored}, {version}, GREATEST(due_at, now()) + COALESCE(delay, '0'), now() FROM {source}
            ON CONFLICT (id) DO NOTHING
            RETURNING id, destination, ordering_key, due_at{_FAIR if is_fair else ""}
        )
        """


@lru_cache(MAX_STATEMENTS)
def _group_statement(tables: Tables, shape: Shape, version: int, *, is_fair: bool) -> TextClause:
    """The insert of entries with positions. The first written entry of a group is due; a claim may still block it."""
    return text(
        f"""
        WITH n AS ({batch_query(_IN_GROUP, shape)}), {_written(tables, "n", version, is_fair)}
        INSERT INTO {quoted_table(tables.queue)}
            (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, ordering_key, position
            {", fair, scope" if is_fair else ""})
        SELECT w.id, w.destination, 'pending',
            CASE WHEN row_number() OVER (PARTITION BY w.ordering_key ORDER BY n.position) = 1
                 THEN w.due_at ELSE '{NEVER.isoformat()}' END,
            0, 0, false, 0, w.ordering_key, n.position{", w.fair, w.scope" if is_fair else ""}
        FROM written AS w JOIN n ON n.id = w.id
        """
    )


def _insert_one_by_one(connection: Connection, configuration: Configuration, entries: Sequence[NewEntry]) -> set[UUID]:
    present: set[UUID] = set()
    groups: set[str] = set()
    for entry in entries:
        if not _insert_one(connection, configuration, entry, is_blocked=entry.ordering_key in groups):
            present.add(entry.id)
        elif entry.ordering_key is not None:
            groups.add(entry.ordering_key)
    return present


def _insert_one(connection: Connection, configuration: Configuration, entry: NewEntry, *, is_blocked: bool) -> bool:
    tables = configuration.tables
    stored = _stored(configuration, entry, database_now(connection))
    inserting = dialect_of(connection).insert_unless_present(tables.entry).values(stored)
    if connection.execute(inserting.returning(tables.entry.c.id)).first() is None:
        return False
    due_at = NEVER if is_blocked else stored["due_at"]
    position = None if entry.ordering_key is None else next_position(tables, entry.ordering_key)
    queued = _queued(configuration, entry, due_at)
    connection.execute(insert(tables.queue).values(position=position, **queued))
    return True


class _Batches(NamedTuple):
    """How MariaDB or MySQL writes an entry with its queue row, and how it writes the rows of many entries.

    one: returns whether it has written. many: returns the due times of the entries that it has written, by their ids.
    """

    one: Callable[[Connection, Tables, int, Mapping[str, Any], Mapping[str, Any]], bool]
    many: Callable[[Connection, Configuration, Sequence[NewEntry]], dict[UUID, datetime]]


def _insert_in_batches(
    connection: Connection, configuration: Configuration, entries: Sequence[NewEntry], write: _Batches
) -> set[UUID]:
    """Write each table's rows in one statement, and those with a position in another. Only a group's first entry is due."""
    tables = configuration.tables
    if len(entries) == 1 and entries[0].ordering_key is None:
        return _insert_alone(connection, configuration, entries[0], write)
    keys = {entry.ordering_key for entry in entries if entry.ordering_key is not None}
    last = lock_ordering_keys(connection, tables, keys) if keys else {}
    written = write.many(connection, configuration, sorted(entries, key=_by_id))
    alone, in_groups = [], []
    for entry in entries:
        if entry.id not in written:
            continue
        due_at = written[entry.id]
        if entry.ordering_key is None:
            alone.append(_queued(configuration, entry, due_at))
        else:
            last[entry.ordering_key] = last.get(entry.ordering_key, 0) + 1
            queued = _queued(configuration, entry, due_at if entry.ordering_key in keys else NEVER)
            in_groups.append(queued | {"position": last[entry.ordering_key]})
            keys.discard(entry.ordering_key)
    if alone:
        connection.execute(_queueing(tables, in_groups=False), _one_or_many(alone))
    if in_groups:
        connection.execute(_queueing(tables, in_groups=True), _one_or_many(in_groups))
    return {entry.id for entry in entries} - written.keys()


def _insert_alone(connection: Connection, configuration: Configuration, entry: NewEntry, write: _Batches) -> set[UUID]:
    fair = {"fair": entry.destination, "scope": entry.scope} if entry.destination in configuration.fair else {}
    queued = {"id": entry.id, "destination": entry.destination} | fair
    values = dict(zip(_COLUMNS, _values(entry), strict=True))
    written = write.one(connection, configuration.tables, configuration.schema_version, values, queued)
    return set() if written else {entry.id}


def _insert_many_on_mariadb(
    connection: Connection, configuration: Configuration, entries: Sequence[NewEntry]
) -> dict[UUID, datetime]:
    statement = _insertion_on_mariadb(configuration.tables, dialect_of(connection), configuration.schema_version)
    return mariadb.insert_in_pages(connection, statement, [_by_name(entry) for entry in entries])


def _insert_many_on_mysql(
    connection: Connection, configuration: Configuration, entries: Sequence[NewEntry]
) -> dict[UUID, datetime]:
    now = database_now(connection)
    rows = [_stored(configuration, entry, now) for entry in entries]
    written = mysql.insert_all(connection, configuration.tables.entry, rows)
    return {row["id"]: row["due_at"] for row in rows if row["id"] in written}


_IN_BATCHES = {
    Writes.COMPOUND: _Batches(mariadb.insert_entry, _insert_many_on_mariadb),
    Writes.BATCHES: _Batches(mysql.insert_entry, _insert_many_on_mysql),
}


@lru_cache(MAX_STATEMENTS)
def _insertion_on_mariadb(tables: Tables, dialect: Dialect, version: int) -> Executable:
    """Returns the ids and due times of what it writes."""
    entry = tables.entry
    given = {name: bindparam(f"new_{name}", type_=entry.c[name].type) for name in _COLUMNS if name in entry.c}
    asked = func.coalesce(cast(given.pop("due_at"), Instant), clock())
    due_at = later(func.greatest(asked, clock()), bindparam("new_delay", type_=Double))
    own = {"schema_version": version, "due_at": due_at, "created_at": clock()}
    inserting: Any = dialect.insert_unless_present(entry).values(given | own)
    returning: Executable = inserting.returning(entry.c.id, entry.c.due_at)
    return returning


@lru_cache(MAX_STATEMENTS)
def _queueing(tables: Tables, *, in_groups: bool) -> Executable:
    names = (*_QUEUED, "position") if in_groups else _QUEUED
    return insert(tables.queue).values({name: bindparam(name) for name in names})


_QUEUED = (
    *("id", "destination", "state", "due_at", "deliveries", "attempts", "maybe_sent", "key_epoch"),
    *("ordering_key", "fair", "scope"),
)


def _one_or_many(rows: list[dict[str, Any]]) -> Any:
    """SQLAlchemy executes one row with less work than a list of one."""
    return rows[0] if len(rows) == 1 else rows


def _by_name(entry: NewEntry) -> dict[str, Any]:
    row = {f"new_{name}": value for name, value in zip(_COLUMNS, _values(entry), strict=True)}
    return row | {"new_delay": entry.delay.total_seconds() if entry.delay else 0.0}


def _stored(configuration: Configuration, entry: NewEntry, now: datetime) -> dict[str, Any]:
    """The row of `entry`. now: the database's."""
    due_at = max(entry.due_at or now, now) + (entry.delay or timedelta(0))
    stored = dict(zip(_COLUMNS, _values(entry), strict=True)) | {
        "schema_version": configuration.schema_version,
        "due_at": due_at,
        "created_at": now,
    }
    del stored["delay"]
    return stored


def _queued(configuration: Configuration, entry: NewEntry, due_at: datetime) -> dict[str, Any]:
    """The row of `queue`, without a position."""
    is_fair = entry.destination in configuration.fair
    return {
        "id": entry.id,
        "destination": entry.destination,
        "state": "pending",
        "due_at": due_at,
        "deliveries": 0,
        "attempts": 0,
        "maybe_sent": False,
        "key_epoch": 0,
        "ordering_key": entry.ordering_key,
        "fair": entry.destination if is_fair else None,
        "scope": entry.scope if is_fair else None,
    }
