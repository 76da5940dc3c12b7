"""What the tests of accepted requests share: an app that accepts checkouts, and completes them."""

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from dispatchers import Adapter, Completed, Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.dispatcher_work import DispatcherWork
from support.database import CHARGE, TABLES, Database, Order
from support.entries import dispatcher

Work = Callable[[Session, Completed], object]
LOCATION = {"Location": "/requests/1"}


def summed_up(session: Session, completed: Completed) -> None:
    """What a good completion does: it writes a row, and answers with the outcome of each effect."""
    session.add(Order(customer=completed.parent.key, amount=2000))
    failed = [entry for entry in completed.entries if entry.state == "failed"]
    completed.respond(402 if failed else 201, {entry.operation: entry.state for entry in completed.entries})


class Checkout:
    """The app, and its dispatcher on a Session's or an AsyncSession's engine. seen: what its completion was handed."""

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool = False) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async
        self.effects = Operations()
        self.seen: list[Completed] = []

    def accept(self, *operations: str, key: Any = "retry-001", **settings: Any) -> outbox.Response:
        """Send the request, which enqueues `operations` once; returns its answer, new or replayed."""
        with self.database.begin() as session:
            block = self.ob.idempotent(session, key, scope="acct_1", content={"cart": 1}, **settings)
            with block as claim:
                if not claim.replayed:
                    for operation in operations or (CHARGE,):
                        self.ob.enqueue(session, operation, {"amount": 2000})
                    claim.accept(completion="checkout", headers=LOCATION)
            return claim.require_response()

    def on_completed(self, work: Work = summed_up) -> None:
        def completion(session: Session, completed: Completed) -> None:
            self.seen.append(completed)
            work(session, completed)

        async def async_completion(session: AsyncSession, completed: Completed) -> None:
            await session.run_sync(completion, completed)

        self.effects.on_completed("checkout")(async_completion if self.is_async else completion)

    def dispatcher(self, adapter: Adapter | None = None, **settings: Any) -> DispatcherWork:
        """Serves every operation of the tests by one adapter."""
        database = self.database
        ours = database.dispatchers_async_engine() if self.is_async else database.dispatchers_engine
        engine = settings.pop("target", ours)
        serving = adapter or MemoryAdapter()
        adapters = {"stripe": serving, "mail": serving, "crm": serving}
        return dispatcher(engine, self.ob, **{"include": [self.effects], "adapters": adapters, **settings})

    def run_once(self, adapter: Adapter | None = None, **settings: Any) -> int:
        async def main() -> int:
            working = self.dispatcher(adapter, **settings)
            try:
                return await working.run_once()
            finally:
                await working.close()

        return asyncio.run(main())

    def cancel(self, operation: str) -> bool:
        (entry,) = (entry for entry in self.database.entries if entry.operation == operation)
        with self.database.begin() as session:
            return self.ob.cancel(session, entry.id)

    def status(self, *, scope: str = "acct_1") -> outbox.RequestStatus | None:
        with self.database.begin() as session:
            return self.ob.request_status(session, self.record.id, scope=scope)

    @property
    def record(self) -> sa.Row[Any]:
        (record,) = self.database.records
        return record

    @property
    def customers(self) -> list[str]:
        """For whom the completion has written its row."""
        return [order.customer for order in self.database.orders]


def make_due(database: Database) -> None:
    """As if every backoff were over."""
    database.execute(
        sa.update(TABLES.queue).values(due_at=sa.select(sa.func.min(TABLES.entry.c.created_at)).scalar_subquery())
    )
