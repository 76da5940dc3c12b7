"""When an entry is due: whatever the app gives, it is refused at once, or sent in its time and shown to everyone."""

from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.database import CHARGE, PAYLOAD, TABLES, Database
from support.entries import put_one, run_once, states
from support.examples import divided

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.entries import list_entries, read_entry
from dispatchers.admin.read.entry_filter import WAITING_STATES, Filter
from dispatchers.admin.read.overview import read_overview

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

ODD_OFFSET = timezone(timedelta(hours=23, minutes=59, seconds=59, microseconds=999_999))
ZONES = ("UTC", "America/Los_Angeles", "Pacific/Kiritimati", "Asia/Kathmandu", "Africa/Monrovia")

offsets = st.timedeltas(timedelta(microseconds=1) - timedelta(days=1), timedelta(days=1) - timedelta(microseconds=1))
zones: st.SearchStrategy[tzinfo] = st.one_of(st.just(UTC), offsets.map(timezone), st.timezones())


def at(database: Database, zone: str) -> Database:
    """The database, read by a client in that time zone."""
    if database.name == "sqlite":
        return database
    if database.name == "mariadb":  # its names of zones may not be installed
        zone = "+00:00" if zone == "UTC" else "+13:00"
        session = f"SET tx_isolation = 'READ-COMMITTED', time_zone = '{zone}'"
        return Database(database.owners_url.update_query_dict({"init_command": session}))
    return Database(database.owners_url.update_query_dict({"options": f"-c TimeZone={zone}"}), database.roles)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "due",
    [
        datetime.min.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=ODD_OFFSET),
        datetime(1900, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2001, 2, 3, tzinfo=UTC),
    ],
    ids=["year 1", "before year 1", "1900", "before 1970", "2001"],
)
def test_what_was_due_in_the_past_is_sent_at_once(database: Database, ob: outbox.Outbox, due: datetime) -> None:
    put_one(database, ob)
    put_one(database, ob, due=due)

    settled = run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert settled == 2
    assert {row.due_at for row in database.entries} == {row.created_at for row in database.entries}


@settings(max_examples=divided(over=3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dues=st.lists(st.datetimes(timezones=zones), min_size=1, max_size=8), zone=st.sampled_from(ZONES))
def test_every_due_time_is_refused_or_sent_and_shown(
    database: Database, ob: outbox.Outbox, dues: list[datetime], zone: str
) -> None:
    for table in (TABLES.entry, TABLES.queue, TABLES.settlement):
        database.execute(sa.delete(table))
    app = at(database, zone)
    later, taken = 0, []
    for number, due in enumerate(dues):
        try:
            with app.begin() as session:
                taken.append(ob.enqueue(session, CHARGE, PAYLOAD, parent=f"invoice:{number}", due=due).id)
        except outbox.InvalidValue:
            assert due > datetime(9000, 1, 1, tzinfo=UTC)
        else:
            later += due > datetime.now(UTC)

    with app.dispatchers_engine.connect() as connection:
        listed = list_entries(connection, TABLES, Filter(states=WAITING_STATES), max_entries=100)
        overview = read_overview(connection, TABLES)
        read = [read_entry(connection, TABLES, id).id for id in taken]
    run_once(app, ob, adapters={"stripe": MemoryAdapter()})
    app.dispose()

    assert {entry.id for entry in listed.entries} == set(read) == set(taken)
    assert sum(destination.states["pending"] for destination in overview.destinations) == len(taken)
    found = states(database)
    assert (found["pending"], found["delivered"]) == (later, len(taken) - later)
