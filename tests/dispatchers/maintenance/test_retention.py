"""What maintenance deletes, and what it never does: on each database, over rows that have been aged."""

from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import put, put_one
from support.retention import A_MOMENT, DAY, RETENTION, WINDOW, clean, elapse, kept, request, settle_all, shift

import outbox
from dispatchers import FOREVER
from dispatchers.maintenance.retention import BEHIND, REMEMBERED, Retention
from dispatchers.time_limits import Window
from outbox.configuration import RECORD_RETENTION
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

STATES = ["pending", "sending", "retry", "uncertain"]
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


@pytest.mark.every_value
@pytest.mark.parametrize("state", STATES)
def test_an_unsettled_entry_is_never_deleted(database: Database, ob: outbox.Outbox, state: str) -> None:
    id = put_one(database, ob)
    settle_all(database)
    database.execute(sa.delete(TABLES.settlement))  # its event stays
    row = {"id": id, "destination": "crm", "due_at": NEVER, "deliveries": 1, "attempts": 1, "key_epoch": 0}
    lease = {"lease_token": id, "lease_until": NEVER, "leased_at": NEVER} if state == "sending" else {}
    database.execute(sa.insert(TABLES.queue).values({**row, **lease, "state": state, "maybe_sent": True}))
    elapse(database, 100 * RETENTION)

    assert not clean(database)

    assert kept(database) == {"entry": 1, "queue": 1, "event": 1}


def test_an_entry_that_blocks_its_group_is_kept_until_its_release(database: Database, ob: outbox.Outbox) -> None:
    ids = put(database, ob, count=2, ordering_key="acct_1")
    settle_all(database, "failed")
    blocked = {"ordering_key": "acct_1", "entry_id": ids[0], "reason": "declined", "since": NEVER}
    database.execute(sa.insert(TABLES.blocked_group).values(blocked))
    elapse(database, RETENTION + DAY)

    assert clean(database) == {"entries": 1}
    assert [entry.id for entry in database.entries] == ids[:1]
    database.execute(sa.delete(TABLES.blocked_group))

    assert clean(database) == {"entries": 1}


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


