"""Runs each piece of work of the store in a transaction of its own. No wait is without a limit."""

import asyncio
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from dispatchers.store.connections.guards import guard, guards_for, limit_portable
from dispatchers.store.connections.watchdog import Silence, Timeouts, Working
from dispatchers.store.queue.row_errors import is_conflict, is_of_stale_plan
from dispatchers.threads import Threads, on_own_thread
from outbox.errors import ConfigurationError
from outbox.sql.connections.requirements import require_utf8, write_iso_dates
from outbox.sql.connections.separate_connections import separate_async_engine
from outbox.sql.connections.transactions import autocommit, is_idle, is_in_autocommit
from outbox.sql.dialect import dialect_of

Result = TypeVar("Result")
Transact: TypeAlias = Callable[[Connection, Silence | None, Callable[[Connection], Any]], Any]

STORE_THREADS = 2  # exchanges that run at the same time
MAINTENANCE = "maintenance"
CONFLICTED = "sqlalchemy-outbox conflicted"
"""The key in a connection's `info` for whether its transaction repeats one that the server ended for another's sake."""

CONFLICT_TRIES = 30  # with 10, three dispatchers that compete for ordering groups gave up
DEADLOCK_TRIES = 5  # at READ COMMITTED, where a transaction without its rival mostly commits at once
MAX_FIRST_PAUSE_SECONDS = 0.05  # each next pause is twice as long at most
MAX_CONFLICT_PAUSE_SECONDS = 0.5


