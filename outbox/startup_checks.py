"""Finds at its start what keeps an app from working: its settings, its tables, whose database it is, its secrets."""

from collections.abc import Awaitable
from typing import Any, Protocol

from sqlalchemy import Connection, Engine

from outbox.configuration import Configuration
from outbox.errors import ConfigurationError
from outbox.sql.connections.forks import closed_afterwards
from outbox.sql.connections.transactions import is_in_autocommit
from outbox.sql.deployment import recorded_environment, refuse_other_environment, require_data_keys, require_secrets
from outbox.sql.dialect import dialect_of


class AsyncEngineLike(Protocol):
    """SQLAlchemy's AsyncEngine, which only an extra can import."""

    @property
    def sync_engine(self) -> Engine: ...
    def connect(self) -> Any: ...


def check(configuration: Configuration, engine: Any) -> Awaitable[None] | None:
    """Check through an Engine at once, through an AsyncEngine when awaited."""
    if hasattr(engine, "sync_engine"):
        return _check_async(configuration, engine)
    if not isinstance(engine, Engine):
        raise ConfigurationError(f"outbox.check needs an Engine or an AsyncEngine, not {type(engine).__name__}")
    dialect_of(engine)  # which refuses other databases
    with engine.connect() as connection:
        _check(connection, configuration)
    return None


async def _check_async(configuration: Configuration, engine: AsyncEngineLike) -> None:
    dialect_of(engine.sync_engine)
    async with engine.connect() as connection:
        await connection.run_sync(_check, configuration)


def _check(connection: Connection, configuration: Configuration) -> None:
    with closed_afterwards(connection):
        _check_all(connection, configuration)


def _check_all(connection: Connection, configuration: Configuration) -> None:
    from outbox import migrations  # seldom needed, and not at import

    migrations.check(connection, schema=configuration.schema, prefix=configuration.prefix)
    recorded = recorded_environment(connection, configuration.tables)
    if recorded is not None:
        refuse_other_environment(connection, recorded, configuration.env)
    require_secrets(connection, configuration.tables, configuration.keyring)
    require_data_keys(connection, configuration.tables, configuration.encryption)
    if is_in_autocommit(connection):  # asked last: on SQLite an app's own BEGIN comes with the first statement
        raise ConfigurationError(
            "the engine is in autocommit mode, so every enqueue would raise NoTransaction: give outbox.check the engine of the"
            " sessions that enqueue, and create that without isolation_level='AUTOCOMMIT'"
        )