def test_an_entry_is_kept_as_long_as_its_requests_record(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert", retention=3 * RETENTION)
    settle_all(database)

    elapse(database, 2 * RETENTION)
    assert not clean(database)
    assert kept(database) == {"record": 1, **ENTRY}
    elapse(database, RETENTION + A_MOMENT)

    assert clean(database) == {"records": 1, "entries": 1, "tombstones": 1}
    assert kept(database) == {}


def test_an_entry_under_a_requests_key_is_kept_as_long_as_the_record(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, retention=3 * RETENTION)
    put_one(database, ob, parent=outbox.ParentKey("retry-001", scope="acct_1", source="http"))
    settle_all(database)
    elapse(database, 2 * RETENTION)

    assert not clean(database)


def test_a_settlement_whose_entry_is_missing_goes_too(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    settle_all(database)
    database.execute(sa.delete(TABLES.entry))
    elapse(database, RETENTION + A_MOMENT)

    assert clean(database) == {"entries": 1}
    assert kept(database) == {}


# --- records and their tombstones


def test_a_tombstone_outlives_its_record_while_its_entries_are_kept(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert", "mail.send")
    (record,) = database.records
    settle_all(database)

    elapse(database, RECORD_RETENTION - A_MOMENT)
    assert not clean(database)
    elapse(database, 2 * A_MOMENT)
    assert clean(database) == {"records": 1}

    last_settled = max(row.settled_at for row in database.rows(TABLES.settlement))
    (tombstone,) = database.rows(TABLES.tombstone)
    assert tombstone.forget_at == last_settled + RETENTION + BEHIND
    for name in ("id", "env", "scope", "source", "fingerprint", "fingerprint_version"):
        assert getattr(tombstone, name) == getattr(record, name)


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


def test_a_record_without_entries_leaves_no_tombstone(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob)
    elapse(database, RECORD_RETENTION + A_MOMENT)

    assert clean(database) == {"records": 1}

    assert kept(database) == {}
    request(database, ob)


@pytest.mark.every_value
@pytest.mark.parametrize("state", STATES)
def test_a_record_with_an_unsettled_entry_is_never_deleted_nor_its_entries(
    database: Database, ob: outbox.Outbox, state: str
) -> None:
    first, last = request(database, ob, "retry-001", "crm.upsert", "mail.send")
    settle_all(database, "delivered", first)
    lease = {"lease_token": last, "lease_until": NEVER, "leased_at": NEVER} if state == "sending" else {}
    database.execute(sa.update(TABLES.queue).values({"state": state, "due_at": NEVER, **lease}))
    elapse(database, 100 * RETENTION)

    assert not clean(database)
    assert kept(database) == {"record": 1, "entry": 2, "queue": 1, "settlement": 1, "event": 1}
    settle_all(database)

    assert clean(database) == {"records": 1, "entries": 1}
    assert [entry.id for entry in database.entries] == [last]


def test_a_records_entries_under_other_parents_count_as_its_own(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "retry-001", scope="acct_1", content={}) as claim:
        ob.enqueue(session, "crm.upsert", {}, parent="invoice:42")
        claim.respond(201)
    elapse(database, RECORD_RETENTION + A_MOMENT)

    assert not clean(database)
    settle_all(database)
    assert clean(database) == {"records": 1}

    assert kept(database) == {"tombstone": 1, **ENTRY}


@pytest.mark.every_value
@pytest.mark.parametrize("state", ["accepted", "leased"])
def test_a_record_that_is_open_is_never_deleted(database: Database, ob: outbox.Outbox, state: str) -> None:
    request(database, ob)
    (record,) = database.records
    lease = {"lease_token": record.id, "lease_until": NEVER} if state == "leased" else {}
    database.execute(sa.update(TABLES.record).values({"state": state, "answered_at": None, **lease}))
    elapse(database, 100 * RETENTION)

    assert not clean(database)


def test_a_tombstone_of_the_keys_earlier_life_is_replaced(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert")
    settle_all(database)
    elapse(database, RECORD_RETENTION + A_MOMENT)
    clean(database)
    for table in (TABLES.entry, TABLES.settlement, TABLES.event):
        database.execute(sa.delete(table))
    shift(database, TABLES.tombstone.c.forget_at, 2 * RETENTION)
    request(database, ob, "retry-001", "crm.upsert")
    settle_all(database)
    shift(database, TABLES.record.c.keep_until, RECORD_RETENTION + A_MOMENT)

    assert clean(database) == {"records": 1}

    (tombstone,) = database.rows(TABLES.tombstone)
    (settlement,) = database.rows(TABLES.settlement)
    assert tombstone.forget_at == settlement.settled_at + RETENTION + BEHIND


def test_where_a_service_never_forgets_a_key_is_refused_for_a_year(database: Database, ob: outbox.Outbox) -> None:
    request(database, ob, "retry-001", "crm.upsert")
    settle_all(database)

    elapse(database, REMEMBERED - A_MOMENT)
    assert clean(database, RETENTION, WINDOW, FOREVER) == {"records": 1, "entries": 1}
    with pytest.raises(outbox.KeyExpired):
        request(database, ob)
    elapse(database, 2 * A_MOMENT)

    assert clean(database, RETENTION, WINDOW, FOREVER) == {"tombstones": 1}


# --- how it goes through the tables


def test_what_may_not_go_does_not_keep_it_from_what_comes_after(database: Database, ob: outbox.Outbox) -> None:
    for number in range(3):
        request(database, ob, f"kept-{number}", "crm.upsert", retention=9 * RETENTION)
    settle_all(database)
    elapse(database, DAY)
    put(database, ob, count=5)
    settle_all(database)
    elapse(database, RETENTION + A_MOMENT)

    assert clean(database, max_rows=1) == {"entries": 5}

    assert kept(database) == {"record": 3, "entry": 3, "settlement": 3, "event": 3}


def test_settlements_of_one_instant_are_all_looked_at(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=7)
    settle_all(database)
    first = database.rows(TABLES.settlement)[0].settled_at
    database.execute(sa.update(TABLES.settlement).values(settled_at=first))
    elapse(database, RETENTION + A_MOMENT)

    assert clean(database, max_rows=2) == {"entries": 7}


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
