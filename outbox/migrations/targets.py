"""The targets of a migration: a URL, an engine or a connection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.engine import URL
from sqlalchemy.engine.mock import MockConnection
from sqlalchemy.pool import NullPool

from outbox.errors import ConfigurationError, SchemaError
from outbox.sql.connections.engines import engine_of
from outbox.sql.connections.forks import closed_afterwards
from outbox.sql.connections.requirements import require_utf8
from outbox.sql.connections.sync_drivers import synchronous
from outbox.sql.dialect import (
    SUPPORTED_NAMES,
    Dialect,
    OtherDatabase,
    dialect_named,
    dialect_of,
    dialect_of_url,
)

if TYPE_CHECKING:  # imported at run time, it would ask for greenlet, which only an extra brings
    from sqlalchemy.ext.asyncio import AsyncEngine

Target: TypeAlias = "str | URL | Engine | AsyncEngine | Connection"


@contextmanager
def connected(target: Target) -> Iterator[Connection]:
    """A connection in a transaction: the caller's own, or one that commits at the block's end."""
    if isinstance(target, Connection):
        dialect_of(target)  # which refuses other databases
        require_utf8(target)
        yield target
        return
    engine = _engine(target)
    dialect = dialect_of(engine)
    with engine.connect() as connection, closed_afterwards(connection):
        if dialect.isolation is not None:
            # whatever the engine's own: in autocommit nothing would be whole, and an older snapshot than the lock's would miss
            # what another run has just made
            connection.execution_options(isolation_level=dialect.isolation)
        with connection.begin():
            require_utf8(connection)
            yield connection


def _engine(target: Any) -> Engine:
    if isinstance(target, str | URL):
        return _open(make_url(target))
    if target is None or isinstance(target, MockConnection):
        raise ConfigurationError(
            "there is no connection to migrate, as in Alembic's offline mode (--sql): print the outbox's part with"
            " `outbox db sql`"
        )
    engine = getattr(target, "sync_engine", target)
    if not isinstance(engine, Engine) or hasattr(target, "sync_connection"):
        raise ConfigurationError(
            f"{type(target).__name__} is not a target: give a URL, an engine or a sync Connection"
            " (with an AsyncConnection: `await connection.run_sync(upgrade)`)"
        )
    return _open(engine.url) if engine.dialect.is_async else engine


def _open(url: URL) -> Engine:
    dialect_of_url(url)  # before its dialect is asked, which need not be installed
    if url.get_dialect().is_async:
        url = synchronous(url)
        if url.get_dialect().is_async:
            raise ConfigurationError(
                f"migrations are synchronous, {url.drivername} is not: give a URL with a synchronous driver"
                " (postgresql+psycopg://...), or a connection: `await connection.run_sync(upgrade)`"
            )
    require_durable(url)
    return engine_of(url, poolclass=NullPool)


def require_durable(url: URL) -> None:
    """Raise `ConfigurationError` for a database in memory: a new engine would have another, empty one."""
    in_memory = url.database in (None, "", ":memory:") or url.query.get("mode") == "memory"
    if dialect_of_url(url).is_file and in_memory:
        raise ConfigurationError(
            f"{url!r} would be another, empty database in memory: give the Engine or Connection itself"
        )


def dialect_to_migrate(name: str) -> Dialect:
    """Raises SchemaError for a name that a user has mistyped."""
    try:
        return dialect_named(name)
    except OtherDatabase:
        raise SchemaError(f"there are no migrations for {name!r}, only for {SUPPORTED_NAMES}") from None
