"""Sends that block the event loop for longer than a short lease and fork meanwhile, with asyncpg: each claim sends once."""

from collections import Counter
from pathlib import Path

import sqlalchemy as sa
from support.daemons import daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import states

import outbox
from dispatchers.testing.faulty_http import faulty_http

ENTRIES = 120
BLOCKING = 40  # of so many one blocks its event loop

FACTORY = """
import asyncio
from sqlalchemy.ext.asyncio import create_async_engine

class Blocking(MemoryAdapter):
    async def send(self, delivery):
        with (here / "begun").open("a") as begun:
            begun.write(f"{delivery.id}:{os.getpid()}\\n")
        if delivery.payload["blocks"] and delivery.attempt == 1:
            if not (child := os.fork()):
                time.sleep(0.2)
                os._exit(0)
            time.sleep(1.7)
            os.waitpid(child, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["PORT"]))
        writer.write(f"POST /{delivery.id} HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.close()
        return await super().send(delivery)

def make():
    return Dispatcher(
        create_async_engine(url),
        outbox=ob,
        adapters={"crm": Blocking(window=FOREVER, timeout=timedelta(seconds=0.5))},
        lease=timedelta(seconds=1),
        margin=timedelta(seconds=0.2),
        poll=timedelta(seconds=0.25),
        concurrency=30,
    )
"""


def test_what_waits_for_a_blocked_loop_is_sent_once_for_each_claim(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    write_factory(tmp_path, FACTORY)
    with postgresql.begin() as session:
        for number in range(ENTRIES):
            ob.enqueue(session, "crm.upsert", {"blocks": number % BLOCKING == 3}, parent=f"order:{number}")
    url = postgresql.url.set(drivername="postgresql+asyncpg")

    with faulty_http() as remote:
        port = remote.url.rpartition(":")[2]
        with daemon(tmp_path, url, PORT=port) as first, daemon(tmp_path, url, PORT=port) as second:
            workers = (first, second)
            wait_for(lambda: states(postgresql) == {"delivered": ENTRIES}, "the sends", workers=workers)
            output = first.output + second.output
        arrived = Counter(request.target.strip("/") for request in remote.requests)

    begun = Counter(line.partition(":")[0] for line in (tmp_path / "begun").read_text().split())
    settlement = TABLES.settlement.c
    with postgresql.engine.connect() as connection:
        rows = connection.execute(sa.select(settlement.id, settlement.attempts, settlement.deliveries)).all()
    assert "entries whose send had not begun were released" in output
    unsent = {row.id: (row.attempts, begun[str(row.id)]) for row in rows if row.attempts > begun[str(row.id)]}
    assert unsent == {}, output  # an attempt that never began would put the entry in doubt
    assert all(1 <= arrived[str(row.id)] <= begun[str(row.id)] <= row.deliveries for row in rows)
    assert "the database has not answered" not in output
