"""The layout at scale: bodies of answers in partitions by day. What is stored where, and that every retry gets its answer."""

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.accepted import Checkout
from support.body_partitions import add, days_pass, layout, stored_bodies, switch_on, take_away, today
from support.database import REQUEST, TABLES, Client, Database, statements_of
from support.retention import DAY

import outbox
from outbox import migrations
from outbox.errors import KeyExpired, KeyInFlight, RequestMismatch, SchemaError
from outbox.sql.schema.body_partitions import DAYS_AHEAD, read_layout


@pytest.fixture
def by_day(postgresql: Database) -> Database:
    switch_on(postgresql)
    return postgresql


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, by_day: Database, ob: outbox.Outbox) -> Client:
    return Client(by_day, ob, is_async=request.param == "async")


def numbered(number: int) -> Any:
    def answer(session: Session, claim: outbox.Claim) -> None:
        claim.respond(201, {"order": number})

    return answer


# --- where bodies are stored


def test_a_body_is_in_the_partition_of_its_day_and_is_replayed_from_there(shop: Client, by_day: Database) -> None:
    first = shop.request()

    replayed = shop.request()

    assert replayed == first
    assert stored_bodies(by_day) == [(today(by_day), first.body)]
    (record,) = by_day.records
    assert (record.body, record.body_day) == (b"", today(by_day))


