"""What the tests of fleets share: a fleet over several databases, run until a condition is true."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import outbox
from dispatchers import Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.fleet_work import FleetWork
from support.database import Database
from support.entries import states, until_true

TICK = timedelta(milliseconds=20)


def urls(databases: list[Database]) -> dict[str, sa.URL]:
    return {f"shard{number}": each.url for number, each in enumerate(databases)}


def fleet(named: Any, ob: outbox.Outbox, adapter: MemoryAdapter, **settings: Any) -> FleetWork:
    return FleetWork(named, adapters={"crm": adapter}, outbox=ob, **{"poll": TICK, **settings})


def run_until(working: FleetWork, condition: Callable[[], object], *also: Callable[[], Any]) -> None:
    """Let the fleet work until the condition is true, then let it drain. also: coroutine functions that run meanwhile."""

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        try:
            for each in also:
                await each()
            await until_true(lambda: bool(condition()) or pump.done())
        finally:
            stopping.set()
            await pump

    asyncio.run(main())


def delivered(databases: list[Database], count: int) -> Callable[[], bool]:
    return lambda: all(states(each)["delivered"] == count for each in databases)


class Slow(MemoryAdapter):
    """Counts the sends at a time, and closes only once."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds, self.now, self.most, self.closed = seconds, 0, 0, 0

    async def send(self, delivery: Delivery) -> Outcome:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return await super().send(delivery)

    async def aclose(self) -> None:
        self.closed += 1


def write(path: Path, databases: dict[str, sa.URL]) -> None:
    lines = [f"{name} = {url.render_as_string(hide_password=False)}" for name, url in databases.items()]
    path.write_text("\n".join(["# the shards", "", *lines]))
