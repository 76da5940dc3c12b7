"""The dashboard's connections: to read, with a limit for each statement, and to decide."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, event, func, select, text
from sqlalchemy.engine import URL

from dispatchers.dashboard.failures import Failure
from outbox.errors import ConfigurationError
from outbox.migrations.targets import require_durable
from outbox.sessions.hints import hint_at_once
from outbox.sql.connections.engines import engine_of, url_of
from outbox.sql.connections.requirements import require_utf8
from outbox.sql.connections.sync_drivers import synchronous
from outbox.sql.dialect import dialect_of, dialect_of_url
from outbox.sql.schema.tables import tables_of

POOL_SECONDS = 5
POOL = {"pool_size": 5, "max_overflow": 5, "pool_timeout": POOL_SECONDS, "pool_pre_ping": True}
"""A request waits at most 5 s for one of 10 connections; a dashboard must not take those of the app."""

MILLISECOND = timedelta(milliseconds=1)
MAX_STATEMENT_TIMEOUT = timedelta(days=24)  # PostgreSQL counts the milliseconds in 31 bits
LOCK_MILLISECONDS = 3000
CONNECT_SECONDS = 5


def _connect_args(url: URL, milliseconds: int) -> dict[str, Any]:
    """What the dashboard's own connections have unless the URL has it: also a database that is set to another encoding is shown.

    PgBouncer in transaction mode gives the next transaction another connection, which lacks what psycopg has prepared. MariaDB's
    limits are of the session.
    milliseconds: the limit of a statement.
    """
    limits = dialect_of_url(url).session_limits(milliseconds, LOCK_MILLISECONDS)
    if limits is not None and "init_command" not in url.query:
        return {"init_command": limits}
    if url.get_driver_name() not in ("psycopg", "psycopg2"):
        return {}
    wanted: dict[str, Any] = {"client_encoding": "utf8", "connect_timeout": CONNECT_SECONDS}
    if url.get_driver_name() == "psycopg":
        wanted["prepare_threshold"] = None
    return {name: value for name, value in wanted.items() if name not in url.query}


class Databases:
    """url: of the database, or an Engine: decisions are written there, by the role `outbox_operator`. read_url: where pages are
    read, a replica for example, by the role `outbox_dashboard`; by default `url`.

    statement_timeout: after it PostgreSQL cancels a statement of a page.
    answer_seconds: after them a page is answered also if the database hangs.
    """

    def __init__(
        self,
        url: "str | URL | Engine",
        read_url: "str | URL | Engine | None",
        schema: str | None,
        prefix: str,
        statement_timeout: timedelta,
    ) -> None:
        if not (isinstance(statement_timeout, timedelta) and MILLISECOND <= statement_timeout <= MAX_STATEMENT_TIMEOUT):
            raise ConfigurationError(
                f"statement_timeout={statement_timeout!r}: give a timedelta of 1 ms to {MAX_STATEMENT_TIMEOUT.days} days"
            )
        self.tables = tables_of(schema, prefix)
        self._schema, self._prefix = schema, prefix
        self._milliseconds = statement_timeout // MILLISECOND
        self.answer_seconds = POOL_SECONDS + 3 * statement_timeout.total_seconds()
        self._own: list[Engine] = []
        self._deciding = self._engine(url)
        self._reading = self._deciding if read_url is None else self._engine(read_url)
        dialect_of(self._deciding).prepare(self._deciding)

    def _engine(self, url: "str | URL | Engine") -> Engine:
        if isinstance(url, Engine):
            dialect_of(url)  # which refuses other databases
            return url
        if not isinstance(url, str | URL):
            raise ConfigurationError(
                f"the dashboard needs a URL or an Engine, not {type(url).__name__}: for an AsyncEngine give its `.url`"
            )
        sync_url = synchronous(url_of(url, "the dashboard"))
        require_durable(sync_url)
        made = engine_of(sync_url, **POOL, connect_args=_connect_args(sync_url, self._milliseconds))
        self._own.append(made)
        return made

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection whose transaction sees one moment of the database, and on PostgreSQL cannot write."""
        return self._snapshot(self._reading)

    def reading_as_operator(self) -> AbstractContextManager[Connection]:
        """A snapshot of the database that decisions are written to: a replica, or the dashboard's role, may lack its rows."""
        return self._snapshot(self._deciding)

    @contextmanager
    def deciding(self) -> Iterator[Connection]:
        """A connection in a transaction that commits at the block's end. Then the dispatchers are woken."""
        with self._deciding.connect() as connection:
            # At this level, not the app's engine's: the row is locked, then compared.
            level = dialect_of(connection).isolation
            if level is not None:
                connection.execution_options(isolation_level=level)
            with connection.begin():
                self._prepare(connection)
                self._limit_locks(connection)
                yield connection
        hint_at_once(self._deciding, self._schema, self._prefix)

    @contextmanager
    def deciding_in_batches(self) -> Iterator[Engine]:
        """An engine for several transactions. The dispatchers are woken at the block's end, also after an error."""
        limited = self._deciding.execution_options()  # a copy: the listener concerns only its connections
        event.listen(limited, "begin", self._prepare)
        try:
            yield limited
        finally:
            hint_at_once(self._deciding, self._schema, self._prefix)

    @contextmanager
    def _snapshot(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as connection:
            connection.execution_options(**dialect_of(connection).snapshot)
            self._prepare(connection)
            yield connection

    def _prepare(self, connection: Connection) -> None:
        """Limit each statement of the transaction. Let no setting of the role or the database decide how instants are written:
        psycopg reads only those in ISO's style, and no driver one after the year 9999, which `NEVER` is in some time zones.
        """
        if not dialect_of(connection).has_settings:
            return
        try:
            require_utf8(connection)
        except ConfigurationError as error:
            raise Failure(503, "encoding", str(error)) from None
        settings = {"statement_timeout": str(self._milliseconds), "DateStyle": "ISO", "TimeZone": "UTC"}
        connection.execute(select(*(func.set_config(name, value, True) for name, value in settings.items())))

    def _limit_locks(self, connection: Connection) -> None:
        """A decision that waits for a lock is refused as such, before it counts as a slow statement."""
        if dialect_of(connection).has_settings:
            milliseconds = max(1, min(LOCK_MILLISECONDS, self._milliseconds // 2))
            connection.execute(text(f"SET LOCAL lock_timeout = {milliseconds}"))

    def close(self) -> None:
        """Close the connections of the engines that were made from a URL."""
        for engine in self._own:
            engine.dispose()
