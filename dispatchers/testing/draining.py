"""Sends all that was enqueued, now: for the tests of an app.

    asyncio.run(drain(make_dispatcher()))

Use adapters of the test's own (`MemoryAdapter`, or the strict imitation of Stripe in this package), and check what the app's
effects and callbacks did.
"""

import json
from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Connection, Table, and_, or_, select, update

from dispatchers.process.dispatcher import Dispatcher, work_of
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome
from outbox.errors import ConfigurationError
from outbox.sql.clock import database_now, earlier
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

MAX_ROUNDS = 100


async def drain(dispatcher: Dispatcher, *, ahead: bool = False) -> int:
    """Run the dispatcher until nothing is due, including what callbacks enqueue. Returns how many entries it settled.

    ahead: also send what is due later, such as a retry after its backoff or an entry with `due`, until all entries have ended
        or are uncertain. It works as if the time had passed: windows end, cooldowns end, and circuit breakers close. It
        changes rows of the database, so use it with a test's own database only.
    Raises AssertionError if entries still become due after 100 rounds.
    """
    settled = 0
    for _ in range(MAX_ROUNDS):
        now = await dispatcher.run_once()
        settled += now
        brought = await _bring_forward(dispatcher) if ahead else 0
        if not (now or brought):
            return settled
    raise AssertionError(
        f"entries still become due after {MAX_ROUNDS} rounds: an adapter always defers them, or no adapter serves them"
    )


async def _bring_forward(dispatcher: Dispatcher) -> int:
    """Let the time pass until something may be claimed; returns how many entries wait for their time only."""
    store = work_of(dispatcher).store
    if not isinstance(store, DatabaseStore):
        raise ConfigurationError(
            "drain(ahead=True) changes due times in the database: the dispatcher's store must be Claims"
        )
    tables = store.tables

    def bring(connection: Connection) -> int:
        moments = [max(filter(None, moments)) for moments in _waiting(connection, tables)]
        if moments:
            now = database_now(connection)
            _set_back(connection, tables, max(min(moments) - now, timedelta(0)))
        return len(moments)

    return await store.run(bring)


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


def _set_back(connection: Connection, tables: Tables, span: timedelta) -> None:
    """Move all stored times of waiting entries and destinations back by `span`."""
    queue, destination = tables.queue, tables.destination
    _shift(connection, queue, span, "lease_until", "leased_at", "first_leased_at", "in_doubt_since", "waiting_since")
    _shift(connection, destination, span, "cooldown_until", "breaker_until", "rate_at")
    for id, outcome in connection.execute(select(queue.c.id, queue.c.outcome)).all():
        if (lookup := read_outcome(outcome).lookup) is not None:
            record = json.loads(outcome)
            record["lookup"]["fenced_at"] = (lookup.fenced_at - span).isoformat()
            connection.execute(update(queue).where(queue.c.id == id).values(outcome=json.dumps(record)))
    _shift(connection, queue, span, "due_at")


def _shift(connection: Connection, table: Table, span: timedelta, *names: str) -> None:
    for column in (table.c[name] for name in names):
        shifted = {column.name: earlier(column, span)}
        connection.execute(update(table).where(and_(column.is_not(None), column < NEVER)).values(shifted))
