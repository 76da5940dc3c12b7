"""A dispatcher under a supervisor that starts it again whenever it dies: `python oom_sender.py URL DIRECTORY KEYS`.

It meets a payload that kills its process, once the service has executed it. It works until nothing waits any more; printed is how
each of the processes ended. They are forked, so that a start costs next to nothing; nothing is open before a fork.
Time passes in the database only: nothing depends on how fast the machine is.
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa

import outbox
from dispatchers import FOREVER, Delivery, Dispatcher, Outcome
from dispatchers.time_limits import RetryPolicy
from support.daemons import FileService
from support.database import TABLES
from support.entries import HOUR

MAX_ATTEMPTS = 5
TOGETHER = timedelta(milliseconds=1)  # entries with less between them have not been kept apart


class Poisonous(FileService):
    """The poison does not die alone: the entries that are due together with it are being sent, too.

    beside: passed by the sends of these entries when all have begun; never if the poison is one of them.
    """

    retry = RetryPolicy(max_attempts=MAX_ATTEMPTS)
    beside: asyncio.Barrier

    async def send(self, delivery: Delivery) -> Outcome:
        if delivery.payload == "poison":
            await super().send(delivery)
            os.kill(os.getpid(), signal.SIGKILL)
        await self.beside.wait()
        return await super().send(delivery)


async def work(url: str, service: Poisonous) -> None:
    engine = sa.create_engine(url)
    dispatcher = Dispatcher(
        engine,
        outbox=outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test", hints=False),
        adapters={"crm": service},
    )
    while due := let_time_pass(engine):
        service.beside = asyncio.Barrier(due)
        await dispatcher.run_once()
    await dispatcher.close()


def let_time_pass(engine: sa.Engine) -> int:
    """As if no lease were left and the next entries were due now, the later ones not within an hour. Returns how many are due."""
    queue, hour = TABLES.queue, sa.literal(HOUR, sa.Interval)
    waiting = queue.c.state != "uncertain"
    with engine.begin() as connection:
        first = connection.scalar(sa.select(sa.func.min(queue.c.due_at)).where(waiting))
        is_next = queue.c.due_at < first + TOGETHER if first else sa.false()
        due_at = sa.case((is_next, sa.func.now()), else_=queue.c.due_at + hour)
        connection.execute(
            sa.update(queue).where(waiting).values(due_at=due_at, lease_until=queue.c.lease_until - hour)
        )
        due = sa.select(sa.func.count()).where(waiting, queue.c.due_at <= sa.func.now())
        return connection.execute(due).scalar_one()


def main(url: str, directory: str, keys: str) -> None:
    service = Poisonous(Path(directory))
    service.window = FOREVER if keys == "keys" else None
    ended = -signal.SIGKILL
    while ended == -signal.SIGKILL:
        child = os.fork()
        if not child:
            asyncio.run(work(url, service))
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(ended, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
