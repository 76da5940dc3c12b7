"""Sends hints and counts of mismatched requests to PostgreSQL from a thread, over one connection of its own.

No commit waits for it.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID
from weakref import finalize, ref

from sqlalchemy import Connection, Engine, Pool, RootTransaction

from outbox.sql.connections.places import place_of
from outbox.sql.connections.separate_connections import (
    SharedConnection,
    break_off,
    separate_async_engine,
    separate_engine,
)
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import TIMEOUTS, sqlstate
from outbox.sql.postgresql.hint_messages import Hint, encode, merged, notify_sql
from outbox.sql.postgresql.mismatch_counts import CountTables, Mismatch, MismatchCounts, statements

log = logging.getLogger("outbox.hints")

THREAD_NAME = "outbox-hints"
APART_SECONDS = 0.02  # between two hints of a process
COUNT_SECONDS = 1.0  # between two transactions that store counts
IDLE_SECONDS = 300.0  # until the connection of an idle process is closed
RETRY_SECONDS = (1.0, 60.0)  # after a failure, doubling up to the second
HUNG_SECONDS = 5.0  # until a connection that does not answer is dropped
MAX_WAITING = 1000  # hints not yet looked at; more are dropped, as one is enough
MAX_COMMIT_SECONDS = 5.0  # how long the end of a transaction that is about to commit is waited for
COMMIT_POLL_SECONDS = 0.001


class Committing(NamedTuple):
    """The transaction that a hint is of, which is about to commit. then: called when it has, for the process's own."""

    transaction: RootTransaction
    then: Callable[[], object]


class _Wake(Enum):
    """Signals to the thread, in the queue of the hints."""

    COUNTED = 1
    STOPPED = 2


_Item: TypeAlias = tuple[str, Hint, Committing | None] | _Wake


