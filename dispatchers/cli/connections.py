"""Opens `--database`: a read-only connection, or one that writes a decision."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dispatchers.cli.options import Target

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

    from outbox.sql.schema.tables import Tables

Result = TypeVar("Result")

CONFLICT_TRIES = 10
REPEATED = f"tried {CONFLICT_TRIES} times"  # a note on the error of the last try
MAX_PAUSE_SECONDS = 0.05  # of the first pause between two tries; each next one is twice as long at most


@contextmanager
def reading(target: Target) -> "Iterator[tuple[Connection, Tables]]":
    """A connection in a transaction that sees one moment of the database, and on PostgreSQL cannot write."""
    from outbox.sql.dialect import dialect_of

    tables = _tables(target)
    with _engine(existing(target.database)).connect() as connection:
        dialect = dialect_of(connection)
        if not dialect.requires_isolation:
            connection.execution_options(**dialect.snapshot)
        _require(connection, tables)
        yield connection, tables


@contextmanager
def examining(target: Target) -> "Iterator[tuple[Connection, Tables]]":
    """A connection for several transactions. None of the outbox's tables need exist."""
    with _engine(existing(target.database)).connect() as connection:
        yield connection, _tables(target)


def runner(connection: "Connection") -> Any:
    """Runs each piece of work in a transaction of its own, all on this connection, and again after a conflict."""

    @repeated_after_conflicts
    def transact(work: "Callable[[Connection], Result]") -> "Result":
        with connection.begin():
            return work(connection)

    async def run(work: "Callable[[Connection], Result]") -> "Result":
        result: Result = transact(work)
        return result

    return run


@contextmanager
def deciding(target: Target) -> "Iterator[tuple[Connection, Tables]]":
    """A connection in a transaction that commits at the block's end, or rolls back for an exception.

    After the commit the dispatchers are woken: a decision mostly makes something due.
    """
    from outbox.sessions.hints import hint_at_once
    from outbox.sql.dialect import dialect_of

    tables = _tables(target)
    engine = _engine(existing(target.database))
    dialect_of(engine).prepare(engine)
    with engine.begin() as connection:
        _require(connection, tables)
        yield connection, tables
    hint_at_once(engine, target.schema, target.prefix)


@contextmanager
def deciding_in_batches(target: Target) -> "Iterator[tuple[Engine, Tables]]":
    """An engine for several transactions. The dispatchers are woken at the end, also if the block was left early."""
    from outbox.sessions.hints import hint_at_once

    with deciding(target) as (connection, tables):
        engine = connection.engine
    try:
        yield engine, tables
    finally:
        hint_at_once(engine, target.schema, target.prefix)


def repeated_after_conflicts(work: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command, or one of its transactions, again if the database undid it in favour of another one, perhaps a dispatcher's.

    A command prints nothing before its transaction is committed, or continues what an earlier run began. It does not repeat a
    transaction that was repeated before.
    """

    @wraps(work)
    def run(*arguments: Any, **given: Any) -> Any:
        for attempt in range(CONFLICT_TRIES):
            try:
                return work(*arguments, **given)
            except Exception as error:
                from dispatchers.store.queue.row_errors import is_conflict

                if not is_conflict(error) or REPEATED in getattr(error, "__notes__", ()):
                    raise
                if attempt == CONFLICT_TRIES - 1:
                    error.add_note(REPEATED)
                    raise
            time.sleep(random.uniform(0, MAX_PAUSE_SECONDS * 2**attempt))
        raise AssertionError("the last attempt has returned or raised")

    return run


def parsed(database: str, option: str = "--database") -> "URL":
    """The URL, with a synchronous driver that is installed. option: where it was given."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from outbox.sql.connections.sync_drivers import synchronous

    try:
        url = make_url(database)
    except (ArgumentError, ValueError):  # its text is not shown: it may contain a password
        raise _wrong("is not a valid SQLAlchemy URL, e.g. postgresql+psycopg://user@host/name", option) from None
    url = synchronous(url)
    _require_driver(url, option)
    return url


def _require_driver(url: "URL", option: str) -> None:
    from sqlalchemy.exc import NoSuchModuleError

    from outbox.sql.connections.engines import driver_of
    from outbox.sql.dialect import OtherDatabase, dialect_of_url

    try:
        dialect_of_url(url)
    except OtherDatabase as error:
        raise _wrong(f"is for another database: {error}", option) from None
    try:
        dialect = url.get_dialect()
        if dialect.is_async:
            raise _wrong(f"has an asynchronous driver, {url.drivername!r}: write postgresql+psycopg://", option)
        dialect.import_dbapi()
    except NoSuchModuleError:
        raise _wrong(f"names an unknown driver, {url.drivername!r}: write postgresql+psycopg://", option) from None
    except ModuleNotFoundError as error:
        raise _wrong(
            f"needs the driver {error.name!r}, which is not installed: pip install {driver_of(url)}",
            option,
        ) from None


class WrongUrl(click.BadParameter):
    """The URL of one database cannot be used."""


def _wrong(what: str, option: str) -> WrongUrl:
    return WrongUrl(f"the URL {what}", param_hint=f"'{option}'")


def existing(database: str, option: str = "--database") -> "URL":
    """The URL of a database that must exist already: SQLite would create a missing file, with a misspelt name an empty outbox."""
    url = parsed(database, option)
    if not _is_file(url) or (url.database or "").startswith("file:"):
        return url
    if not url.database or url.database == ":memory:":
        raise _wrong("is an in-memory database, which is always empty here", option)
    if not Path(url.database).exists():
        raise click.ClickException(
            f"file {url.database!r} does not exist: check {option}, or create the tables with `outbox db upgrade`"
        )
    return url


def _is_file(url: "URL") -> bool:
    from outbox.sql.dialect import dialect_of_url

    return dialect_of_url(url).is_file


def reach(database: str) -> None:
    """Connect once. SQLite always answers, and would create a missing file."""
    url = parsed(database)
    if not _is_file(url):
        _engine(url).connect().close()


def _engine(url: "URL") -> "Engine":
    from sqlalchemy.pool import NullPool

    from outbox.sql.connections.engines import engine_of

    # PgBouncer in transaction mode gives the next transaction another connection, which lacks what psycopg has prepared.
    connect_args = {"prepare_threshold": None} if url.get_driver_name() == "psycopg" else {}
    return engine_of(url, poolclass=NullPool, connect_args=connect_args)


def _tables(target: Target) -> "Tables":
    from outbox.sql.schema.tables import tables_of

    return tables_of(target.schema, target.prefix)


def _require(connection: "Connection", tables: "Tables") -> None:
    from sqlalchemy import inspect

    from outbox.errors import SchemaError
    from outbox.sql.connections.places import place_of

    queue = tables.queue
    if not inspect(connection).has_table(queue.name, schema=queue.schema):
        raise SchemaError(
            f"the table {queue.fullname!r} does not exist in the database {place_of(connection.engine)}: run `outbox db upgrade`"
            " (or the app's own Alembic migrations, if they create the outbox's tables), or give --prefix or --schema"
        )
