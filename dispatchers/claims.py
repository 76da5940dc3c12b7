"""Claim entries for a while, and settle them only while holding the lease: the dispatcher's only way to the database.

Everything happens in short transactions of its own, committed before anything is sent. The SQL is in `sql_postgresql` and
`sql_portable`; here is what they share.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import URL, Connection, Engine, create_engine, func, inspect, make_url, select, text

from dispatchers import sql_portable, sql_postgresql
from dispatchers.lifecycle import Claimed, ClaimRequest, Settlement
from outbox.configuration import Configuration
from outbox.databases import prepare_sqlite
from outbox.errors import ConfigurationError, SchemaError
from outbox.keys import KeyFields, ParentKey, key_fields

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one round trip brought: ids whose settling took effect, and new claims."""

    settled: set[UUID] = field(default_factory=set)
    claimed: list[Claimed] = field(default_factory=list)


class Store(Protocol):
    """What the dispatcher needs of a database. A simulation hands in one of its own."""

    async def exchange(self, settlements: Sequence[Settlement], request: ClaimRequest | None) -> Exchange:
        """Settle what is still ours, then claim, in one transaction that is committed on return."""
        ...

    async def destinations(self) -> list[str]:
        """Every destination that has unsettled entries."""
        ...

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        """The fields from which an entry's keys derive: needed for another key epoch only."""
        ...

    async def gauges(self) -> dict[str, dict[str, int]]:
        """How many unsettled entries there are: {destination: {state: count}}."""
        ...

    async def unknown_kid(self, known: Sequence[str]) -> str | None:
        """A key id among unsettled entries that is not in `known`, if there is one."""
        ...

    async def foreign_env(self, env: str) -> str | None:
        """The name of another deployment among unsettled entries, if there is one."""
        ...

    async def check(self) -> None:
        """Raise `SchemaError` if the tables are not there."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class Claims:
    """The store on a real database. Takes a URL, an Engine or an AsyncEngine.

    Blocking work runs on a thread; with an AsyncEngine, on the event loop through SQLAlchemy's own bridge.
    """

    def __init__(self, target: Any, configuration: Configuration) -> None:
        self._async_engine = target if hasattr(target, "sync_engine") else None
        self._engine: Engine = getattr(target, "sync_engine", None) or _engine(target)
        if self._engine.dialect.name == "sqlite":
            prepare_sqlite(self._engine)
        self._tables = configuration.tables
        # Its own, so that no hanging send of a user's keeps it waiting for a thread of the event loop's.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="outbox-store")
        self._sql: Any = sql_postgresql if self._engine.dialect.name == "postgresql" else sql_portable

    async def exchange(self, settlements: Sequence[Settlement], request: ClaimRequest | None) -> Exchange:
        def work(connection: Connection) -> Exchange:
            ours = sorted(settlements, key=lambda settlement: settlement[0].id.int)
            settled = self._sql.settle(connection, self._tables, ours) if ours else set()
            claimed = self._sql.claim(connection, self._tables, request) if request and request.wants else []
            return Exchange(settled, claimed)

        return await self._run(work)

    async def destinations(self) -> list[str]:
        queue = self._tables.queue

        def work(connection: Connection) -> list[str]:
            # A skip scan: one index probe for each destination, however many rows each has.
            table = connection.dialect.identifier_preparer.format_table(queue)
            statement = text(
                f"""
                WITH RECURSIVE d (name) AS (
                    SELECT min(destination) FROM {table}
                    UNION ALL
                    SELECT (SELECT min(q.destination) FROM {table} q WHERE q.destination > d.name) FROM d
                    WHERE d.name IS NOT NULL
                )
                SELECT name FROM d WHERE name IS NOT NULL
                """
            )
            return list(connection.execute(statement).scalars())

        return await self._run(work)

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        entry = self._tables.entry

        def work(connection: Connection) -> KeyFields:
            row = connection.execute(select(entry).where(entry.c.id == entry_id)).one()
            parent = ParentKey(row.parent, scope=row.scope, source=row.source)
            return key_fields(row.env, parent, row.operation, row.discriminator)

        return await self._run(work)

    async def gauges(self) -> dict[str, dict[str, int]]:
        queue = self._tables.queue

        def work(connection: Connection) -> dict[str, dict[str, int]]:
            counts: dict[str, dict[str, int]] = {}
            grouped = select(queue.c.destination, queue.c.state, func.count()).group_by(
                queue.c.destination, queue.c.state
            )
            for destination, state, count in connection.execute(grouped):
                counts.setdefault(destination, {})[state] = count
            return counts

        return await self._run(work)

    async def unknown_kid(self, known: Sequence[str]) -> str | None:
        entry, queue = self._tables.entry, self._tables.queue

        def work(connection: Connection) -> str | None:
            found = select(entry.c.kid).join(queue, queue.c.id == entry.c.id).where(entry.c.kid.not_in(known)).limit(1)
            kid: str | None = connection.execute(found).scalar_one_or_none()
            return kid

        return await self._run(work)

    async def foreign_env(self, env: str) -> str | None:
        entry, queue = self._tables.entry, self._tables.queue

        def work(connection: Connection) -> str | None:
            found = select(entry.c.env).join(queue, queue.c.id == entry.c.id).where(entry.c.env != env).limit(1)
            foreign: str | None = connection.execute(found).scalar_one_or_none()
            return foreign

        return await self._run(work)

    async def check(self) -> None:
        queue = self._tables.queue

        def work(connection: Connection) -> None:
            if not inspect(connection).has_table(queue.name, schema=queue.schema):
                raise SchemaError(f"the table {queue.fullname!r} does not exist: run `outbox db upgrade` first")

        await self._run(work)

    async def close(self) -> None:
        """Close the pooled connections."""
        if self._async_engine is not None:
            await self._async_engine.dispose()
        else:
            await self._on_thread(self._engine.dispose)

    async def _run(self, work: Callable[[Connection], Result]) -> Result:
        if self._async_engine is not None:
            async with self._async_engine.begin() as connection:
                result: Result = await connection.run_sync(work)
                return result
        on_thread: Result = await self._on_thread(self._run_blocking, work)
        return on_thread

    async def _on_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _run_blocking(self, work: Callable[[Connection], Result]) -> Result:
        with self._engine.begin() as connection:
            return work(connection)


def _engine(target: Any) -> Engine:
    if isinstance(target, Engine):
        return target
    if isinstance(target, str | URL):
        url = make_url(target)
        if url.get_dialect().is_async:
            raise ConfigurationError(
                f"the driver of {url.drivername!r} is asynchronous: hand in create_async_engine(url)"
            )
        return create_engine(url)
    raise ConfigurationError(f"a dispatcher needs a URL, an Engine or an AsyncEngine, not {type(target).__name__}")
