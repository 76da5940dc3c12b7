"""A dispatcher that is stopped while the function of a schedule ends."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database

import outbox
from dispatchers import Operations
from dispatchers.periodic.schedules import Schedule
from dispatchers.pipeline.schedule_worker import ScheduleWorker, Work, merged_schedules
from dispatchers.store.database import DatabaseStore
from dispatchers.telemetry.errors import ErrorReports

effects = Operations()


@effects.periodic("@hourly", name="report")
def report(session: Any, tick: Any) -> None: ...


class Ending(ScheduleWorker):
    """Its only call ends `turns` turns of the event loop after `stopping` is set."""

    stopping: asyncio.Event
    turns: int

    async def _check(self, start: Callable[[Schedule, Work], object]) -> float:
        if not self.stopping.is_set():
            start(self._schedules[0], self._end)
        return timedelta(hours=1).total_seconds()

    async def _end(self) -> bool:
        self.stopping.set()
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return False


@pytest.mark.parametrize("turns", range(8))
def test_a_stop_is_heeded_at_whatever_moment_a_call_ends(sqlite: Database, ob: outbox.Outbox, turns: int) -> None:
    worker = Ending(
        DatabaseStore(sqlite.dispatchers_engine, ob.configuration),
        merged_schedules([effects]),
        at_once=1,
        clock=time.monotonic,
        may_enqueue=lambda: True,
        away=lambda error: None,
        skipped=lambda name, number: None,
        errors=ErrorReports(),
    )

    async def main() -> None:
        worker.stopping, worker.turns = asyncio.Event(), turns
        async with asyncio.timeout(20):
            await worker.pump(worker.stopping)

    asyncio.run(main())