class HintSender:
    """The hints of one engine's pool, and its counts. `send` and `count` return at once, and never fail.

    The thread begins with the first of them. `stop` may be called from a finalizer: it takes no lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._place = place_of(engine)
        self._link = _link(engine)
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._sent_at = 0.0
        self.used_at = time.monotonic()
        self._busy_since: float | None = None
        self._hints, self._counts = _Attempts(), _Attempts(apart=COUNT_SECONDS)
        self._counted = MismatchCounts()
        self._end = finalize(engine.pool, self.stop)
        self._end.atexit = False

    def send(self, channel: str, hint: Hint, *, taken: int | None, committing: Committing | None = None) -> None:
        """taken: the server process of the connection that has committed."""
        self._put((channel, hint, committing), taken)

    def count(self, mismatch: Mismatch, *, taken: int | None) -> None:
        """taken: the server process of the connection that has read the record."""
        is_first = self._counted.add(mismatch)
        self._put(_Wake.COUNTED if is_first else None, taken)

    def _put(self, item: _Item | None, taken: int | None) -> None:
        """None: what is waiting already wakes the thread."""
        self.used_at = time.monotonic()
        if taken is not None and not self._link.is_open:
            self._link.taken.add(taken)
        if item is not None and self._queue.qsize() < MAX_WAITING:
            self._queue.put(item)
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > HUNG_SECONDS:
            self._busy_since = None
            self._link.break_off()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = Thread(target=self._run, name=THREAD_NAME, daemon=True)
                    thread.start()  # if it fails, the next hint tries again
                    self._thread = thread

    def stop(self) -> None:
        """Send what waits, close the connection, and end."""
        self._queue.put(_Wake.STOPPED)

    def end_before_its_pool(self) -> None:
        """`stop`, and let nothing that lives as long as the pool keep this sender."""
        self._end.detach()
        self.stop()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    # --- on the thread

    def _run(self) -> None:
        is_stopped = False
        while not is_stopped:
            hints, is_stopped = self._gather()
            for channel, hint in hints.items():
                self._deliver(channel, hint)
            self._store_counts(at_once=is_stopped)
        self._link.close()

    def _gather(self) -> tuple[dict[str, Hint], bool]:
        """The hints to send now, one for each channel; and whether the sender was stopped."""
        try:
            taken = [self._queue.get(timeout=self._patience())]
        except Empty:
            if not self._counted:
                self._link.close()
            return {}, False
        time.sleep(max(0.0, self._sent_at + APART_SECONDS - time.monotonic()))
        while True:
            try:
                taken.append(self._queue.get_nowait())
            except Empty:
                break
        hints: dict[str, Hint] = {}
        for each in taken:
            if not isinstance(each, _Wake):
                channel, hint, committing = each
                if committing is not None:
                    _await_commit(committing)
                hints[channel] = _both(hints[channel], hint) if channel in hints else hint
        return hints, _Wake.STOPPED in taken

    def _patience(self) -> float | None:
        """How long to wait for a hint: until counts are due, or until the connection has rested."""
        if self._counted:
            return max(0.0, self._counts.again_at - time.monotonic())
        return IDLE_SECONDS if self._link.is_open else None

    def _deliver(self, channel: str, hint: Hint) -> None:
        if time.monotonic() < self._hints.again_at:
            return
        try:
            self._execute([notify_sql(channel, encode(hint))])
        except Exception as error:
            if self._hints.failed(error):
                log.warning(
                    "cannot send hints to the dispatchers of the database %s (%s): they find entries by polling; this"
                    " process tries again",
                    self._place,
                    type(error).__name__,
                )
            return
        self._sent_at = time.monotonic()
        if self._hints.succeeded():
            log.warning("hints to the dispatchers of the database %s can be sent again", self._place)

    def _store_counts(self, *, at_once: bool) -> None:
        if self._counted and (at_once or time.monotonic() >= self._counts.again_at):
            failure = self._store_all(self._counted.take())
            if failure is None:
                if self._counts.succeeded():
                    log.warning("mismatched requests in the database %s can be counted again", self._place)
            elif self._counts.failed(failure):
                log.warning(
                    "cannot count mismatched requests in the database %s (%s): this process tries again",
                    self._place,
                    type(failure).__name__,
                )
        if math.isinf(self._counts.again_at):  # they will never be stored
            self._counted.take()

    def _store_all(self, waiting: dict[CountTables, Counter[UUID]]) -> Exception | None:
        """Store each schema's counts in a transaction. If one fails, its counts are kept, and the others are stored.

        Returns a failure.
        """
        failure = None
        while waiting and (failure is None or sqlstate(failure) is not None):  # else the server is out of reach
            tables, counts = waiting.popitem()
            try:
                self._execute([*statements(tables, counts)])
            except Exception as error:
                failure = error
                self._counted.give_back(tables, counts)
        for tables, counts in waiting.items():
            self._counted.give_back(tables, counts)
        return failure

    def _execute(self, statements: Sequence[str]) -> None:
        """Try twice over a connection that was open: it may have been closed long ago. But not after a timeout: hints wait."""
        if self._link.is_open:
            try:
                return self._execute_once(statements)
            except Exception as error:
                if sqlstate(error) in TIMEOUTS:
                    raise
        return self._execute_once(statements)

    def _execute_once(self, statements: Sequence[str]) -> None:
        self._busy_since = time.monotonic()
        try:
            self._link.execute(statements)
        except BaseException:
            self._link.close()
            raise
        finally:
            self._busy_since = None


class _Attempts:
    """When to try next, after failures. apart: the seconds between two successes."""

    def __init__(self, apart: float = 0.0) -> None:
        self.again_at = 0.0
        self._apart = apart
        self._failures = 0

    def failed(self, error: Exception) -> bool:
        """Returns whether to log it: the first of several in a row. After a shared connection there is no next time, nor without
        the engine: the thread ends, and the engine's next commit starts another one.
        """
        first, most = RETRY_SECONDS
        delay = min(first * 2 ** min(self._failures, 10), most)
        is_last = isinstance(error, SharedConnection | EngineGone)
        self.again_at = math.inf if is_last else time.monotonic() + delay
        self._failures += 1
        return self._failures == 1 and not isinstance(error, EngineGone)

    def succeeded(self) -> bool:
        """Returns whether attempts had failed before this one."""
        had_failed, self._failures = self._failures > 0, 0
        self.again_at = time.monotonic() + self._apart if self._apart else 0.0
        return had_failed


def _both(one: Hint, other: Hint) -> Hint:
    """One hint for both. It names a woken process only if both do."""
    woken = one.woken if one.woken == other.woken else None
    return Hint(merged(one.due, other.due), woken)


def _await_commit(committing: Committing) -> None:
    """SQLAlchemy announces a commit just before it. What a hint finds before its end is nothing.

    The connection may have begun another transaction by now: that one is not waited for.
    """
    deadline = time.monotonic() + MAX_COMMIT_SECONDS
    while committing.transaction.is_active and time.monotonic() < deadline:
        time.sleep(COMMIT_POLL_SECONDS)
    committing.then()


# --- the connection


class EngineGone(Exception):
    """The engine was disposed of, or no longer exists."""


class _Link:
    """One connection, opened when it is needed. All but `break_off` is called on the sender's thread.

    It is the driver's alone: what SQLAlchemy keeps of a pool leads to the engine, which could never go.
    """

    def __init__(self, engine: Engine) -> None:
        self.taken: set[int] = (
            set()
        )  # until it opens: the server may give the number of one that has ended to a later one
        self._url, self._pool = engine.url, ref(engine.pool)
        self._driver: Any = None

    @property
    def is_open(self) -> bool:
        return self._driver is not None

    def execute(self, statements: Sequence[str]) -> None:
        """Statements without parameters, in autocommit mode."""
        if self._driver is None:
            engine = separate_engine(self._url, self._new_pool(), taken=self.taken)
            self._driver = _detached(engine.connect())
            self.taken.clear()
        cursor = self._driver.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()

    def _new_pool(self) -> Pool:
        pool = self._pool()
        if pool is None:
            raise EngineGone("the engine no longer exists")
        return pool.recreate()

    def break_off(self) -> None:
        break_off(self._driver)

    def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            _quietly(driver.close)


class _AsyncLink(_Link):
    """The connection of an async driver, on an event loop of the sender's thread. It gives up by itself."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._runner: asyncio.Runner | None = None

    def execute(self, statements: Sequence[str]) -> None:
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(self._execute(statements))

    async def _execute(self, statements: Sequence[str]) -> None:
        async with asyncio.timeout(HUNG_SECONDS):
            if self._driver is None:
                engine = separate_async_engine(self._url, self._new_pool(), taken=self.taken)
                self._driver = await (await engine.connect()).run_sync(_detached)
                self.taken.clear()
            for statement in statements:
                await self._driver.execute(statement)

    def break_off(self) -> None:
        pass

    def close(self) -> None:
        driver, self._driver = self._driver, None
        runner, self._runner = self._runner, None
        if driver is not None and runner is not None:
            _quietly(lambda: runner.run(_close(driver)))
        if runner is not None:
            _quietly(runner.close)


class _NoLink(_Link):
    """SQLite has no notifications: only dispatchers of this process are woken, directly."""

    def execute(self, statements: Sequence[str]) -> None:
        pass


def _detached(connection: Connection) -> Any:
    """The driver's connection, in autocommit mode, which is no longer SQLAlchemy's."""
    connection.execution_options(isolation_level="AUTOCOMMIT")
    driver = connection.connection.driver_connection
    connection.detach()
    return driver


async def _close(driver: Any) -> None:
    async with asyncio.timeout(HUNG_SECONDS):
        await driver.close()


def _link(engine: Engine) -> _Link:
    if not dialect_of(engine).has_notify:
        return _NoLink(engine)
    return (_AsyncLink if engine.dialect.is_async else _Link)(engine)


def _quietly(work: Callable[[], object]) -> None:
    """Do the work and ignore its errors: it closes a connection that may be broken."""
    try:
        work()
    except Exception as error:
        log.debug("closing the connection of the hints: %s", type(error).__name__)