class Transactions:
    """Runs work at READ COMMITTED, even if the engine has another isolation level: at that level, concurrent claims would fail.
    In the portable mode it runs work at SERIALIZABLE, again after each conflict.

    Work has its own threads, so that a hanging send does not delay it. With an AsyncEngine it runs on the event loop.
    """

    def __init__(self, engine: Engine, async_engine: Any, lease: timedelta) -> None:
        self.guards = guards_for(lease)
        self._engine = engine
        self._async_engine = async_engine
        self._threads = Threads(STORE_THREADS, "outbox-store")
        self._maintenance_thread = Threads(1, "outbox-maintenance")
        self._dialect = dialect_of(engine)
        self._transact = self._in_portable_transactions if self._dialect.repeats_conflicts else self._at_read_committed
        # SQLite always answers: a locked file is an error.
        self._is_watched = self._dialect.is_watched
        self._timeouts = Timeouts(lease)
        # None: not read yet. It is read once, because setting the level for each transaction would fail if an event listener of
        # the app has left a transaction open.
        self._is_at_read_committed = True if self._dialect.isolation is None else None
        self._process: int | None = None

    async def run(self, work: Callable[[Connection], Result], what: str = "") -> Result:
        """Run `work` in a transaction of its own, which is committed on return. what: the name of the work, for the log.

        Raises what the database raises, and `DatabaseSilent` if the work does not end when its connection is dropped.
        """

        def guarded(connection: Connection) -> Result:
            guard(connection, self.guards)
            return work(connection)

        return await self.run_unguarded(guarded, what)

    async def run_unguarded(
        self, work: Callable[[Connection], Result], what: str = "", *, is_one_statement: bool = False
    ) -> Result:
        """Run `work`, whose first statement must set the guards.

        is_one_statement: whether `work` executes no other statement, whatever its result, so that PostgreSQL needs no BEGIN and
        no COMMIT. It saves two round trips.
        """
        self._require_own_process()
        silence = Silence(self._engine, self._timeouts, what or "a query")
        working: Working
        given_up: Callable[[], None]
        transact = self._transact
        if is_one_statement and self._is_at_read_committed:
            transact = self._in_autocommit
        if self._async_engine is not None:
            working, given_up = asyncio.ensure_future(self._run_async(silence, work, transact)), _do_nothing
        else:
            threads = self._maintenance_thread if what == MAINTENANCE else self._threads
            submitted = threads.submit(self._run_blocking, silence, work, transact)
            working, given_up = submitted, partial(threads.give_up, submitted)
        if self._is_watched:
            result: Result = await silence.wait(working, given_up)
        else:
            result = await (asyncio.wrap_future(working) if isinstance(working, Future) else working)
        return result

    async def run_apart(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` without limits on a thread of its own. It may wait for hours, but blocks neither other work nor shutdown."""
        self._require_own_process()
        if self._async_engine is not None:
            return await self._run_async(None, work, self._transact)
        done: Result = await on_own_thread("outbox-bodies", self._run_blocking, None, work, self._transact)
        return done

    def _require_own_process(self) -> None:
        """Raise `ConfigurationError` in a fork of the process in which it has worked: a fork does not have its threads."""
        self._process = self._process or os.getpid()
        if self._process != os.getpid():
            raise ConfigurationError(
                f"this dispatcher has worked in process {self._process}, and cannot work in its fork, process {os.getpid()}:"
                " create a Dispatcher in each process, after the fork (docs/process-models.md)"
            )

    def run_blocking(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` on the calling thread, which is not the event loop's, on a connection that is no other thread's."""
        if self._async_engine is None:
            return self._run_blocking(None, work, self._transact)

        async def run() -> Result:
            pool = self._async_engine.sync_engine.pool.recreate()
            engine = separate_async_engine(self._async_engine.url, pool)
            try:
                async with engine.connect() as connection:
                    result: Result = await connection.run_sync(self._transact, None, work)
                    return result
            finally:
                await engine.dispose()

        return asyncio.run(run())

    async def close(self, *, dispose: bool) -> None:
        """dispose: whether to dispose of the engine, because the store has created it."""
        if dispose:
            await asyncio.wrap_future(self._threads.submit(self._engine.dispose))
        self._threads.close()
        self._maintenance_thread.close()

    async def _run_async(
        self, silence: Silence | None, work: Callable[[Connection], Result], transact: Transact
    ) -> Result:
        async with self._async_engine.connect() as connection:
            result: Result = await connection.run_sync(transact, silence, work)
            return result

    def _run_blocking(
        self, silence: Silence | None, work: Callable[[Connection], Result], transact: Transact
    ) -> Result:
        with self._engine.connect() as connection:
            result: Result = transact(connection, silence, work)
            return result

    def _in_autocommit(
        self, connection: Connection, silence: Silence | None, work: Callable[[Connection], Result]
    ) -> Result:
        """Run `work`, which executes one statement, in autocommit; in a transaction if a listener of the app has begun one."""
        if not is_idle(connection):
            return self._at_read_committed(connection, silence, work)
        if silence is not None:
            silence.begin(connection.connection.driver_connection)
        require_utf8(connection)
        try:
            with autocommit(connection):
                return work(connection)
        except DBAPIError as error:
            if not is_of_stale_plan(error):
                raise
        return self._at_read_committed(
            connection, silence, work
        )  # its rollback makes the driver prepare its statements again

    def _at_read_committed(
        self, connection: Connection, silence: Silence | None, work: Callable[[Connection], Result]
    ) -> Result:
        if silence is not None:
            silence.begin(connection.connection.driver_connection)
        if self._is_at_read_committed is None:
            level = self._dialect.isolation_level(connection)
            connection.commit()  # after a rollback psycopg would prepare all statements again
            self._is_at_read_committed = level == "READ COMMITTED" and not is_in_autocommit(connection)
        if not self._is_at_read_committed:
            connection.execution_options(isolation_level="READ COMMITTED")
        return _despite_deadlocks(connection, work)

    def _in_portable_transactions(
        self, connection: Connection, silence: Silence | None, work: Callable[[Connection], Result]
    ) -> Result:
        """Run `work` at SERIALIZABLE, in one transaction after another until the server does not prefer a concurrent one.

        It gives up before the watchdog would take the server, which answers each time, for silent.

        The server makes the pauses, so that an event loop under the connection is not blocked. Their lengths are random, or two
        transactions that conflict would meet again.
        """
        if silence is not None:
            silence.begin(connection.connection.driver_connection)
        connection.execution_options(isolation_level="SERIALIZABLE")

        def limited(connection: Connection) -> Result:
            limit_portable(connection, self.guards)
            return work(connection)

        paused = 0.0
        for attempt in range(CONFLICT_TRIES):
            connection.info[CONFLICTED] = attempt > 0
            try:
                return _in_transaction(connection, limited)
            except DBAPIError as error:
                if not is_conflict(error) or attempt == CONFLICT_TRIES - 1 or paused > self._timeouts.report / 2:
                    raise
            with connection.begin():
                pause = min(MAX_CONFLICT_PAUSE_SECONDS, MAX_FIRST_PAUSE_SECONDS * 2**attempt)
                seconds = random.uniform(0, pause)
                connection.execute(_PAUSE, {"seconds": seconds})
            paused += seconds
        raise AssertionError("the last attempt has returned or raised")


def _do_nothing() -> None:
    """A task on the event loop needs no thread."""


def _in_transaction(connection: Connection, work: Callable[[Connection], Result]) -> Result:
    try:
        return _in_one_transaction(connection, work)
    except DBAPIError as error:
        if not is_of_stale_plan(error):
            raise
    return _in_one_transaction(connection, work)  # the rollback has made the driver prepare its statements again


def _despite_deadlocks(connection: Connection, work: Callable[[Connection], Result]) -> Result:
    """Run `work` again if the server has rolled its transaction back for another's sake: nothing of it was committed."""
    for _ in range(DEADLOCK_TRIES - 1):
        try:
            return _in_transaction(connection, work)
        except DBAPIError as error:
            if not is_conflict(error):
                raise
    return _in_transaction(connection, work)


def _in_one_transaction(connection: Connection, work: Callable[[Connection], Result]) -> Result:
    with connection.begin():
        require_utf8(connection)
        write_iso_dates(connection)
        return work(connection)


_PAUSE = text("SELECT pg_sleep(:seconds)")
