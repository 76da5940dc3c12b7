"""One row that the database refuses, or that cannot be read, stops no other: it is set aside and reported."""

import asyncio
import logging
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.entries import (
    claim,
    claim_request,
    dispatcher,
    put,
    put_one,
    queue_row,
    quota,
    reasons,
    run_once,
    settle,
    settlement_row,
    state,
    states,
)
from support.ordering import OrderedService, put_in_group, send_all

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, Retry, Settle, Transition
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb

NO_OUTCOMES = [
    "no JSON",
    "[]",
    '{"known": 7}',
    '{"known": {"state": "sold"}}',
    '{"known": {"state": "cancelled", "decided_at": "2026-01-31"}}',
    '{"lookup": {"why": "a crash", "inconclusive": "two", "deliveries": 1, "fenced_at": "2026-01-31T12:00:00+00:00"}}',
    '{"lookup": {"why": "a crash", "inconclusive": 2, "deliveries": 1, "fenced_at": "soon"}}',
]
INSTANTS = ["-infinity", "infinity", "4000-01-01 BC", "0001-01-01 00:00:00+15", "20000-01-01"]
MALFORMED = [
    *(f"UPDATE outbox_queue SET deliveries = {n}" for n in (2**31 - 1,)),
    "UPDATE outbox_queue SET attempts = 2147483647, state = 'sending', lease_token = id, leased_at = due_at,"
    " lease_until = due_at",
    *(f"UPDATE outbox_entry SET due_at = '{instant}'" for instant in INSTANTS),
    *(f"UPDATE outbox_entry SET created_at = '{instant}'" for instant in INSTANTS),
    *(f"UPDATE outbox_queue SET first_leased_at = '{instant}'" for instant in INSTANTS),
    *(f"UPDATE outbox_queue SET outcome = '{text}'" for text in NO_OUTCOMES),
    "UPDATE outbox_entry SET options = '[]'",
    "UPDATE outbox_entry SET headers = '{'",
    *(f"UPDATE outbox_queue SET maybe_sent = true, in_doubt_since = '{instant}'" for instant in INSTANTS),
]


def drop_checks(database: Database) -> None:
    """As before they were there: rows of old, or of an owner who knows better."""
    found = sa.text(
        "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'c'"
        " AND conrelid IN ('outbox_queue'::regclass, 'outbox_entry'::regclass)"
    )
    with database.engine.begin() as connection:
        for table, name in connection.execute(found).all():
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP CONSTRAINT {name}")


def execute(database: Database, statement: str) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql(statement)


def holds(database: Database) -> dict[UUID, str]:
    with database.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT id, suspended_reason FROM outbox_queue WHERE suspended_reason IS NOT NULL"
        )
        return {row.id: row.suspended_reason for row in rows}


def warned(caplog: pytest.LogCaptureFixture, id: UUID) -> list[str]:
    """The log lines of an entry, without those of a group."""
    return [
        record.message for record in caplog.records if str(id) in record.message and record.levelno >= logging.WARNING
    ]


