"""Ends the wait for a database that does not answer, for example because a proxy has dropped the connection silently.

Such a wait would never end: the proxy still acknowledges the data, so TCP does not detect the loss.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import ConnectionPoolEntry, Pool

from dispatchers.store.connections.guards import limiting
from outbox.sql.connections.separate_connections import break_off

log = logging.getLogger("outbox.dispatcher")

MAX_REPORT_SECONDS = 10.0
MAX_GIVE_UP_SECONDS = 3.0
LATE_SECONDS = 0.1  # an event loop that calls a timer later than this was blocked
MAX_PART_SECONDS = 0.5  # a longer wait has several timers, each of which shows whether the event loop was blocked
MOMENT_SECONDS = 0.5  # after a block, to read what has arrived


class DatabaseSilent(TimeoutError):
    """The database did not answer, and the work did not end when its connection was dropped."""


Working: TypeAlias = "asyncio.Future[Any] | Future[Any]"
Step: TypeAlias = tuple[float, Callable[[], None]]
"""Seconds after the step before, and what to call then."""


class Timeouts:
    """When to log that the database is silent, when to drop the connection, and when to give up; all within half a lease."""

    def __init__(self, lease: timedelta) -> None:
        seconds = limiting(lease).total_seconds()
        self.report = min(MAX_REPORT_SECONDS, 0.2 * seconds)
        self.drop = 0.4 * seconds
        self.give_up = self.drop + min(MAX_GIVE_UP_SECONDS, 0.05 * seconds)


class Silence:
    """Watches one piece of work of a store. what: the name of the work, for the log."""

    def __init__(self, engine: Engine, timeouts: Timeouts, what: str) -> None:
        self._connection: Any = None
        self._is_given_up = False
        self._engine = engine
        self._timeouts = timeouts
        self._what = what

    def begin(self, connection: Any) -> None:
        """Note the driver's connection with which the work begins. Raises `DatabaseSilent` if the wait was given up before: a
        late claim would lease entries that no dispatcher sends.
        """
        self._connection = connection
        if self._is_given_up:
            raise DatabaseSilent("the database answered after this process had stopped waiting")

    async def wait(self, working: "Working", given_up: Callable[[], None]) -> Any:
        """The result of `working`, a task or the future of a thread. Raises `DatabaseSilent` if the work does not end after its
        connection was dropped.

        given_up: called when the wait is given up.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if isinstance(working, Future):  # `asyncio.wrap_future` would take one more turn of the event loop
            working.add_done_callback(partial(_pass_to_loop, loop, answer))
        else:
            working.add_done_callback(partial(_pass_on, answer))
        limits = self._timeouts
        steps: list[Step] = [
            (limits.report, self._report),
            (limits.drop - limits.report, self._drop),
            (limits.give_up - limits.drop, partial(self._give_up, answer, given_up)),
        ]
        timer = _Timer(loop, steps)
        try:
            return await answer
        except asyncio.CancelledError:
            working.cancel()
            raise
        finally:
            timer.cancel()

    def _report(self) -> None:
        log.warning(
            "the database has not answered for %g s (%s); after %g s this process drops the connection and retries on another",
            self._timeouts.report,
            self._what,
            self._timeouts.drop,
        )

    def _drop(self) -> None:
        """Drop the work's connection. Without one the work waits for the pool, which may be testing a dead idle connection."""
        if self._connection is not None:
            dropped = int(break_off(self._connection))
        else:
            dropped = sum([break_off(connection) for connection in idle_connections(self._engine)])
        log.warning(
            "the database has not answered for %g s (%s): dropped %d connections; this process retries on another",
            self._timeouts.drop,
            self._what,
            dropped,
        )

    def _give_up(self, answer: "asyncio.Future[Any]", given_up: Callable[[], None]) -> None:
        if not answer.done():
            self._is_given_up = True
            if self._connection is not None:  # it may have come after `_drop`
                break_off(self._connection)
            given_up()
            answer.set_exception(DatabaseSilent(f"the database has not answered for {self._timeouts.give_up:g} s"))


class _Timer:
    """Calls one function after the other, each after some seconds in which the event loop was not blocked.

    After a block the event loop gets a moment to read the answer, which may have arrived meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: Sequence[Step]) -> None:
        self._loop = loop
        self._steps = steps
        self._set(steps[0][0])

    def _set(self, seconds: float) -> None:
        part = min(seconds, MAX_PART_SECONDS)
        self._left = seconds - part
        self._when = self._loop.time() + part
        self._handle = self._loop.call_at(self._when, self._ring)

    def _ring(self) -> None:
        if self._loop.time() - self._when > LATE_SECONDS:
            self._set(max(self._left, MOMENT_SECONDS))
        elif self._left > 0:
            self._set(self._left)
        else:
            (_, act), *self._steps = self._steps
            if self._steps:
                self._set(self._steps[0][0])
            act()

    def cancel(self) -> None:
        self._handle.cancel()


def _pass_to_loop(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]", done: "Future[Any]") -> None:
    with suppress(RuntimeError):  # the event loop was closed, so nothing waits for the answer
        loop.call_soon_threadsafe(_pass_on, answer, done)


def _pass_on(answer: "asyncio.Future[Any]", done: "Working") -> None:
    if done.cancelled():
        answer.cancel()
    elif answer.done():
        done.exception()  # mark the exception as read: the wait was given up
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


# --- the idle connections of a pool
#
# The listeners are of all pools of this process, because SQLAlchemy does not expect a new listener of a pool that other threads
# use, and the engine may be the app's.

_DIALECT = "sqlalchemy-outbox dialect"
"""The key in a pooled connection's `info` for the dialect of its engine, which the engine's options share."""

_idle: "WeakKeyDictionary[ConnectionPoolEntry, None]" = WeakKeyDictionary()
"""The idle connections. The pool may be testing one of them before a checkout."""


def _free(connection: Any, record: ConnectionPoolEntry) -> None:
    _idle[record] = None


def _taken(connection: Any, record: ConnectionPoolEntry, *rest: Any) -> None:
    _idle.pop(record, None)


for _name in ("connect", "checkin"):
    event.listen(Pool, _name, _free)
for _name in ("checkout", "close", "detach", "invalidate"):
    event.listen(Pool, _name, _taken)


@event.listens_for(Engine, "engine_connect")
def _note_dialect(connection: Connection) -> None:
    connection.info[_DIALECT] = connection.dialect


def idle_connections(engine: Engine) -> list[Any]:
    """The driver's idle connections in the pool of the engine. `Silence` drops them if the test of one does not end."""
    records = [record for ref in _idle.keyrefs() if (record := ref()) is not None]
    found = [record.driver_connection for record in records if record.info.get(_DIALECT) is engine.dialect]
    return [connection for connection in found if connection is not None]
