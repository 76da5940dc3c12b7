"""Many dispatchers as processes over one database, and one that is killed while entries wait claimed ahead."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.daemons import FileService, daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import HOUR, age, put, run_once, states
from support.verify import broken_rules

import outbox

pytestmark = pytest.mark.sends_hints

PROCESSES = 8
ENTRIES = 150

SHARED = """
import asyncio

class Shared(Adapter):
    '''Notes the key and the process of each send, in one write.'''

    timeout = timedelta(seconds=5)
    window = FOREVER

    def __init__(self):
        self._log = os.open(here / "sent.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def send(self, delivery):
        os.write(self._log, f"{delivery.key} {os.getpid()}\\n".encode())
        await asyncio.sleep(0.005)
        return Delivered()

def make():
    return Dispatcher(url, outbox=ob, adapters={"crm": Shared()}, concurrency=4)
"""


def test_eight_processes_send_each_entry_once(postgresql: Database, ob: outbox.Outbox, tmp_path: Path) -> None:
    write_factory(tmp_path, SHARED)

    with ExitStack() as stack:
        workers = [stack.enter_context(daemon(tmp_path, postgresql.url)) for _ in range(PROCESSES)]
        for worker in workers:
            wait_for(lambda worker=worker: "started: " in worker.output, "its start", 60, workers)
        put(postgresql, ob, count=ENTRIES)
        wait_for(lambda: states(postgresql)["delivered"] == ENTRIES, "every entry to end", 60, workers)
        for worker in workers:
            worker.terminate()
        assert [worker.wait() for worker in workers] == [0] * PROCESSES

    sends = [line.split() for line in (tmp_path / "sent.txt").read_text().splitlines()]
    rows = postgresql.rows(TABLES.settlement)
    assert len(sends) == len({key for key, _ in sends}) == ENTRIES
    assert len({process for _, process in sends}) > 1
    assert {(row.attempts, row.deliveries) for row in rows} == {(1, 1)}
    assert deadlocks(postgresql) == 0
    assert broken_rules(postgresql) == {}


def deadlocks(database: Database) -> int:
    statement = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    with database.observer.connect() as connection:
        found: int = connection.execute(sa.text(statement)).scalar_one()
        return found


SUDDENLY_SLOW = """
import asyncio
from dispatchers.pipeline import destinations
from support.daemons import FileService

destinations.WAIT_SECONDS = 3600.0  # what waits is released only by the kill

class SuddenlySlow(FileService):
    async def send(self, delivery):
        if len(self.sent) == 300:
            (here / "slow").touch()
            await asyncio.Event().wait()
        return await super().send(delivery)

def make():
    return Dispatcher(url, outbox=ob, adapters={"crm": SuddenlySlow(here)}, concurrency=1)
"""


def test_a_kill_while_entries_wait_claimed_ahead_ends_none_in_doubt(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put(postgresql, ob, count=400)
    write_factory(tmp_path, SUDDENLY_SLOW)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for((tmp_path / "slow").exists, "the service to become slow", 60, [process])
        wait_for(lambda: states(postgresql)["delivered"] == 300, "the sends to be settled", 60, [process])
        wait_for(lambda: states(postgresql)["sending"] > 1, "entries that wait", 60, [process])
        process.kill()
    waiting = states(postgresql)["sending"]
    age(postgresql, HOUR)
    service = FileService(tmp_path)
    finished = run_once(postgresql, ob, adapters={"crm": service})

    assert finished == 100
    assert states(postgresql) == {"delivered": 400}
    assert len(service.effects) == len(service.sent) == 400  # those that waited were never sent before
    attempts = Counter(row.attempts for row in postgresql.rows(TABLES.settlement))
    assert attempts == {1: 400 - waiting, 2: waiting}
    assert broken_rules(postgresql) == {}
