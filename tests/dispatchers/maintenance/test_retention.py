"""What maintenance deletes, and when: over rows that have been aged. `test_retention_rules` has what it never does."""

import asyncio
from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database, statements_of
from support.entries import put, put_one
from support.retention import A_MOMENT, DAY, RETENTION, WINDOW, clean, elapse, kept, maintenance, request, settle_all

import outbox
from dispatchers import FOREVER
from dispatchers.maintenance.retention import BEHIND, REMEMBERED, Retention
from dispatchers.time_limits import Window
from outbox.configuration import RECORD_RETENTION

pytestmark = pytest.mark.on_mariadb

ENTRY = {"entry": 1, "settlement": 1, "event": 1}


# --- entries


@pytest.mark.every_value
@pytest.mark.parametrize("state", ["delivered", "failed", "cancelled"])
def test_a_settled_entry_goes_with_its_settlement_and_events_in_time(
    database: Database, ob: outbox.Outbox, state: str
) -> None:
    put(database, ob)
    settle_all(database, state)

    elapse(database, RETENTION - A_MOMENT)
    assert not clean(database)
    assert kept(database) == ENTRY
    elapse(database, 2 * A_MOMENT)

    assert clean(database) == {"entries": 1}
    assert kept(database) == {}


def test_a_natural_key_is_a_new_effect_once_its_entry_is_deleted(database: Database, ob: outbox.Outbox) -> None:
    first = put_one(database, ob, parent="invoice:42")
    (before,) = database.entries
    settle_all(database)
    elapse(database, RETENTION + A_MOMENT)
    clean(database)

    again = put_one(database, ob, parent="invoice:42")

    (after,) = database.entries
    assert (again, after.tag) == (first, before.tag)
    assert [row.state for row in database.queue] == ["pending"]


def test_a_settlement_whose_entry_is_missing_goes_too(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    settle_all(database)
    database.execute(sa.delete(TABLES.entry))
    elapse(database, RETENTION + A_MOMENT)

    assert clean(database) == {"entries": 1}
    assert kept(database) == {}


def test_a_settled_entry_that_is_in_the_queue_again_is_kept(sqlite: Database, ob: outbox.Outbox) -> None:
    """As after the restore of a part of the database."""
    put(sqlite, ob)
    (queued,) = sqlite.queue
    settle_all(sqlite)
    sqlite.execute(sa.insert(TABLES.queue).values(queued._mapping))
    elapse(sqlite, RETENTION + A_MOMENT)

    assert not clean(sqlite)
    assert kept(sqlite) == ENTRY | {"queue": 1}


# --- records and their tombstones


def test_a_recycled_key_is_refused_until_its_tombstone_is_forgotten(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert")
    settle_all(database)
    refused_after = [DAY + A_MOMENT, RECORD_RETENTION, RETENTION, RETENTION + BEHIND - A_MOMENT]

    elapsed = timedelta(0)
    for point in refused_after:
        elapse(database, point - elapsed)
        elapsed = point
        clean(database)
        with pytest.raises(outbox.KeyExpired):
            request(database, ob, "retry-001", "crm.upsert")
    assert kept(database) == {"tombstone": 1}
    elapse(database, 2 * A_MOMENT)

    assert clean(database) == {"tombstones": 1}
    request(database, ob, "retry-001", "crm.upsert")
    assert kept(database) == {"record": 1, "entry": 1, "queue": 1}


def test_where_a_service_never_forgets_a_key_is_refused_for_a_year(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert")
    settle_all(database)

    elapse(database, REMEMBERED - A_MOMENT)
    assert clean(database, RETENTION, WINDOW, FOREVER) == {"records": 1, "entries": 1}
    with pytest.raises(outbox.KeyExpired):
        request(database, ob)
    elapse(database, 2 * A_MOMENT)

    assert clean(database, RETENTION, WINDOW, FOREVER) == {"tombstones": 1}


# --- the retention itself


@pytest.mark.parametrize("windows", [[timedelta(days=30)], [timedelta(days=30), FOREVER, None, timedelta(hours=1)]])
def test_a_keep_shorter_than_a_window_is_refused_and_both_are_named(windows: list[Window]) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        Retention.of(timedelta(days=30), windows)

    assert str(refused.value) == (
        "retention=30 days, 0:00:00 must be from 31 days, 0:00:00 (the longest window of the adapters, 30 days, 0:00:00, and a"
        " margin of 1 day, 0:00:00) to 36525 days: an entry that is deleted earlier could be requested again under a key that"
        " the service still remembers; give a longer retention"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (30, "retention must be a timedelta, not 30"),
        (timedelta(days=40_000), "retention=40000 days, 0:00:00 must be from 1 day"),
    ],
)
def test_a_retention_that_is_none_is_refused(given: timedelta, says: str) -> None:
    with pytest.raises(outbox.ConfigurationError, match=says):
        Retention.of(given, [])


def test_the_default_outlasts_the_record_and_windows_of_thirty_days() -> None:
    assert RECORD_RETENTION < RETENTION
    assert Retention.of(RETENTION, [timedelta(days=30), None]) == Retention(
        entries=RETENTION, refuse=RETENTION + BEHIND
    )


# --- What a batch of retention costs: the statements do not grow with the rows. `test_bounded_reads` counts what they read.


def test_a_batch_costs_the_same_few_statements_whatever_its_size(database: Database, ob: outbox.Outbox) -> None:
    def statements(count: int) -> int:
        for number in range(count):
            request(database, ob, f"retry-{number}", "crm.upsert")
        settle_all(database)
        elapse(database, 2 * RETENTION)
        engine = database.new_engine()
        with statements_of(engine) as sent:
            assert asyncio.run(maintenance(engine).run_once())["entries"] == count
        database.execute(sa.delete(TABLES.tombstone))
        return len(sent)

    assert statements(2) == statements(60) <= 25
