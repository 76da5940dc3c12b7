"""The time of a test: it passes in the outbox's tables and in the fakes of services, and the test does not wait."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, and_, select, update

from dispatchers.stored_outcome import read_outcome
from outbox.errors import InvalidValue
from outbox.sql.clock import earlier
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

Run = Callable[[Callable[[Connection], Any]], Any]
"""Runs work in a transaction of its own, which commits."""


class PassedTime:
    """How much time a test has let pass. The fakes of services have `now` as their clock."""

    def __init__(self) -> None:
        self.total = timedelta(0)

    def now(self) -> datetime:
        """The machine's time and what has passed in the test: aware, in UTC."""
        return datetime.now(UTC) + self.total


class OutboxClock:
    """Lets the time pass for a test's outbox, without waiting.

    The database's clock decides in the outbox, and no test can move it. So `advance` sets the stored times back instead.
    """

    def __init__(self, passed: PassedTime, run: Run, tables: Callable[[], Tables]) -> None:
        self._passed = passed
        self._run = run
        self._tables = tables

    def now(self) -> datetime:
        """The machine's time and what has passed in the test: aware, in UTC."""
        return self._passed.now()

    def advance(self, span: timedelta) -> None:
        """Let `span` pass: due times come, and backoffs, leases, cooldowns, windows and stored answers of requests end.

        The fakes of services, from the fixtures `fake_stripe` and `service_of`, forget keys accordingly. Of the app's own rows,
        and of what Python's clock says, nothing changes. Raises `InvalidValue` for a negative span.
        """
        if span < timedelta(0):
            raise InvalidValue("span", span, "must not be negative: time cannot be turned back")
        tables = self._tables()
        self._run(lambda connection: pass_time(connection, tables, span))
        self._passed.total += span


def pass_time(connection: Connection, tables: Tables, span: timedelta) -> None:
    """Set all stored times of what waits back by `span`: entries, destinations, and the records of requests."""
    queue = tables.queue
    _shift(connection, queue, span, "lease_until", "leased_at", "first_leased_at", "in_doubt_since", "waiting_since")
    _shift(connection, tables.destination, span, "cooldown_until", "breaker_until", "rate_at")
    _shift(connection, tables.record, span, "lease_until", "replay_until", "keep_until")
    _shift(connection, tables.tombstone, span, "forget_at")
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
