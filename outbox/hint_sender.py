"""Sends hints to PostgreSQL from a thread, over one connection of its own: no commit waits for it."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple
from weakref import ref

from sqlalchemy import Connection, Engine, Pool, RootTransaction

from outbox.sql.hint_messages import Hint, encode, merged, notify_sql
from outbox.sql.places import place_of
from outbox.sql.separate_connections import SharedConnection, break_off, separate_async_engine, separate_engine

log = logging.getLogger("outbox.hints")

APART_SECONDS = 0.02  # between two hints of a process
IDLE_SECONDS = 300.0  # until the connection of an idle process is closed
RETRY_SECONDS = (1.0, 60.0)  # after a failure, doubling up to the second
HUNG_SECONDS = 5.0  # until a connection that does not answer is dropped
WAITING_MAX = 1000  # hints not yet looked at; more are dropped, as one is enough
COMMIT_SECONDS_MAX = 5.0  # how long the end of a transaction that is about to commit is waited for
COMMIT_POLL_SECONDS = 0.001


class Committing(NamedTuple):
    """The transaction that a hint is of, which is about to commit. then: called when it has, for the process's own."""

    transaction: RootTransaction
    then: Callable[[], object]


class HintSender:
    """The hints of one engine's pool. `send` returns at once, and never fails.

    The thread begins with the first hint. `stop` may be called from a finalizer: it takes no lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._place = place_of(engine)
        self._link = _link(engine)
        self._queue: SimpleQueue[tuple[str, Hint, Committing | None] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._sent_at = self._again_at = 0.0
        self.used_at = time.monotonic()
        self._busy_since: float | None = None
        self._failures = 0

    def send(self, channel: str, hint: Hint, *, taken: int | None, committing: Committing | None = None) -> None:
        """taken: the server process of the connection that has committed."""
        self.used_at = time.monotonic()
        if taken is not None and not self._link.is_open:
            self._link.taken.add(taken)
        if self._queue.qsize() < WAITING_MAX:
            self._queue.put((channel, hint, committing))
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > HUNG_SECONDS:
            self._busy_since = None
            self._link.break_off()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = Thread(target=self._run, name="outbox-hints", daemon=True)
                    thread.start()  # if it fails, the next hint tries again
                    self._thread = thread

    def stop(self) -> None:
        """Send what waits, close the connection, and end."""
        self._queue.put(None)

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
        self._link.close()

    def _gather(self) -> tuple[dict[str, Hint], bool]:
        """The hints to send now, one for each channel; and whether the sender was stopped."""
        try:
            taken = [self._queue.get(timeout=IDLE_SECONDS if self._link.is_open else None)]
        except Empty:
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
            if each is not None:
                channel, hint, committing = each
                if committing is not None:
                    _await_commit(committing)
                hints[channel] = _both(hints[channel], hint) if channel in hints else hint
        return hints, None in taken

    def _deliver(self, channel: str, hint: Hint) -> None:
        if time.monotonic() < self._again_at:
            return
        payload = encode(hint)
        was_open = self._link.is_open
        try:
            self._notify(channel, payload)
        except Exception as error:
            if not was_open:
                self._failed(error)
                return
            try:  # the connection may have been closed long ago
                self._notify(channel, payload)
            except Exception as again:
                self._failed(again)

    def _notify(self, channel: str, payload: str) -> None:
        self._busy_since = time.monotonic()
        try:
            self._link.notify(channel, payload)
        except BaseException:
            self._link.close()
            raise
        finally:
            self._busy_since = None
        self._sent_at = time.monotonic()
        if self._failures:
            self._failures = 0
            log.warning("hints to the dispatchers of the database %s can be sent again", self._place)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, EngineGone):  # the thread ends, and the engine's next commit starts another one
            return
        first, most = RETRY_SECONDS
        delay = min(first * 2 ** min(self._failures, 10), most)
        self._again_at = math.inf if isinstance(error, SharedConnection) else time.monotonic() + delay
        self._failures += 1
        if self._failures == 1:
            log.warning(
                "cannot send hints to the dispatchers of the database %s (%s): they find entries by polling; this process"
                " tries again",
                self._place,
                type(error).__name__,
            )


def _both(one: Hint, other: Hint) -> Hint:
    """One hint for both. It names a woken process only if both do."""
    woken = one.woken if one.woken == other.woken else None
    return Hint(merged(one.due, other.due), woken)


def _await_commit(committing: Committing) -> None:
    """SQLAlchemy announces a commit just before it. What a hint finds before its end is nothing.

    The connection may have begun another transaction by now: that one is not waited for.
    """
    deadline = time.monotonic() + COMMIT_SECONDS_MAX
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
        self.taken: set[int] = set()
        self._url, self._pool = engine.url, ref(engine.pool)
        self._driver: Any = None

    @property
    def is_open(self) -> bool:
        return self._driver is not None

    def notify(self, channel: str, payload: str) -> None:
        if self._driver is None:
            engine = separate_engine(self._url, self._new_pool(), taken=self.taken)
            self._driver = _detached(engine.connect())
        cursor = self._driver.cursor()
        cursor.execute(notify_sql(channel, payload))
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

    def notify(self, channel: str, payload: str) -> None:
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(self._notify(channel, payload))

    async def _notify(self, channel: str, payload: str) -> None:
        async with asyncio.timeout(HUNG_SECONDS):
            if self._driver is None:
                engine = separate_async_engine(self._url, self._new_pool(), taken=self.taken)
                self._driver = await (await engine.connect()).run_sync(_detached)
            await self._driver.execute(notify_sql(channel, payload))

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

    def notify(self, channel: str, payload: str) -> None:
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
    if engine.dialect.name != "postgresql":
        return _NoLink(engine)
    return (_AsyncLink if engine.dialect.is_async else _Link)(engine)


def _quietly(work: Callable[[], object]) -> None:
    """What comes of closing a connection that may be broken is of no interest."""
    try:
        work()
    except Exception as error:
        log.debug("closing the connection of the hints: %s", type(error).__name__)
