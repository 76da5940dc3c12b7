"""An app with one schedule, for the tests of periodic effects."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from dispatchers import Operations, Tick
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.dispatcher_work import DispatcherWork
from support.database import TABLES, Database
from support.entries import dispatcher

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class FailingTrigger:
    """A trigger of an app: each hour, until it fails."""

    fails = False

    def __repr__(self) -> str:
        return "FailingTrigger()"

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime, /) -> datetime | None:
        if self.fails:
            raise LookupError("no calendar")
        return now.replace(minute=0, second=0, microsecond=0) + HOUR


class Reports:
    """An app with one schedule, `report`, due each hour. ticks: what its function was called with.

    work: what its function does. settings: of `Operations.periodic`.
    """

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool = False, **settings: Any) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async
        self.ticks: list[Tick] = []
        self.work: Callable[[Session, Tick], object] = self.enqueue
        self.effects = Operations()

        def report(session: Session, tick: Tick) -> None:
            self.ticks.append(tick)
            self.work(session, tick)

        async def async_report(session: AsyncSession, tick: Tick) -> None:
            await session.run_sync(report, tick)

        declared = {"trigger": "@hourly", "name": "report"} | settings
        self.effects.periodic(**declared)(async_report if is_async else report)

    def enqueue(self, session: Session, tick: Tick) -> None:
        self.ob.enqueue(session, "mail.report", {"day": f"{tick.at:%Y-%m-%d %H:%M}"})

    def dispatcher(self, **settings: Any) -> DispatcherWork:
        engine = self.database.dispatchers_async_engine() if self.is_async else self.database.dispatchers_engine
        adapters = {"mail": MemoryAdapter()}
        return dispatcher(engine, self.ob, include=[self.effects], adapters=adapters, **settings)

    def run_once(self, *, beats: bool = False) -> int:
        """One call of a new dispatcher. beats: leave its heartbeat, as a running one does."""

        async def main() -> int:
            working = self.dispatcher()
            try:
                settled = await working.run_once()
                if beats:
                    await working.heartbeats.beat()
                return settled
            finally:
                await working.close()

        return asyncio.run(main())

    @property
    def row(self) -> Any:
        (row,) = self.database.rows(TABLES.schedule)
        return row

    @property
    def parents(self) -> list[str]:
        """The parents of the entries of schedules, with their scopes."""
        return sorted(f"{row.scope} {row.parent}" for row in self.database.entries if row.source == "schedule")

    def change(self, **values: Any) -> None:
        with self.database.observer.begin() as connection:
            connection.execute(sa.update(TABLES.schedule).values(**values))

    def since(self, span: timedelta) -> datetime:
        """Let the schedule be enqueued up to the full hour that was so long ago. Returns that hour."""
        at = (datetime.now(UTC) - span).replace(minute=0, second=0, microsecond=0)
        self.change(enqueued_to=at)
        return at
