"""What `enqueue` stores, to the byte, whatever the kind of session, and when the entry is due."""

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.database import CHARGE, PAYLOAD, TABLES, Database, Order, statements_of
from support.entries import put_one, run_once, states
from support.examples import divided

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.entries import list_entries, read_entry
from dispatchers.admin.read.entry_filter import WAITING_STATES, Filter
from dispatchers.admin.read.overview import read_overview

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

NEXT_ID = sa.text("SELECT CAST(CAST(pg_current_xact_id() AS text) AS bigint)")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def commit_with_session(database, work):
    with Session(database.engine) as session:
        work(session)
        session.commit()


def commit_with_scoped_session(database, work):
    session = scoped_session(sessionmaker(database.engine))
    work(session)
    session.commit()
    session.remove()


def commit_with_async_session(database, work):
    async def commit():
        async with AsyncSession(database.async_engine()) as session:
            work(session)
            await session.commit()

    asyncio.run(commit())


def commit_with_async_scoped_session(database, work):
    async def commit():
        session = async_scoped_session(async_sessionmaker(database.async_engine()), asyncio.current_task)
        work(session)
        await session.commit()
        await session.remove()

    asyncio.run(commit())


SESSIONS = [
    commit_with_session,
    commit_with_scoped_session,
    commit_with_async_session,
    commit_with_async_scoped_session,
]


def only(rows):
    (row,) = rows
    return row


# --- what is stored


@pytest.mark.parametrize("commit", SESSIONS)
def test_an_entry_commits_with_the_order_whatever_the_kind_of_session(database, ob, commit):
    def work(session):
        session.add(Order(customer="ada", amount=2000))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")

    commit(database, work)

    assert database.counts() == {"orders": 1, "records": 0, "entries": 1, "queue": 1}


@pytest.mark.parametrize("commit", SESSIONS)
def test_an_entry_alone_is_enough_to_make_the_commit_flush(database, ob, commit):
    commit(database, lambda session: ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42"))

    assert database.operations() == [CHARGE]


def test_the_entry_row_holds_what_was_asked_for(database, ob):
    parent = outbox.ParentKey("retry-001", scope="acct_1", source="http")

    with database.begin() as session:
        entry = ob.enqueue(
            session,
            CHARGE,
            PAYLOAD,
            parent=parent,
            discriminator="line:7",
            destination="stripe:acct_9",
            options={"api_version": "2026-06-30", "account": "acct_9"},
            ordering_key="customer:ada",
        )

    row = only(database.entries)._asdict()
    created_at, due_at, parent_id = row.pop("created_at"), row.pop("due_at"), row.pop("parent_id")
    assert row == {
        "id": entry.id,
        "env": "test",
        "scope": "acct_1",
        "source": "http",
        "parent": "retry-001",
        "operation": CHARGE,
        "discriminator": "line:7",
        "kid": "k1",
        "tag": row["tag"],
        "record_id": None,
        "destination": "stripe:acct_9",
        "payload": b'{"amount":2000,"currency":"eur"}',
        "options": '{"api_version":"2026-06-30","account":"acct_9"}',
        "headers": "{}",
        "ordering_key": "customer:ada",
        "schema_version": 1,
    }
    assert len(row["tag"]) == 32
    assert created_at.tzinfo is not None
    assert due_at == created_at
    assert isinstance(parent_id, UUID)


def test_the_queue_row_is_pending_and_untouched(database, ob):
    with database.begin() as session:
        entry = ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", ordering_key="customer:ada")

    row = only(database.queue)._asdict()
    assert row.pop("due_at") == only(database.entries).due_at
    assert row == {
        "id": entry.id,
        "destination": "stripe",
        "state": "pending",
        "lease_until": None,
        "lease_token": None,
        "leased_at": None,
        "first_leased_at": None,
        "deliveries": 0,
        "attempts": 0,
        "maybe_sent": False,
        "in_doubt_since": None,
        "key_epoch": 0,
        "sent_as": None,
        "ordering_key": "customer:ada",
        "position": 1,
        "suspended_reason": None,
        "known": None,
        "outcome": None,
        "callback": None,
        "waiting_since": None,
        "fair": None,
        "scope": None,
    }


def test_the_stored_tag_is_the_one_of_the_returned_child_key(database, ob):
    with database.begin() as session:
        entry = ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", discriminator="7")

    assert entry.child_key == ob.child_key("invoice:42", CHARGE, "7")
    assert entry.child_key == outbox.keys.encode_native(only(database.entries).tag)


def test_entries_of_one_parent_share_its_id_and_others_have_another(database, ob):
    with database.begin() as session:
        for discriminator in ("a", "b"):
            ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", discriminator=discriminator)
        ob.enqueue(session, CHARGE, PAYLOAD, parent=outbox.ParentKey("invoice:42", scope="other tenant"))

    ids = {(row.scope, row.discriminator): row.parent_id for row in database.entries}
    assert ids["", "a"] == ids["", "b"] != ids["other tenant", ""]


def test_an_entry_inside_a_claim_takes_its_parent_and_names_its_record(database, ob):
    with database.begin() as session, ob.idempotent(session, "retry-001", scope="acct_1", content={}) as claim:
        ob.enqueue(session, CHARGE, PAYLOAD)
        ob.enqueue(session, "email.send", {}, parent="invoice:42")
        claim.respond(201)

    record = only(database.records)
    charge, email = sorted(database.entries, key=lambda entry: entry.operation, reverse=True)
    assert (charge.parent, charge.scope, charge.source) == ("retry-001", "acct_1", "http")
    assert charge.parent_id == charge.record_id == record.id
    assert (email.parent, email.scope, email.source) == ("invoice:42", "", "app")
    assert email.record_id == record.id != email.parent_id


@pytest.mark.owner
def test_a_tables_schema_and_prefix_are_used_as_given(postgresql):
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", schema="My shop", prefix="Its-")
    postgresql.execute(sa.schema.CreateSchema("My shop"))
    ob.configuration.tables.metadata.create_all(postgresql.engine)

    with postgresql.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:43")

    assert len(postgresql.rows(ob.configuration.tables.entry)) == 2
    assert postgresql.entries == []


# --- when


def test_without_due_an_entry_is_due_when_it_was_created(database, ob):
    with database.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")

    row = only(database.entries)
    assert row.due_at == row.created_at


def test_a_timedelta_counts_from_the_databases_now(database, ob):
    delay = timedelta(days=3, microseconds=7)

    with database.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", due=delay)
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:43", due=delay)

    assert [row.due_at - row.created_at for row in database.entries] == [delay, delay]
    assert [row.due_at for row in database.queue] == [row.due_at for row in database.entries]


def test_an_aware_datetime_is_kept_to_the_microsecond(database, ob):
    due = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=45)))

    with database.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", due=due)

    assert only(database.entries).due_at == only(database.queue).due_at == due
    assert only(database.entries).due_at.utcoffset() is not None


