"""Processes that are killed while a schedule enqueues: the instant is enqueued with its record, or not at all."""

import signal
from pathlib import Path

import pytest
from support.daemons import daemon, wait_for, write_factory
from support.database import Database
from support.schedules import HOUR, Reports

import outbox

REPORTING = """
from support.daemons import OverStore, die_at
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore

moment = os.environ["MOMENT"]
effects = Operations()

@effects.periodic("@hourly")
def report(session, tick):
    die_at(moment, here="as the function begins")
    ob.enqueue(session, "mail.report", {})
    session.connection()
    session.begin_nested().commit()  # writes the entry
    die_at(moment, here="before the commit")

class DyingStore(DatabaseStore):
    async def call_schedule(self, schedule, tick):
        recorded = await super().call_schedule(schedule, tick)
        die_at(moment, here="after the commit")
        return recorded

def make():
    return OverStore(
        DyingStore(url, ob.configuration), outbox=ob, include=[effects], poll=timedelta(seconds=0.02),
        adapters={"mail": MemoryAdapter()},
    )
"""


@pytest.mark.parametrize("moment", ["as the function begins", "before the commit", "after the commit"])
def test_a_kill_leaves_the_entry_with_its_record_or_neither(
    database: Database, ob: outbox.Outbox, tmp_path: Path, moment: str
) -> None:
    reports = Reports(database, ob)
    reports.run_once()
    before = reports.since(HOUR)
    write_factory(tmp_path, REPORTING)

    with daemon(tmp_path, database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output

    committed = moment == "after the commit"
    assert reports.row.enqueued_to == (before + HOUR if committed else before)
    assert len(reports.parents) == (1 if committed else 0)
    with daemon(tmp_path, database.url, MOMENT="") as process:
        wait_for(lambda: reports.row.enqueued_to > before, "the instant", workers=[process])
    assert len(reports.parents) == (reports.row.enqueued_to - before) // HOUR
