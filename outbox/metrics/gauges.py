"""Gauges that are read from the database: how old the requests are that have no final answer, how large the tables have grown."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Table, func, or_, select, text

from outbox.errors import ConfigurationError
from outbox.sql.clock import clock
from outbox.sql.connections.forks import watch
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.body_partitions import body_table, read_layout
from outbox.sql.schema.tables import Tables, is_open

Result = TypeVar("Result")

OPEN_STATES = ("accepted", "leased")
ZERO = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecords:
    """The requests in one state, accepted or leased: how many, and how long ago they were made.

    age_p95: 95 of a hundred are no older than this; zero if there are none. age_p99: the same of 99.
    """

    state: str
    count: int = 0
    age_p95: timedelta = ZERO
    age_p99: timedelta = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """table: `record`, `entry` and so on, without schema and prefix.

    rows: on PostgreSQL the server's estimate, of its last ANALYZE or VACUUM; None before the first.
    size_bytes: with indexes and what is stored out of line; None on SQLite, which does not say.
    """

    table: str
    rows: int | None
    size_bytes: int | None


def check_engine(engine: object) -> None:
    """Raise `ConfigurationError`, when the gauges are registered, for what they cannot be read through."""
    inner = getattr(engine, "sync_engine", engine)
    if not isinstance(inner, Engine):
        raise ConfigurationError(f"the gauges need an Engine or an AsyncEngine, not {type(engine).__name__}")
    watch(inner)


def read_through(engine: Any, read: Callable[[Connection], Result]) -> Result:
    """What `read` returns for a connection of an Engine or an AsyncEngine; also callable from a running event loop.

    An AsyncEngine is read on an event loop of a thread of its own, through a pool of its own made as the engine's is: the
    engine's own loop may be the one that waits here, and its connections belong to that loop.
    """
    if isinstance(engine, Engine):
        with engine.connect() as connection:
            return read(connection)
    with ThreadPoolExecutor(1, thread_name_prefix="outbox-gauges") as thread:
        return thread.submit(lambda: asyncio.run(_read_async(engine, read))).result()


async def _read_async(engine: Any, read: Callable[[Connection], Result]) -> Result:
    from sqlalchemy.ext.asyncio import create_async_engine  # an extra that every AsyncEngine needs

    own = create_async_engine(engine.url, pool=engine.sync_engine.pool.recreate())
    try:
        async with own.connect() as connection:
            found: Result = await connection.run_sync(read)
            return found
    finally:
        await own.dispose()


def read_open_records(connection: Connection, tables: Tables) -> list[OpenRecords]:
    """The open requests, one item a state, also for a state without any. Reads all that are open."""
    return [_open_records(connection, tables, state) for state in OPEN_STATES]


def _open_records(connection: Connection, tables: Tables, state: str) -> OpenRecords:
    record = tables.record
    numbered = (
        select(
            record.c.created_at,
            func.count().over().label("among"),
            func.row_number().over(order_by=record.c.created_at.desc()).label("number"),
        )
        .where(is_open(record, state))
        .subquery()
    )
    number, among = numbered.c.number, numbered.c.among
    rows = connection.execute(
        select(numbered.c.created_at, clock(), among)
        .where(or_(number == _number_at(95, among), number == _number_at(99, among)))
        .order_by(number)
    ).all()
    if not rows:
        return OpenRecords(state=state)
    ages = [now - created_at for created_at, now, _ in rows]  # of one row, if it is both
    return OpenRecords(state=state, count=rows[0].among, age_p95=ages[0], age_p99=ages[-1])


def _number_at(percent: int, among: ColumnElement[int]) -> ColumnElement[int]:
    """The rank at this percentile, counted from the youngest: the nearest rank, rounded up."""
    return (among * percent + 99) // 100


def read_table_sizes(connection: Connection, tables: Tables) -> list[TableSize]:
    """The size of every table of the outbox. PostgreSQL and MariaDB look them up; SQLite and the portable mode count."""
    sizes = [_size(connection, name, table) for name, table in _by_name(tables)]
    return [*sizes, *_of_bodies(connection, tables)] if dialect_of(connection).has_catalog else sizes


def read_days_ahead(connection: Connection, tables: Tables) -> int | None:
    """How many days ahead have a partition for bodies; None in the ordinary layout. Zero: tomorrow's is missing."""
    layout = read_layout(connection, tables)
    return layout.ahead if layout is not None and layout.is_on else None


def _size(connection: Connection, name: str, table: Table) -> TableSize:
    found = dialect_of(connection).read_size(connection, table)
    if found is None:
        found = connection.execute(select(func.count()).select_from(table)).scalar_one(), None
    return TableSize(table=name, rows=found[0], size_bytes=found[1])


def _of_bodies(connection: Connection, tables: Tables) -> list[TableSize]:
    rows, size_bytes = connection.execute(_SIZE_OF_PARTITIONS, {"table": body_table(tables)}).one()
    return [] if size_bytes is None else [TableSize(table="body", rows=rows, size_bytes=size_bytes)]


_SIZE_OF_PARTITIONS = text(
    "SELECT CAST(sum(NULLIF(reltuples, -1)) AS bigint), CAST(sum(pg_total_relation_size(relid)) AS bigint)"
    " FROM pg_partition_tree(to_regclass(:table)) JOIN pg_class ON pg_class.oid = relid WHERE isleaf"
)


def _by_name(tables: Tables) -> list[tuple[str, Table]]:
    values = ((field.name, getattr(tables, field.name)) for field in fields(tables))
    return [(name, value) for name, value in values if isinstance(value, Table)]