# --- payloads


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ({"b": 1, "a": [True, None]}, b'{"b":1,"a":[true,null]}'),
        ({"emoji": "🦆 é"}, '{"emoji":"🦆 é"}'.encode()),
        ("a NUL \0 travels escaped", rb'"a NUL \u0000 travels escaped"'),
        (None, b"null"),
        (1e22, b"1e+22"),
    ],
)
def test_a_payload_is_stored_as_compact_utf8_in_the_callers_order(database, ob, payload, stored):
    with database.begin() as session:
        ob.enqueue(session, CHARGE, payload, parent="invoice:42")

    assert only(database.entries).payload == stored


@given(payloads=st.lists(JSON, min_size=1, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_json_is_enqueued_parses_back_equal(database, ob, payloads):
    database.execute(sa.delete(ob.configuration.tables.entry))
    database.execute(sa.delete(ob.configuration.tables.queue))

    with database.begin() as session:
        for number, payload in enumerate(payloads):
            ob.enqueue(session, CHARGE, payload, parent="p", discriminator=str(number))

    stored = {int(row.discriminator): json.loads(row.payload) for row in database.entries}
    assert stored == dict(enumerate(payloads))


def test_a_payload_of_exactly_256_kib_is_taken(database, ob):
    payload = "x" * (256 * 1024 - len('""'))

    with database.begin() as session:
        ob.enqueue(session, CHARGE, payload, parent="invoice:42")

    assert len(only(database.entries).payload) == 256 * 1024


def test_one_byte_more_than_256_kib_is_refused_without_showing_it(database, ob):
    payload = "x" * (256 * 1024 - len('""') - 1) + "é"

    with database.session() as session:
        with pytest.raises(outbox.NotSerializable) as caught:
            ob.enqueue(session, CHARGE, payload, parent="invoice:42")
        session.commit()

    assert str(caught.value) == (
        "the payload has 262145 bytes of JSON, and at most 262144 are allowed: store the large part elsewhere and enqueue a"
        " reference to it"
    )
    assert database.entries == []


def test_the_payloads_limit_can_be_set(database):
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", max_payload_bytes=10)

    with database.begin() as session:
        ob.enqueue(session, CHARGE, "12345678", parent="invoice:42")
        with pytest.raises(outbox.NotSerializable, match="has 11 bytes of JSON, and at most 10 are allowed"):
            ob.enqueue(session, CHARGE, "123456789", parent="invoice:43")


def test_options_that_the_outbox_declares_are_stored(database):
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", options={"region"})

    with database.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", options={"region": "eu"})

    assert only(database.entries).options == '{"region":"eu"}'


# --- what it costs


@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_flush_writes_its_entries_and_queue_rows_in_one_statement(postgresql, ob, count):
    with postgresql.session() as session:
        session.connection()
        for number in range(count):
            ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", discriminator=str(number))

        with statements_of(postgresql.engine) as sent:
            session.commit()

    assert len(sent) == 1
    assert len(postgresql.entries) == len(postgresql.queue) == count


def test_a_transaction_with_entries_costs_a_round_trip_and_an_id_more(postgresql, ob):
    def cost(entries):
        with postgresql.engine.begin() as connection:
            before = connection.scalar(NEXT_ID)
        with statements_of(postgresql.engine) as sent, postgresql.begin() as session:
            session.add(Order(customer="ada", amount=2000))
            for _ in range(entries):
                ob.enqueue(session, CHARGE, PAYLOAD, parent=f"invoice:{uuid4()}")
        with postgresql.engine.begin() as connection:
            return len(sent), connection.scalar(NEXT_ID) - before

    # The least of some rounds: the server draws ids for others, too.
    without, with_entries = (map(min, zip(*(cost(entries) for _ in range(3)), strict=True)) for entries in (0, 10))

    more = [after - before for before, after in zip(without, with_entries, strict=True)]
    assert more[0] == 1
    assert more[1] <= 1  # the hint's


def test_enqueue_itself_sends_nothing(database, ob):
    with database.session() as session, statements_of(database.engine) as sent:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", due=datetime.now(UTC))

        assert sent == []


# --- When an entry is due: whatever the app gives, it is refused at once, or sent in its time and shown to everyone.


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
        level = "tx_isolation" if database.server == "mariadb" else "transaction_isolation"
        session = f"SET {level} = 'READ-COMMITTED', time_zone = '{zone}'"
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