def test_a_claim_passes_over_every_row_that_cannot_be_read(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    drop_checks(postgresql)

    @settings(
        max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.lists(st.sampled_from(MALFORMED), min_size=1, max_size=3), st.integers(0, 3))
    def passes_over(malformed: list[str], before: int) -> None:
        caplog.clear()
        for table in (TABLES.queue, TABLES.entry, TABLES.settlement):
            postgresql.execute(table.delete())
        put(postgresql, ob, count=before)
        bad = put(postgresql, ob, count=len(malformed))
        put(postgresql, ob, count=4)
        for id, statement in zip(bad, malformed, strict=True):
            execute(postgresql, f"{statement} WHERE id = '{id}'")
        service = MemoryAdapter()

        run_once(postgresql, ob, adapters={"crm": service})
        run_once(postgresql, ob, adapters={"crm": service})

        honest = {delivery.id for delivery in service.deliveries} - {*bad}
        assert len(honest) == before + 4
        for id in holds(postgresql):
            assert id in bad
            assert len(warned(caplog, id)) == 1
        left = {*bad} - holds(postgresql).keys()
        assert all(settlement_row(postgresql, id) is not None for id in left)

    passes_over()


def test_a_row_that_is_set_aside_is_claimed_again_once_it_is_mended(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    drop_checks(postgresql)
    bad, other = put(postgresql, ob, count=2)
    execute(postgresql, f"UPDATE outbox_queue SET deliveries = {2**31 - 1} WHERE id = '{bad}'")
    store = DatabaseStore(postgresql.engine, ob.configuration)

    assert [entry.id for entry in claim(store)] == [other]

    assert holds(postgresql) == {bad: "its row cannot be claimed (NumericValueOutOfRange 22003)"}
    assert queue_row(postgresql, bad).due_at == NEVER
    assert warned(caplog, bad) == [
        f"entry {bad} suspended: its row cannot be claimed (NumericValueOutOfRange 22003); other entries are still sent; repair"
        " its row, then run `outbox release`"
    ]
    execute(
        postgresql,
        f"UPDATE outbox_queue SET deliveries = 0, suspended_reason = NULL, due_at = now() WHERE id = '{bad}'",
    )
    assert [entry.id for entry in claim(store)] == [bad]


@pytest.mark.every_value
@pytest.mark.parametrize("text", NO_OUTCOMES)
def test_an_entry_whose_stored_outcome_cannot_be_read_is_set_aside(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    bad, other = put(database, ob, count=2)
    database.execute(sa.update(TABLES.queue).where(TABLES.queue.c.id == bad).values(outcome=text))
    service = MemoryAdapter()

    run_once(database, ob, adapters={"crm": service})

    assert [delivery.id for delivery in service.deliveries] == [other]
    assert queue_row(database, bad).suspended_reason == "its row cannot be claimed (MalformedOutcome)"
    assert len(warned(caplog, bad)) == 1
    assert text not in caplog.text


# --- outcomes that the database refuses

REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW)::text LIKE '%{what}%' THEN RAISE EXCEPTION 'refused'; END IF;
    RETURN NEW;
END $$
"""


def refuse(database: Database, what: str, *tables: str) -> None:
    """Have the database refuse rows that contain this text."""
    with database.engine.begin() as connection:
        connection.execute(sa.text(REFUSE.format(what=what)))
        for table in tables:
            connection.exec_driver_sql(
                f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON outbox_{table} FOR EACH ROW EXECUTE FUNCTION refuse()"
            )


DELIVERED = Settle("delivered", 1, result={"of": "poison"})
FAILED = Settle("failed", 1, reason="poison")
WAITS = Retry(NEVER - NEVER, "poison", 1, False, None)


@pytest.mark.parametrize(
    ("change", "what", "tables", "then"),
    [
        (DELIVERED, "poison", ("settlement",), "delivered"),
        (FAILED, "poison", ("settlement", "event"), "failed"),
        (WAITS, "poison", ("event", "queue"), "retry"),
        (DELIVERED, "{id}", ("settlement",), "uncertain"),
        (FAILED, "{id}", ("settlement", "event"), "suspended"),
    ],
)
def test_an_outcome_that_the_database_refuses_is_ended_in_another_way(
    postgresql: Database,
    ob: outbox.Outbox,
    caplog: pytest.LogCaptureFixture,
    change: Transition,
    what: str,
    tables: tuple[str, ...],
    then: str,
) -> None:
    """The end without its reason, else doubt, else suspension; and what was settled with it is settled."""
    ids = put(postgresql, ob, count=9)
    more = put_one(postgresql, ob, "mail.send")
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claimed = {entry.id: entry for entry in claim(store)}
    bad = ids[4]
    refuse(postgresql, what.format(id=bad), *tables)
    endings: list[tuple[ClaimedEntry, Transition]] = [
        (entry, change if entry.id == bad else Settle("delivered", 1)) for entry in claimed.values()
    ]

    exchange = asyncio.run(store.exchange(endings, claim_request(quota("mail"))))

    assert exchange.settled == {entry.lease for entry in claimed.values()}
    assert [entry.id for entry in exchange.claimed] == [more]
    assert states(postgresql)["delivered"] == 8 + (then == "delivered")
    row = queue_row(postgresql, bad)
    if then == "suspended":
        assert (row.state, row.suspended_reason, row.due_at) == (
            "uncertain",
            "the database refused its outcome (RaiseException P0001)",
            NEVER,
        )
    else:
        assert state(postgresql, bad) == then
    assert row is None or row.lease_token is None
    (record,) = warned(caplog, bad)
    assert "(RaiseException P0001)" in record
    assert "poison" not in record


def test_an_outage_between_two_halves_loses_no_lease(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcomes of the first half are stored then, and only the others are settled again."""
    put(database, ob, count=4)
    engine, settled = sa.create_engine(database.url), list[str]()
    refusal = sa.exc.IntegrityError("settle", None, Exception())
    outage = sa.exc.OperationalError("settle", None, ConnectionRefusedError())

    def fail(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if "INTO outbox_settlement" in statement:
            settled.append(statement)
            if (error := {1: refusal, 2: refusal, 4: outage}.get(len(settled))) is not None:
                raise error

    sa.event.listen(engine, "before_cursor_execute", fail)
    service = MemoryAdapter()
    working = dispatcher(engine, ob, adapters={"crm": service})
    with pytest.raises(sa.exc.OperationalError) as raised:
        asyncio.run(working.run_once())
    asyncio.run(working.run_once())
    engine.dispose()

    assert raised.value is outage
    assert (len(service.deliveries), states(database)) == (4, {"delivered": 4})
    assert "leases were lost" not in caplog.text


@pytest.mark.owner
@pytest.mark.parametrize("number", [1644, 1406, 1264, 1366, 1292, 1364, 1452])
def test_an_outcome_that_mariadb_refuses_stops_no_other(
    mariadb: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The drivers drop its SQLSTATE, and the number alone says that the row is the cause."""
    ids = put(mariadb, ob, count=5)
    store = DatabaseStore(mariadb.engine, ob.configuration)
    claimed = claim(store)
    refusing = f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'it is poison'"
    condition = "IF COALESCE(NEW.result, '') LIKE '%%poison%%' THEN"
    execute(
        mariadb,
        f"CREATE TRIGGER refuse BEFORE INSERT ON outbox_settlement FOR EACH ROW {condition} {refusing}; END IF",
    )

    settled = settle(store, *[(e, DELIVERED if e.id == ids[2] else Settle("delivered", 1)) for e in claimed])

    assert settled == {*ids}
    assert states(mariadb) == {"delivered": 5}
    (record,) = warned(caplog, ids[2])
    assert "poison" not in record


@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "mariadb"])
def test_text_that_the_driver_cannot_send_harms_no_other_outcome(
    request: pytest.FixtureRequest, ob: outbox.Outbox, kind: str
) -> None:
    database: Database = request.getfixturevalue(kind)
    ids = put(database, ob, count=5)
    store = DatabaseStore(database.engine, ob.configuration)
    claimed = claim(store)
    surrogate = Settle("failed", 1, reason="\udc80")  # PyMySQL would send this one as a byte

    settled = settle(store, *[(e, surrogate if e.id == ids[2] else Settle("delivered", 1)) for e in claimed])

    assert settled == {*ids}
    assert states(database) == {"delivered": 4, "failed": 1}


# --- a queue that is older than the settlements


def restore_to_queue(database: Database, row: sa.Row[tuple[object, ...]]) -> None:
    """As the restore of the queue alone brings a row back: triggers do not fire then."""
    with database.engine.begin() as connection:
        if database.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        connection.execute(TABLES.queue.insert().values(row._asdict()))


def test_what_has_ended_is_not_sent_again_though_it_is_in_the_queue(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    service = MemoryAdapter(lambda delivery: Rejected("no"))
    ended = put_one(database, ob)
    before = queue_row(database, ended)
    run_once(database, ob, adapters={"crm": service})
    settlement = settlement_row(database, ended)
    restore_to_queue(database, before)
    other = put_one(database, ob)

    run_once(database, ob, adapters={"crm": service})

    assert [delivery.id for delivery in service.deliveries] == [ended, other]
    assert (queue_row(database, ended), settlement_row(database, ended)) == (None, settlement)
    assert reasons(database, ended) == ["no", "it was in the queue although it had ended as failed"]
    assert len(warned(caplog, ended)) == 1


def test_a_group_continues_after_an_entry_that_had_ended_before(database: Database, ob: outbox.Outbox) -> None:
    service = OrderedService()
    (first,) = put_in_group(database, ob, "first")
    before = queue_row(database, first)
    send_all(database, ob, service)
    restore_to_queue(database, before)
    put_in_group(database, ob, "second", "third")

    send_all(database, ob, service)

    assert service.came == {"ada": ["first", "second", "third"]}


def test_an_entry_that_gets_a_settlement_meanwhile_harms_no_other(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    ids = put(database, ob, count=5)
    store = DatabaseStore(database.engine, ob.configuration)
    claimed = claim(store)
    database.execute(
        TABLES.settlement.insert().values(
            id=ids[3], state="delivered", deliveries=1, attempts=1, key_epoch=0, settled_at=NEVER
        )
    )

    settled = settle(store, *[(entry, Settle("failed", 1, reason="no")) for entry in claimed])

    assert settled == {*ids}
    assert states(database) == {"failed": 4, "delivered": 1}
    assert len(warned(caplog, ids[3])) == 1


def test_a_refusal_that_is_no_rows_fault_keeps_every_outcome(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=3)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claimed = claim(store)
    execute(postgresql, "ALTER TABLE outbox_settlement RENAME TO gone")

    with pytest.raises(outbox.SchemaError):
        settle(store, *[(entry, Settle("delivered", 1)) for entry in claimed])

    execute(postgresql, "ALTER TABLE gone RENAME TO outbox_settlement")
    assert len(settle(store, *[(entry, Settle("delivered", 1)) for entry in claimed])) == 3


def test_a_single_outcome_in_doubt_blocks_its_group(postgresql: Database, ob: outbox.Outbox) -> None:
    """As any other that became uncertain does."""
    first, second = put_in_group(postgresql, ob, "first", "second")
    store = DatabaseStore(postgresql.engine, ob.configuration)
    (head,) = claim(store)
    refuse(postgresql, str(first), "settlement")

    assert settle(store, (head, DELIVERED)) == {first}

    assert (state(postgresql, first), claim(store)) == ("uncertain", [])
    assert state(postgresql, second) in ("pending", "retry")
