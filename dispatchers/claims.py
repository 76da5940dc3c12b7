"""Claim entries for a while, and settle them only while holding the lease: the dispatcher's only way to the database.

Everything happens in short transactions of its own, committed before anything is sent. The SQL is in `sql_postgresql` and
`sql_portable`; here is what they share.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import URL, Connection, Engine, create_engine, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session

from dispatchers import sql_marks, sql_portable, sql_postgresql
from dispatchers.callbacks import Calls, OnCompleted, is_async, require_intact
from dispatchers.calling import Call, Calling, call_at_once, call_completed, call_settled, named_failures
from dispatchers.destinations import destination_names
from dispatchers.fairness import Rounds
from dispatchers.lanes import leave, sort_out
from dispatchers.lifecycle import Claimed, ClaimRequest, End, Ending
from dispatchers.marks import Mark, Watched
from dispatchers.pressure import Pressing, Pressures
from dispatchers.sql_accepted import Accepted, next_accepted
from dispatchers.sql_looks import Wanted, seek
from dispatchers.sql_pressure import claim_under_pressure, make_rows, read_pressures
from dispatchers.store import Exchange
from dispatchers.threads import on_own_thread
from outbox import migrations
from outbox.configuration import Configuration
from outbox.databases import prepare_sqlite, require_transaction
from outbox.errors import ConfigurationError
from outbox.instants import NEVER
from outbox.keys import KeyFields, ParentKey, key_fields

Result = TypeVar("Result")

log = logging.getLogger("outbox.dispatcher")

UNTOLD = (
    "the server does not let this role ask for its system identifier, its timeline and its log's position: a failover is not"
    " noticed, and of restored and copied databases only some are"
)


class Claims:
    """The store on a real database. Takes a URL, an Engine or an AsyncEngine.

    Blocking work runs on a thread; with an AsyncEngine, on the event loop through SQLAlchemy's own bridge.
    """

    def __init__(self, target: Any, configuration: Configuration) -> None:
        self._async_engine = target if hasattr(target, "sync_engine") else None
        self._engine: Engine = getattr(target, "sync_engine", None) or _engine(target)
        self._is_ours = isinstance(target, str | URL)  # an engine that was handed in is its maker's to dispose of
        if self._engine.dialect.name == "sqlite":
            prepare_sqlite(self._engine)
        self._configuration = configuration
        self.tables = configuration.tables
        # Its own, so that no hanging send of a user's keeps it waiting for a thread of the event loop's.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="outbox-store")
        self._upkeep_thread = ThreadPoolExecutor(1, thread_name_prefix="outbox-upkeep")
        self._sql: Any = sql_postgresql if self._engine.dialect.name == "postgresql" else sql_portable
        self._rounds = Rounds(configuration.fair)
        self._made_rows: set[str] = set()
        self._tells = True
        # Asked once, at the first use: setting the level each time would fail where a listener left a transaction open.
        self._is_at_read_committed = None if self._engine.dialect.name == "postgresql" else True

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        pressing = request.pressing if request else None
        if pressing is not None:
            await self._make_rows(pressing)

        def work(connection: Connection) -> Exchange:
            ours = sorted(settlements, key=lambda settlement: settlement[0].id.int)
            settled = self._settle(connection, ours, request.cutoff if request else NEVER) if ours else set()
            if request is None:
                return Exchange(settled, [])
            passed_over: list[Ending] = []

            def claim(wanted: ClaimRequest) -> list[Claimed]:
                found = self._sql.claim(connection, self.tables, wanted, self._rounds)
                may_go, must_wait = sort_out(connection, self.tables, found)
                if must_wait:
                    self._sql.settle(connection, self.tables, must_wait)
                passed_over.extend(must_wait)
                return may_go

            if pressing is not None:
                claimed, pressures = claim_under_pressure(connection, self.tables, request, pressing, claim)
                return Exchange(settled, claimed, len(passed_over), pressures)
            claimed = claim(request) if request.wants else []
            return Exchange(settled, claimed, len(passed_over))

        exchange: Exchange = await self._run(work)
        if pressing is not None and exchange.pressures is not None:
            asked = pressing.decided.union(pressing.news)
            self._made_rows -= asked - exchange.pressures.of.keys()  # locked by another, or deleted
        return exchange

    async def _make_rows(self, pressing: Pressing) -> None:
        """In a transaction of its own: two that add one row wait for each other, and must have nothing else at hand."""
        missing = pressing.decided.union(pressing.news) - self._made_rows
        if missing:
            await self._run(lambda connection: make_rows(connection, self.tables, missing))
            self._made_rows |= missing

    @property
    def takes_async_callbacks(self) -> bool:
        return self._async_engine is not None

    async def settle_with(self, entry: Claimed, end: End, calls: Calls) -> bool:
        def calling(connection: Connection, session: Session) -> Calling:
            if not self._settle(connection, [(entry, end)]):
                return False
            return (yield from call_settled(connection, self._configuration, session, entry, end, calls))

        return await self._call(calling)

    def _settle(self, connection: Connection, settlements: Sequence[Ending], cutoff: datetime = NEVER) -> set[UUID]:
        settled: set[UUID] = self._sql.settle(connection, self.tables, settlements)
        ordered = [ending for ending in settlements if ending[0].position is not None and ending[0].id in settled]
        if ordered:
            leave(connection, self.tables, ordered, cutoff=cutoff)
        return settled

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        return await self._run(lambda connection: next_accepted(connection, self.tables, after))

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        def calling(connection: Connection, session: Session) -> Calling:
            return call_completed(connection, self._configuration, session, record_id, function)

        return await self._call(calling)

    async def _call(self, begin: Callable[[Connection, Session], Calling]) -> bool:
        """Call what `begin` tells, one after another in one transaction; returns what it returns."""
        if self._async_engine is not None:
            return await self._call_async(begin)

        def work(connection: Connection) -> bool:
            require_transaction(connection)
            with Session(connection, join_transaction_mode="rollback_only") as session:
                calling = begin(connection, session)
                while isinstance(call := _next(calling), Call):
                    call_at_once(session, connection, call)
                return call

        done: bool = await on_own_thread("outbox-callback", self._run_at_own_level, work)  # a user's: it may hang
        return done

    async def _call_async(self, begin: Callable[[Connection, Session], Calling]) -> bool:
        from sqlalchemy.ext.asyncio import AsyncSession  # an extra: whoever has an AsyncEngine has it

        engine: Any = self._async_engine
        async with engine.begin() as connection:
            await connection.run_sync(require_transaction)
            sync_connection: Connection = connection.sync_connection
            async with AsyncSession(connection, join_transaction_mode="rollback_only") as session:
                calling = begin(sync_connection, session.sync_session)
                while isinstance(call := await connection.run_sync(lambda _: _next(calling)), Call):
                    if not is_async(call.function):
                        await session.run_sync(call_at_once, sync_connection, call)
                        continue
                    with named_failures(call.failure):
                        await call.function(session, call.argument)
                        await session.flush()
                        await connection.run_sync(require_intact)
                return bool(call)

    async def destinations(self) -> list[str]:
        names = destination_names(self.tables)
        found = select(names.c.name).where(names.c.name.is_not(None))
        return await self._run(lambda connection: list(connection.execute(found).scalars()))

    async def seek(self, wanted: Wanted, quiescence: timedelta, after: UUID | None) -> UUID | None:
        return await self._run(lambda connection: seek(connection, self.tables, wanted, quiescence, after))

    async def watch(self, env: str, known: Mark | None) -> Watched:
        def work(connection: Connection) -> Watched:
            return sql_marks.watch(connection, self.tables, env, known, tells=self._tells)

        try:
            return await self._run(work)
        except DBAPIError as error:
            if not (self._tells and sql_marks.refuses(error)):
                raise
            log.warning("%s", UNTOLD)
            self._tells = False
            return await self._run(work)

    async def pressures(self) -> Pressures:
        return await self._run(lambda connection: read_pressures(connection, self.tables))

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        entry = self.tables.entry

        def work(connection: Connection) -> KeyFields:
            row = connection.execute(select(entry).where(entry.c.id == entry_id)).one()
            parent = ParentKey(row.parent, scope=row.scope, source=row.source)
            return key_fields(row.env, parent, row.operation, row.discriminator)

        return await self._run(work)

    async def gauges(self) -> dict[str, dict[str, int]]:
        queue = self.tables.queue

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
        entry, queue = self.tables.entry, self.tables.queue

        def work(connection: Connection) -> str | None:
            found = select(entry.c.kid).join(queue, queue.c.id == entry.c.id).where(entry.c.kid.not_in(known)).limit(1)
            kid: str | None = connection.execute(found).scalar_one_or_none()
            return kid

        return await self._run(work)

    async def foreign_env(self, env: str) -> str | None:
        entry, queue = self.tables.entry, self.tables.queue

        def work(connection: Connection) -> str | None:
            found = select(entry.c.env).join(queue, queue.c.id == entry.c.id).where(entry.c.env != env)
            found = found.where(queue.c.hold.is_(None)).limit(1)
            foreign: str | None = connection.execute(found).scalar_one_or_none()
            return foreign

        return await self._run(work)

    async def check(self) -> None:
        schema, prefix = self._configuration.schema, self._configuration.prefix
        await self._run(partial(migrations.check, schema=schema, prefix=prefix))

    async def close(self) -> None:
        """Close the pooled connections of the engine that was made here."""
        if self._is_ours:
            await self._on_thread(self._threads, self._engine.dispose)

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` in a transaction of its own, committed on return: for upkeep, which brings its own statements.

        At READ COMMITTED, whatever the engine's own level: at another, each claim that meets another process's would fail.
        """
        return await self._run(work, self._upkeep_thread)

    async def run_apart(self, work: Callable[[Connection], Result]) -> Result:
        """The same, for work that may wait for hours: it keeps no other upkeep waiting, nor the process from ending."""
        if self._async_engine is not None:
            return await self._run(work)
        done: Result = await on_own_thread("outbox-bodies", self._run_blocking, work)
        return done

    async def _run(self, work: Callable[[Connection], Result], threads: ThreadPoolExecutor | None = None) -> Result:
        if self._async_engine is not None:
            async with self._async_engine.connect() as connection:
                result: Result = await connection.run_sync(self._at_read_committed, work)
                return result
        on_thread: Result = await self._on_thread(threads or self._threads, self._run_blocking, work)
        return on_thread

    async def _on_thread(self, threads: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def _run_blocking(self, work: Callable[[Connection], Result]) -> Result:
        with self._engine.connect() as connection:
            return self._at_read_committed(connection, work)

    def _at_read_committed(self, connection: Connection, work: Callable[[Connection], Result]) -> Result:
        if self._is_at_read_committed is None:
            level: str = connection.execute(text("SHOW transaction_isolation")).scalar_one()
            connection.commit()  # at a rollback psycopg would forget what this connection has prepared
            self._is_at_read_committed = level == "read committed"
        if not self._is_at_read_committed:
            connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            return work(connection)

    def _run_at_own_level(self, work: Callable[[Connection], Result]) -> Result:
        with self._engine.begin() as connection:
            return work(connection)


def _next(calling: Calling) -> Call | bool:
    """What is to be called next, or what all of it has come to."""
    try:
        return next(calling)
    except StopIteration as end:
        done: bool = end.value
        return done


def _engine(target: Any) -> Engine:
    if isinstance(target, Engine):
        return target
    if not isinstance(target, str | URL):
        raise ConfigurationError(f"a dispatcher needs a URL, an Engine or an AsyncEngine, not {type(target).__name__}")
    try:
        url = make_url(target)
        is_async = url.get_dialect().is_async
    except (ArgumentError, NoSuchModuleError, ValueError):  # the text is not shown: there may be a password in it
        raise ConfigurationError(
            "a dispatcher needs a SQLAlchemy URL of a known driver, such as postgresql+psycopg://user@host/name (it is not"
            " shown)"
        ) from None
    if is_async:
        raise ConfigurationError(f"the driver of {url.drivername!r} is asynchronous: hand in create_async_engine(url)")
    return create_engine(url)
