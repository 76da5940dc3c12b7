"""What the tests of callbacks share: one callback in a Session or an AsyncSession, and stores that break while it runs."""

import asyncio
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from dispatchers import Operations
from dispatchers.callbacks import Calls, Settlement
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import ClaimedEntry, End
from support.database import Database, Order
from support.entries import dispatcher, queue_row

Work = Callable[[Session, Settlement], object]


class Shop:
    """The app: its callbacks, in the session that its engine's kind asks for. seen: what they were handed, in turn."""

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async
        self.effects = Operations()
        self.seen: list[Settlement] = []

    def on(self, kind: str, operation: str, work: Work) -> None:
        """Register `work`; an async callback does it by `run_sync`."""

        def callback(session: Session, settlement: Settlement) -> None:
            self.seen.append(settlement)
            work(session, settlement)

        async def async_callback(session: AsyncSession, settlement: Settlement) -> None:
            await session.run_sync(callback, settlement)

        getattr(self.effects, kind)(operation)(async_callback if self.is_async else callback)

    def on_settled(self, work: Work, operation: str = "crm.upsert") -> None:
        self.on("on_settled", operation, work)

    def engine(self) -> Any:
        return self.database.async_engine() if self.is_async else self.database.engine

    def dispatcher(self, target: Any = None, **settings: Any) -> DispatcherWork:
        engine = target if target is not None or "store" in settings else self.engine()
        return dispatcher(engine, self.ob, include=[self.effects], **settings)

    def run_once(self, **settings: Any) -> int:
        async def main() -> int:
            working = self.dispatcher(**settings)
            try:
                return await working.run_once()
            finally:
                await working.close()

        return asyncio.run(main())

    def pay(self, session: Session, settlement: Settlement) -> None:
        """What a good callback does: the order is paid, the receipt goes out."""
        session.add(Order(customer=settlement.entry.parent.key, amount=2000))
        self.ob.enqueue(session, "mail.receipt", {"to": "ada"})

    @property
    def states(self) -> list[str]:
        return [settlement.state for settlement in self.seen]


class Breaking(DatabaseStore):
    """The real store with faults around callbacks: `fates` are "before", "conflict", "after" or "", in turn."""

    def __init__(self, target: Any, ob: outbox.Outbox, *fates: str) -> None:
        super().__init__(target, ob.configuration)
        self.fates = list(fates)

    async def settle_with(self, entry: ClaimedEntry, end: End, calls: Calls) -> bool:
        fate = self.fates.pop(0) if self.fates else ""
        if fate == "before":
            raise sa.exc.OperationalError("settle", {}, Exception("the server is unavailable"))
        if fate == "conflict":
            raise sa.exc.OperationalError("commit", {}, _Conflict())
        settled = await super().settle_with(entry, end, calls)
        if fate == "after":
            raise sa.exc.OperationalError("commit", {}, Exception("the acknowledgement was lost"))
        return settled


class _Conflict(Exception):
    sqlstate = "40001"


class Gate:
    """A callback that waits until it is opened, on its thread. entered: how many wait or have waited."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = 0

    def __call__(self, session: Session, settlement: Settlement) -> None:
        self.entered += 1
        self.opened.wait(60)

    def open(self) -> None:
        """Open it, and wait until those who waited are through."""
        self.opened.set()
        for thread in threading.enumerate():
            if thread.name == "outbox-callback":
                thread.join(60)


def failing(shop: Shop, error: BaseException, times: int = 1) -> Callable[[Session, Settlement], None]:
    """Pays as it should, then raises; after `times` times it does not raise any more. A call whose statements end with a
    conflict does not count: it has not raised.
    """
    paid = count()  # not the length of what was seen: callbacks of several threads may all have seen more by then

    def work(session: Session, settlement: Settlement) -> None:
        shop.pay(session, settlement)
        session.flush()
        if next(paid) < times:
            raise error

    return work


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def kept(database: Database, id: UUID) -> Any:
    """What the queue's row knows of the entry."""
    row = queue_row(database, id)
    assert (row.lease_token, row.lease_until) == (None, None)
    return read_outcome(row.outcome).known
