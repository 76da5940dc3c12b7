"""The transactions in which the app's callbacks run: on a thread or on the event loop, each callback with a deadline.

The dispatcher gives up a callback that is overdue. It cancels an async one; a sync one keeps its thread until it returns. In
both cases the server ends the transaction, so that it keeps no locks, occupies no worker, and does not hinder vacuum.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar, cast

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from dispatchers.callbacks import AppTransactions, CallbackOverdue
from dispatchers.store.app_code.callback_plan import Call, Calling, call_at_once, named_failures
from dispatchers.store.app_code.own_transaction import begin as begin_own
from dispatchers.store.app_code.own_transaction import discard_ended, guarded, require_intact
from dispatchers.store.connections.guards import Guards
from dispatchers.threads import is_async, on_own_thread
from outbox.errors import ConfigurationError
from outbox.sessions.session import flush_all, hint_after_commit
from outbox.sql.connections.requirements import write_iso_dates
from outbox.sql.connections.transactions import require_transaction
from outbox.sql.dialect import dialect_of

log = logging.getLogger("outbox.dispatcher")

Result = TypeVar("Result")

CALLBACK_TIMEOUT = timedelta(seconds=30)
MAX_FRAMES = 8  # frames of a hanging callback that the log shows, from its own function on
ABANDON_SECONDS = 1.0  # how long an async callback may take to notice that it was cancelled


class Backend(NamedTuple):
    """A transaction as other PostgreSQL sessions identify it."""

    pid: int
    began: datetime


class Run:
    """One such transaction. Two threads use it: one runs the callback, the other waits for the deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()
        self.backend: Backend | None = None
        self.call: Call | None = None
        self._lock = threading.Lock()
        self._began = 0.0
        self._thread = 0
        self._connection: Connection | None = None
        self._is_given_up = False

    @contextlib.contextmanager
    def calling(self, connection: Connection, call: Call) -> Iterator[None]:
        """Measure the call in the block. If the call was given up, or the server ended it at the same limit, raise `call.failure`
        at the end of the block, so that nothing commits.
        """
        with self._lock:
            self.call, self._connection, self._thread = call, connection, threading.get_ident()
            self._began = time.monotonic()
        try:
            yield
        except Exception:
            if time.monotonic() >= self._began + self.seconds:
                self._is_given_up = True
            raise
        finally:
            with self._lock:
                self._connection = None
                if self._is_given_up:
                    raise self.overdue()

    def seconds_left(self) -> float:
        """Until the running callback is overdue; between two callbacks a whole timeout."""
        with self._lock:
            if self._connection is None:
                return self.seconds
            return max(0.0, self._began + self.seconds - time.monotonic())

    def give_up(self) -> bool:
        """Give up the running callback if it is overdue; returns whether it did."""
        with self._lock:
            if self._connection is None or time.monotonic() < self._began + self.seconds:
                return False
            self._is_given_up = True
            return True

    def detach(self) -> Any:
        """Take the connection of a running callback out of its pool. The pool can then open another one."""
        with self._lock:
            if self._connection is None:
                return None
            pooled = self._connection.connection
            raw = pooled.dbapi_connection
            pooled.detach()
            return raw

    def overdue(self, place: str = "") -> Exception:
        """The exception for a callback that was given up."""
        call = cast(Call, self.call)
        error = call.failure()
        error.__cause__ = CallbackOverdue(self.seconds, getattr(call.function, "__qualname__", "it"), place)
        return error

    def place(self) -> str:
        """Where the callback's thread is now: files, lines and names, but no values."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        first = next((n for n, each in enumerate(stack, 1) if each.name == call_at_once.__name__), 0)
        return "; it hangs at\n" + "".join(traceback.format_list(stack[first : first + MAX_FRAMES])).rstrip()


class CallbackTransactions:
    """Runs callbacks in transactions at the engine's own isolation level.

    timeout: how long a callback may take. schema: of our tables. run: runs work in another transaction. app: has the transactions
    instead of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        async_engine: Any,
        timeout: timedelta,
        *,
        schema: str | None,
        run: Callable[[Callable[[Connection], Any]], Awaitable[Any]],
        app: AppTransactions | None = None,
    ) -> None:
        self._engine = engine
        self._async_engine: Any = async_engine if app is None else None
        self._timeout = timeout
        self._schema = schema
        self._run = run
        self._app = app
        self._begun = self._on_own_engine if app is None else app.begin
        self._database: Any = None  # what identifies the store's database, once it was compared with the app's
        limits = Guards(statement=timeout, silence=timeout)  # no lock_timeout: the app decides how long it waits
        self._begin = text(f"SELECT pg_backend_pid(), now(), {limits.sql}")

    async def run(self, begin: Callable[[Connection, Session], Calling]) -> bool:
        """Call the functions that `begin` yields, one after another in one transaction; returns its result.

        If the outbox cannot write at the engine's level, it is at READ COMMITTED. Raises `CallbackFailed`, and what the database
        raises.
        """
        await self.require_same_database()
        run = Run(self._timeout)
        if self._async_engine is not None:
            return await self._finish(run, asyncio.ensure_future(self._run_async(run, begin)))
        # A thread of its own, because the app's function may hang.
        working = on_own_thread("outbox-callback", self._run_on_thread, run, begin)
        return await self._finish(run, asyncio.ensure_future(working))

    async def _finish(self, run: Run, working: "asyncio.Future[bool]") -> bool:
        try:
            while not working.done():
                await asyncio.wait([working], timeout=run.seconds_left())
                if not working.done() and run.give_up():
                    await self._give_up(run, working)
        except asyncio.CancelledError:
            working.cancel()
            if self._async_engine is not None:
                await asyncio.wait([working], timeout=ABANDON_SECONDS)
            raise
        return working.result()

    async def _give_up(self, run: Run, working: "asyncio.Future[bool]") -> None:
        overdue = run.overdue(run.place() if self._async_engine is None else "")
        if self._async_engine is not None:
            working.cancel()
            await asyncio.wait([working], timeout=ABANDON_SECONDS)
        if not working.done():
            await self._end(run)
            working.cancel()
        elif not working.cancelled():
            working.exception()  # `overdue` replaces it
        raise overdue

    async def _end(self, run: Run) -> None:
        try:
            raw = run.detach()
            backend = run.backend
            if backend is not None:
                await self._run(lambda other: other.execute(_TERMINATE, backend._asdict()))
            elif raw is not None:
                await on_own_thread("outbox-callback-end", raw.close)
        except Exception as error:  # then the server's limits end the transaction
            log.warning(
                "cannot end the transaction of a callback that timed out: %s; the server's time limits end it",
                type(error).__name__,
            )

    def _run_on_thread(self, run: Run, begin: Callable[[Connection, Session], Calling]) -> bool:
        call_function = None if self._app is None else self._app.call
        with self._begun() as (connection, session):
            run.backend = self._prepare(connection)
            calling = begin(connection, session)
            while isinstance(call := _next(calling), Call):
                with run.calling(connection, call):
                    call_at_once(session, connection, call, call_function)
            return call

    @contextlib.contextmanager
    def _on_own_engine(self) -> Iterator[tuple[Connection, Session]]:
        with self._engine.connect() as connection:
            dialect_of(connection).set_usable_level(connection)
            try:
                with connection.begin(), Session(connection, join_transaction_mode="rollback_only") as session:
                    yield connection, session
            finally:
                discard_ended(connection)

    async def require_same_database(self) -> None:
        """Raise `ConfigurationError` if the app's transactions are in another database than the outbox. Compared once."""
        if self._app is None or self._database is not None:
            return
        database = await self._run(_identify)
        of_app = await on_own_thread("outbox-callback", self._identify_app)
        if database != of_app:
            raise ConfigurationError(
                "callback_transactions is on another database than the dispatcher: let Django's database and the dispatcher's URL"
                " name one server and one database"
            )
        self._database = database

    def _identify_app(self) -> Any:
        with self._begun() as (connection, _):
            require_transaction(connection, self._schema)
            return _identify(connection)

    async def _run_async(self, run: Run, begin: Callable[[Connection, Session], Calling]) -> bool:
        async with self._async_engine.connect() as connection:
            await connection.run_sync(lambda sync: dialect_of(sync).set_usable_level(sync))
            try:
                async with connection.begin():
                    return await self._call_async(run, connection, begin)
            finally:
                await connection.run_sync(discard_ended)

    async def _call_async(self, run: Run, connection: Any, begin: Callable[[Connection, Session], Calling]) -> bool:
        from sqlalchemy.ext.asyncio import AsyncSession  # an extra that every AsyncEngine needs

        run.backend = await connection.run_sync(self._prepare)
        sync_connection: Connection = connection.sync_connection
        async with AsyncSession(connection, join_transaction_mode="rollback_only") as session:
            calling = begin(sync_connection, session.sync_session)
            while isinstance(call := await connection.run_sync(lambda _: _next(calling)), Call):
                with run.calling(sync_connection, call):
                    if not is_async(call.function):
                        await session.run_sync(call_at_once, sync_connection, call)
                        continue
                    with named_failures(sync_connection, call.failure):
                        await connection.run_sync(begin_own)
                        await session.connection()  # as in `call_at_once`
                        with guarded(sync_connection):
                            await call.function(session, call.argument)
                            await session.run_sync(flush_all)
                        await connection.run_sync(require_intact)
                        await session.run_sync(hint_after_commit)
            return bool(call)

    def _prepare(self, connection: Connection) -> Backend | None:
        """Set the server's limits: they end the transaction if this process cannot do it any more."""
        require_transaction(connection, self._schema)
        if not dialect_of(connection).has_limits:
            return None
        write_iso_dates(connection)
        return Backend._make(connection.execute(self._begin).one()[:2])


def _next(calling: Calling) -> Call | bool:
    try:
        return next(calling)
    except StopIteration as end:
        return bool(end.value)


def _identify(connection: Connection) -> Any:
    return tuple(connection.execute(_DATABASE).one())


_DATABASE = text("SELECT pg_postmaster_start_time(), (SELECT oid FROM pg_database WHERE datname = current_database())")
"""Every role may ask for it. No two servers started in the same microsecond."""

_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND xact_start = CAST(:began AS timestamptz)"
)
"""Compares the transaction's start, because with a pooler the session may serve another client by now."""