def test_what_was_answered_before_the_switch_is_replayed_from_where_it_is(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    shop = Client(postgresql, ob, is_async=False)
    before = shop.request(numbered(1), key="before")

    switch_on(postgresql)
    after = shop.request(numbered(2), key="after")
    migrations.unpartition(postgresql.engine)
    undone = shop.request(numbered(3), key="undone")

    assert [record.body_day is None for record in sorted(postgresql.records, key=lambda record: record.parent)] == [
        False,  # after
        True,  # before
        True,  # undone
    ]
    for key, response in (("before", before), ("after", after), ("undone", undone)):
        assert shop.request(key=key) == response
    switch_on(postgresql)
    assert shop.request(key="after") == after


def test_yesterdays_body_is_replayed_today(shop: Client, by_day: Database) -> None:
    first = shop.request(retention=3 * DAY)
    days_pass(by_day, 1)

    assert shop.request(retention=3 * DAY) == first
    assert [day for day, _ in stored_bodies(by_day)] == [today(by_day) - DAY]


def test_an_answer_without_a_body_needs_no_partition(shop: Client, by_day: Database) -> None:
    first = shop.request(lambda session, claim: claim.respond(204))

    assert shop.request() == first
    assert stored_bodies(by_day) == []


def test_a_key_that_was_freed_and_used_again_that_day_has_its_new_answer(shop: Client, by_day: Database) -> None:
    shop.request(numbered(1))
    record = TABLES.record
    by_day.execute(sa.update(record).values(replay_until=sa.func.now()))

    second = shop.request(numbered(2))

    assert shop.request() == second
    assert [body for _, body in stored_bodies(by_day)] == [b'{"order":2}']


def test_an_accepted_request_has_its_202_and_then_its_final_response(by_day: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(by_day, ob)
    accepted = checkout.accept()
    assert checkout.accept() == accepted
    days_pass(by_day, 1)
    checkout.on_completed()

    checkout.run_once()

    final = checkout.accept()
    status = checkout.status()
    assert status is not None
    assert final.status != accepted.status
    assert status.response == final
    assert checkout.record.body_day == today(by_day)


def test_a_leased_claims_answer_is_replayed(by_day: Database, ob: outbox.Outbox) -> None:
    def request() -> outbox.Response:
        with ob.leased(by_day.engine, "retry-001", scope="acct_1", content=REQUEST) as claim:
            if not claim.replayed:
                claim.respond(201, {"order": 1})
        return claim.require_response()

    assert request() == request()
    assert [body for _, body in stored_bodies(by_day)] == [b'{"order":1}']


def test_what_refuses_a_retry_refuses_it_in_this_layout_too(shop: Client, by_day: Database) -> None:
    shop.request()

    with pytest.raises(RequestMismatch):
        shop.request(content={"amount": 1})


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_request_answered_after_the_snapshot_is_reported_at_any_level(
    by_day: Database, ob: outbox.Outbox, level: Any
) -> None:
    shop = Client(by_day, ob, is_async=False)
    engine = by_day.new_engine(isolation_level=level)
    with Session(engine) as session, session.begin():
        session.execute(sa.text("SELECT count(*) FROM shop_order"))
        first = shop.request()

        if level == "READ COMMITTED":
            with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
                assert claim.response == first
        else:
            with (
                pytest.raises(KeyInFlight, match="answered after this transaction's snapshot"),
                ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST),
            ):
                pass

    assert shop.request() == first


def test_an_app_of_the_release_before_writes_answers_that_this_one_replays(by_day: Database, ob: outbox.Outbox) -> None:
    """Its INSERT knows neither the column nor the table: the trigger does the rest."""
    shop = Client(by_day, ob, is_async=False)
    first = shop.request()
    kept = [column.name for column in TABLES.record.c if column.name not in ("id", "parent", "body", "body_day")]
    id = ob.idempotent(Session(by_day.engine), "older", scope="acct_1", content=REQUEST)._key.id  # type: ignore[union-attr]
    by_day.execute(
        sa.text(
            f"INSERT INTO outbox_record (id, parent, body, {', '.join(kept)})"
            f" SELECT :id, 'older', 'older', {', '.join(kept)} FROM outbox_record"
        ).bindparams(id=id)
    )

    replayed = shop.request(key="older")

    assert replayed == outbox.Response(first.status, b"older", first.headers)
    assert len(stored_bodies(by_day)) == 2


# --- what a missing partition does


def test_without_todays_partition_a_body_stays_in_its_record(shop: Client, by_day: Database) -> None:
    take_away(by_day, today(by_day))

    first = shop.request()

    assert shop.request() == first
    (record,) = by_day.records
    assert (record.body, record.body_day) == (first.body, None)


def test_a_partition_that_was_detached_by_hand_is_none(shop: Client, by_day: Database) -> None:
    by_day.execute(sa.text(f"ALTER TABLE outbox_body DETACH PARTITION outbox_body_{today(by_day):%Y%m%d}"))

    first = shop.request()

    assert shop.request() == first
    assert by_day.records[0].body_day is None


def test_a_key_whose_body_is_gone_is_refused_as_one_that_is_too_old(shop: Client, by_day: Database) -> None:
    shop.request()
    take_away(by_day, today(by_day))

    with pytest.raises(KeyExpired):
        shop.request()


def test_the_alarm_names_the_day_that_is_missing(by_day: Database) -> None:
    now = today(by_day)
    assert layout(by_day).alarm is None
    migrations.check_partitions(by_day.engine)

    take_away(by_day, now + DAY)

    assert layout(by_day).ahead == 0
    with pytest.raises(SchemaError) as raised:
        migrations.check_partitions(by_day.engine)
    assert str(raised.value) == (
        f"the partition for the response bodies of {now + DAY} is missing: the bodies of that day are stored in the records, and"
        " no request fails. A running dispatcher, or `outbox maintenance`, should have created the partition: find out why it"
        " was not created"
    )


def test_no_alarm_after_the_layout_was_switched_off(by_day: Database) -> None:
    take_away(by_day, today(by_day) + DAY)

    migrations.unpartition(by_day.engine)

    migrations.check_partitions(by_day.engine)


def test_partitions_are_made_ahead_and_each_once(by_day: Database) -> None:
    now = today(by_day)
    assert [day.day for day in layout(by_day).days] == [now + ahead * DAY for ahead in range(DAYS_AHEAD + 1)]
    take_away(by_day, now + DAY)
    take_away(by_day, now + 3 * DAY)

    assert [add(by_day), add(by_day)] == [2, 0]
    assert layout(by_day).ahead == DAYS_AHEAD


# --- what it costs


def test_a_replay_is_one_statement_and_touches_only_its_days_partition(by_day: Database, ob: outbox.Outbox) -> None:
    shop = Client(by_day, ob, is_async=False)
    shop.request(retention=9 * DAY)
    days_pass(by_day, 2)
    for number in range(7):  # as often as it takes a driver to prepare the statement and a server to keep its plan
        shop.request(numbered(number), key=f"other-{number}")
        shop.request(key=f"other-{number}")

    with by_day.session() as session, statements_of(by_day.engine) as statements:
        for _ in range(7):
            with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
                assert claim.replayed
        asked = len(statements)
        locks = "SELECT relation::regclass::text FROM pg_locks WHERE pid = pg_backend_pid() AND relation IS NOT NULL"
        touched = {name for name in session.scalars(sa.text(locks)) if name.startswith("outbox_body")}

    day = today(by_day) - 2 * DAY
    assert asked == 7
    partition = f"outbox_body_{day:%Y%m%d}"
    assert touched == {"outbox_body", "outbox_body_pkey", partition, f"{partition}_pkey"}


def test_a_replay_finds_its_body_by_an_index(by_day: Database, ob: outbox.Outbox) -> None:
    Client(by_day, ob, is_async=False).request()
    (record,) = by_day.records

    with by_day.engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
        plan = connection.execute(
            sa.text(f"EXPLAIN SELECT body FROM outbox_body WHERE id = '{record.id}' AND day = '{record.body_day}'")
        ).scalars()
        steps = "\n".join(plan)

    assert f"Index Scan using outbox_body_{record.body_day:%Y%m%d}_pkey" in steps
    assert steps.count("Scan") == 1


def test_in_the_ordinary_layout_the_function_is_not_called(postgresql: Database, ob: outbox.Outbox) -> None:
    shop = Client(postgresql, ob, is_async=False)
    shop.request()
    with postgresql.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE OR REPLACE FUNCTION outbox_body_of(record_id uuid, on_day date) RETURNS bytea LANGUAGE plpgsql"
            " AS 'BEGIN RAISE EXCEPTION $$called$$; END'"
        )

    assert shop.request().status == 201


# --- the switch


def test_switching_twice_changes_nothing(by_day: Database, ob: outbox.Outbox) -> None:
    shop = Client(by_day, ob, is_async=False)
    first = shop.request()
    before = layout(by_day)

    switch_on(by_day)

    assert layout(by_day) == before
    assert shop.request() == first
    migrations.unpartition(by_day.engine)
    migrations.unpartition(by_day.engine)
    assert not layout(by_day).is_on


def test_sqlite_keeps_the_ordinary_layout_and_says_so(sqlite: Database) -> None:
    for switch in (migrations.partition, migrations.unpartition):
        with pytest.raises(SchemaError) as refused:
            switch(sqlite.engine)
        assert str(refused.value) == (
            "bodies in a table partitioned by day need PostgreSQL, and not its portable mode: elsewhere they stay in the"
            " records, which retention deletes row by row"
        )
    migrations.check_partitions(sqlite.engine)


def test_outdated_tables_are_not_partitioned(postgresql: Database) -> None:
    postgresql.execute(sa.text("ALTER TABLE outbox_record DROP COLUMN body_day"))

    with pytest.raises(SchemaError, match=r"lacks column outbox_record\.body_day"):
        switch_on(postgresql)

    with postgresql.engine.connect() as connection:
        assert read_layout(connection, TABLES) is None
