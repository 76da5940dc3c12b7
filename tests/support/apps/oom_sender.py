"""A dispatcher under a supervisor that starts it again whenever it dies: `python poisoned.py URL DIRECTORY KEYS`.

It meets a payload that kills its process, once the service has executed it. It works until nothing waits any more; printed is how
each of the processes ended. They are forked, so that a start costs next to nothing; nothing is open before a fork.
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from random import Random

import sqlalchemy as sa

import outbox
from dispatchers import FOREVER, Delivery, Dispatcher, Outcome
from dispatchers.dispatcher import Simulation
from support.database import TABLES
from support.entries import FileService

ATTEMPTS_MAX = 5


class Poisonous(FileService):
    """The poison comes first and takes its time, so that it does not die alone."""

    timeout = timedelta(seconds=0.2)
    attempts_max = ATTEMPTS_MAX

    async def send(self, delivery: Delivery) -> Outcome:
        if delivery.payload == "poison":
            await super().send(delivery)
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.01)
        return await super().send(delivery)


class Hasty(Random):
    """Of every backoff it waits a small share."""

    def random(self) -> float:
        return super().random() / 20


async def work(url: str, service: Poisonous) -> None:
    engine = sa.create_engine(url)
    dispatcher = Dispatcher(
        engine,
        outbox=outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test", hints=False),
        adapters={"crm": service},
        lease=timedelta(seconds=0.5),
        margin=timedelta(seconds=0.1),
        poll=timedelta(seconds=0.02),
        simulation=Simulation(rng=Hasty()),
    )
    stopping = asyncio.Event()
    pump = asyncio.create_task(dispatcher.pump(stopping))
    while not pump.done() and waits(engine):  # noqa: ASYNC110  # what it waits for is in a database
        await asyncio.sleep(0.02)
    stopping.set()
    await pump


def waits(engine: sa.Engine) -> bool:
    with engine.connect() as connection:
        waiting = sa.select(TABLES.queue.c.id).where(TABLES.queue.c.state != "uncertain")
        return connection.execute(waiting.limit(1)).first() is not None


def main(url: str, directory: str, keys: str) -> None:
    service = Poisonous(Path(directory))
    service.window = FOREVER if keys == "keys" else None
    ended = None
    while ended != 0:
        child = os.fork()
        if not child:
            asyncio.run(work(url, service))
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(ended, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
