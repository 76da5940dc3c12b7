"""However many destinations have callbacks, each entry that is due is sent: with default settings, and from one process."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.database import Database
from support.entries import dispatcher, pumping, put, run_once, states

import outbox
from dispatchers import Deferred, Delivered, Delivery, Operations
from dispatchers.callbacks import Settlement

COUNTS = (4, 30)


class Effects:
    """An operation with a callback for each of so many destinations. called: how often each callback ran."""

    def __init__(self, count: int, *, refusals: int = 0, callback_seconds: float = 0.0) -> None:
        self.names = [f"d{number:02}" for number in range(count)]
        self.operations = Operations()
        self.called: Counter[str] = Counter()
        self.sent: Counter[object] = Counter()
        self._refusals, self._callback_seconds = refusals, callback_seconds
        for name in self.names:
            self.operations.operation(f"{name}.do", timeout=timedelta(seconds=0.5))(self._send)
            self.operations.on_settled(f"{name}.do")(self._note)

    def _send(self, delivery: Delivery) -> Delivered | Deferred:
        self.sent[delivery.id] += 1
        if self.sent[delivery.id] <= self._refusals:
            return Deferred("busy", after=timedelta(milliseconds=1))
        return Delivered()

    def _note(self, session: Session, settlement: Settlement) -> None:
        if self._callback_seconds:
            session.execute(text(f"SELECT pg_sleep({self._callback_seconds})"))
        self.called[settlement.entry.destination] += 1


@pytest.mark.parametrize("count", COUNTS)
def test_run_once_sends_a_backlog_of_all_of_them(database: Database, ob: outbox.Outbox, count: int) -> None:
    effects = Effects(count)
    for name in effects.names:
        put(database, ob, f"{name}.do", count=5)

    assert run_once(database, ob, include=[effects.operations]) == 5 * count
    assert effects.called == dict.fromkeys(effects.names, 5)


@pytest.mark.parametrize("count", COUNTS)
def test_slow_callbacks_of_some_keep_none_of_the_others_waiting(
    postgresql: Database, ob: outbox.Outbox, count: int
) -> None:
    """One callback at a time, and a lease in which few of them fit: the budget is used up all the time."""
    effects = Effects(count, callback_seconds=0.03)
    for name in effects.names:
        put(postgresql, ob, f"{name}.do", count=10 if name in effects.names[:2] else 1)
    working = dispatcher(
        postgresql,
        ob,
        include=[effects.operations],
        callback_concurrency=1,
        lease=timedelta(seconds=2),
        margin=timedelta(seconds=1),
    )

    asyncio.run(pumping(working, lambda: states(postgresql)["delivered"] == 18 + count))

    assert effects.called == {name: 10 if name in effects.names[:2] else 1 for name in effects.names}
