"""Sends all that was enqueued, now: for the tests of an app.

    asyncio.run(drain(make_dispatcher()))

Use adapters of the test's own (`MemoryAdapter`, or the strict imitation of Stripe in this package), and check what the app's
effects and callbacks did.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Connection, or_, select

from dispatchers.process.dispatcher import Dispatcher, work_of
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome
from dispatchers.testing.clock import PassedTime, pass_time
from outbox.errors import ConfigurationError
from outbox.sql.clock import database_now
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

MAX_ROUNDS = 100


async def drain(dispatcher: Dispatcher, *, ahead: bool = False, passed: PassedTime | None = None) -> int:
    """Run the dispatcher until nothing is due, including what callbacks enqueue. Returns how many entries it settled.

    ahead: also send what is due later, such as a retry after its backoff or an entry with `due`, until all entries have ended
        or are uncertain. It works as if the time had passed: windows end, cooldowns end, and circuit breakers close. It
        changes rows of the database, so use it with a test's own database only.
    passed: counts the time that passes; its `now` is the clock of the fakes that must forget keys meanwhile.
    Raises AssertionError if entries still become due after 100 rounds.
    """
    settled = 0
    for _ in range(MAX_ROUNDS):
        now = await dispatcher.run_once()
        settled += now
        brought = await _bring_forward(dispatcher, passed or PassedTime()) if ahead else 0
        if not (now or brought):
            return settled
    raise AssertionError(
        f"entries still become due after {MAX_ROUNDS} rounds: an adapter always defers them, or no adapter serves or reads them"
        f"{await _first_reason(dispatcher)}"
    )


async def _first_reason(dispatcher: Dispatcher) -> str:
    """The end of a sentence: why one of the entries waits."""
    store = work_of(dispatcher).store
    if not isinstance(store, DatabaseStore):
        return ""
    outcome = store.tables.queue.c.outcome
    asked = select(outcome).where(outcome.is_not(None)).limit(1)
    found = await store.run(lambda connection: connection.execute(asked).scalar_one_or_none())
    reason = read_outcome(found).reason
    return "" if reason is None else f"; one of them waits because: {reason}"


async def _bring_forward(dispatcher: Dispatcher, passed: PassedTime) -> int:
    """Let the time pass until something may be claimed; returns how many entries wait for their time only."""
    store = work_of(dispatcher).store
    if not isinstance(store, DatabaseStore):
        raise ConfigurationError(
            "drain(ahead=True) changes due times in the database: the dispatcher's store must be Claims"
        )
    tables = store.tables

    def bring(connection: Connection) -> tuple[int, timedelta]:
        moments = [max(filter(None, moments)) for moments in _waiting(connection, tables)]
        if not moments:
            return 0, timedelta(0)
        span = max(min(moments) - database_now(connection), timedelta(0))
        pass_time(connection, tables, span)
        return len(moments), span

    brought, span = await store.run(bring)
    passed.total += span
    return brought


def _waiting(connection: Connection, tables: Tables) -> Iterable[tuple[datetime | None, ...]]:
    """The times that each entry waits for, if it waits only for time: when it is due, and when its destination sends again."""
    queue, destination = tables.queue.c, tables.destination.c
    columns = (queue.due_at, destination.cooldown_until, destination.breaker_until, destination.rate_at)
    found = (
        select(queue.state, queue.outcome, *columns)
        .join_from(tables.queue, tables.destination, destination.name == queue.destination, isouter=True)
        .where(queue.due_at < NEVER, queue.lease_token.is_(None), queue.callback.is_(None))
        .where(or_(destination.paused.is_(None), ~destination.paused))
    )
    for state, outcome, *moments in connection.execute(found):
        if state != "uncertain" or read_outcome(outcome).lookup is None:  # else it is only looked up again
            yield tuple(moments)
