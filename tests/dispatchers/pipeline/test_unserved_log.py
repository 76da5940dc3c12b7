"""What cannot be sent here is logged once a minute for each operation, and status shows that it waits."""

import asyncio
from datetime import timedelta

import pytest
from support.cli_runner import document
from support.database import TABLES, Database
from support.entries import HOUR, age, change, put, put_one, run_once
from test_scheduler import claimed

import outbox
from dispatchers import Deferred
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.jobs import report_lag
from dispatchers.pipeline.routing import MAX_OPERATIONS, UNSERVED_REPORT_SECONDS, UnservedLog
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry

pytestmark = pytest.mark.on_mariadb


def unserved(operation: str = "crm.upsert") -> ClaimedEntry:
    return claimed("crm")._replace(operation=operation)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " waits: " in record.getMessage()]


def test_many_entries_of_one_operation_are_logged_once(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(database, ob, count=80)

    run_once(database, ob, adapters={"crm.other": MemoryAdapter()})

    (line,) = logged(caplog)
    assert line.endswith(" (crm.upsert) waits: no adapter of this dispatcher serves it")


def test_after_a_minute_it_is_logged_again_with_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    reports = UnservedLog(lambda: now)
    first, second = unserved(), unserved()
    for entry in (first, second, first, second, unserved()):
        reports.log_skipped(entry, "no adapter serves it")
    reports.log_skipped(unserved("mail.send"), "no adapter serves it")

    now += UNSERVED_REPORT_SECONDS
    reports.log_skipped(first, "no adapter serves it")

    assert logged(caplog) == [
        f"entry {first.id} (crm.upsert) waits: no adapter serves it",
        logged(caplog)[1],
        f"entry {first.id} (crm.upsert) waits: no adapter serves it; 2 more entries of this operation wait too",
    ]
    assert "(mail.send)" in logged(caplog)[1]


def test_operations_without_number_do_not_fill_the_memory() -> None:
    reports = UnservedLog(lambda: 0.0)

    for number in range(3 * MAX_OPERATIONS):
        reports.log_skipped(unserved(f"crm.n{number}"), "no adapter serves it")

    assert len(reports._reports) <= MAX_OPERATIONS


def lags(database: Database, ob: outbox.Outbox) -> dict[str, timedelta]:
    return asyncio.run(report_lag(DatabaseStore(database.engine, ob.configuration).run, TABLES))


def test_what_is_released_again_and_again_has_been_waiting_all_the_time(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    put(database, ob, "mail.send", due=2 * HOUR)
    for _ in range(3):
        age(database, HOUR / 2)
        run_once(database, ob, adapters={"crm.other": MemoryAdapter()})

    assert {name: lag // HOUR for name, lag in lags(database, ob).items()} == {"crm": 1}
    (crm, _) = document("destinations", database=database)["destinations"]
    assert 5400 <= crm["oldest_due_seconds"] < 5500
    assert 5400 <= document("status", database=database)["destinations"][0]["oldest_due_seconds"] < 5500


def test_an_entry_pinned_to_another_form_has_been_waiting_too(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    change(database, id, state="retry", deliveries=1, attempts=1, maybe_sent=True, in_doubt_since=sent(database, id))
    change(database, id, sent_as="native version=1")
    for _ in range(2):
        age(database, HOUR)
        run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert lags(database, ob)["crm"] // HOUR == 2


def sent(database: Database, id: object) -> object:
    return next(row.due_at for row in database.queue if row.id == id)


def test_what_was_tried_has_waited_since_it_is_due_again(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    age(database, HOUR)
    run_once(database, ob, adapters={"crm.other": MemoryAdapter()})
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": MemoryAdapter([Deferred("busy", after=timedelta(seconds=1))])})
    age(database, HOUR / 2)

    assert lags(database, ob)["crm"] < HOUR
