"""Claims: one suite over PostgreSQL, SQLite, MariaDB, and the portable SQL on PostgreSQL."""

import asyncio
import json
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.claims import Bench, moves
from support.daemons import wait_for
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    LEASE,
    change,
    claim,
    claim_at_once,
    claim_one,
    claim_request,
    put,
    put_one,
    quota,
    settle,
)

import outbox
from dispatchers.maintenance.jobs import report_gauges
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_postgresql, claims_rows, exchange
from dispatchers.store.records import gauges as store_gauges
from dispatchers.store.records.gauges import Gauge
from dispatchers.transitions import Settle
from outbox.sql.errors.driver import is_passing
from outbox.times import EPOCH, NEVER

TOKEN = UUID(int=7)


@pytest.fixture(params=["postgresql", "portable on postgresql", "sqlite", "mariadb"])
def bench(request: pytest.FixtureRequest, ob: outbox.Outbox) -> Bench:
    database = request.getfixturevalue(request.param.rpartition(" ")[2])
    store = DatabaseStore(database.engine, ob.configuration)
    if request.param.startswith("portable"):
        store._exchanges._sql = claims_rows
    return Bench(database, store, ob)


# --- what a claim takes


def test_a_claim_takes_the_oldest_due_of_each_wanted_destination(bench: Bench) -> None:
    crm = [bench.put() for _ in range(4)]
    mail = [bench.put(operation="mail.send") for _ in range(3)]
    bench.put(operation="sms.send")
    change(bench.database, crm[3], due_at=bench.row(crm[0]).due_at - HOUR)

    claimed = claim(bench.store, quota("crm", 2), quota("mail", 2))

    assert {entry.id for entry in claimed} == {crm[3], crm[0], mail[0], mail[1]}


def test_a_claim_never_takes_more_than_its_permits_or_than_max_entries(bench: Bench) -> None:
    put(bench.database, bench.ob, count=10)
    put(bench.database, bench.ob, "mail.send", count=10)

    by_permits = claim(bench.store, quota("crm", 3), quota("mail", 1))
    by_total = claim(bench.store, quota("crm", 4), quota("mail", 8), max_entries=5)
    of_none = claim(bench.store, quota("crm", 4), max_entries=0)

    assert [entry.destination for entry in by_permits].count("crm") == 3
    assert [entry.destination for entry in by_permits].count("mail") == 1
    assert len(by_total) == 5
    assert of_none == []


def test_a_claim_never_takes_more_with_callbacks_than_max_callbacks(bench: Bench) -> None:
    for operation in ("bank.do", "crm.upsert", "mail.send"):
        put(bench.database, bench.ob, operation, count=10)
    called = [quota(name, permits)._replace(called_back=permits) for name, permits in (("bank", 4), ("mail", 3))]

    claimed = Counter(
        entry.destination for entry in claim(bench.store, called[0], quota("crm", 4), called[1], max_callbacks=5)
    )
    of_none = claim(bench.store, called[0], quota("crm", 4), max_callbacks=0)

    assert claimed == {"bank": 4, "crm": 4, "mail": 1}
    assert {entry.destination for entry in of_none} == {"crm"}


def test_a_claim_returns_what_was_enqueued_and_what_the_row_now_says(bench: Bench) -> None:
    parent = outbox.ParentKey("k", scope="ada", source="http")
    given = {"discriminator": "line 1", "options": {"account": "acct_1"}, "payload": {"b": 1, "a": "é"}}
    id = bench.put(parent=parent, destination="crm", **given)

    entry = claim_one(bench.store)

    row, written = bench.row(id), bench.database.entries[0]
    for name in ("deliveries", "attempts", "maybe_sent", "in_doubt_since", "key_epoch", "sent_as", "leased_at"):
        assert getattr(entry, name) == getattr(row, name)
    for name in ("id", "operation", "payload", "tag", "kid", "schema_version"):
        assert getattr(entry, name) == getattr(written, name)
    assert (entry.options, entry.headers) == (json.loads(written.options), json.loads(written.headers))
    fields = asyncio.run(bench.store.key_fields(id))
    assert outbox.ParentKey(fields.parent, scope=fields.scope, source=fields.source) == parent
    assert entry.lease_token == row.lease_token
    assert entry.queued_at == row.due_at
    assert isinstance(entry.id, UUID)
    assert entry.leased_at.utcoffset() == timedelta(0)


# --- taking over


def test_a_process_that_falls_silent_in_its_claim_does_not_keep_the_entry(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    put_one(postgresql, ob)
    others = DatabaseStore(postgresql.engine, ob.configuration)

    with postgresql.engine.connect() as silent:
        silent.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '300ms'")
        assert len(claims_postgresql.claim(silent, TABLES, claim_request())) == 1
        assert claim(others) == []
        wait_for(lambda: claim(others), "the server to end the silent one")
        with pytest.raises(sa.exc.DBAPIError, match="idle-in-transaction timeout") as ended:
            silent.exec_driver_sql("SELECT 1")
        assert is_passing(ended.value)


@pytest.mark.parametrize(("own", "then"), [("0", "1min"), ("5s", "5s"), ("1h", "1min")])
def test_a_claim_may_be_silent_for_a_minute_or_less_if_the_session_says(
    postgresql: Database, ob: outbox.Outbox, own: str, then: str
) -> None:
    put_one(postgresql, ob)
    asked = "SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('synchronous_commit')"
    engine = postgresql.new_engine(pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = '{own}'")
        connection.exec_driver_sql("SET synchronous_commit = off")
        connection.commit()
    settings = []
    sa.event.listen(engine, "commit", lambda connection: settings.append(connection.exec_driver_sql(asked).one()))

    assert len(claim(DatabaseStore(engine, ob.configuration))) == 1

    assert settings[-1] == (then, "on")
    with engine.connect() as connection:
        assert connection.exec_driver_sql(asked).one() == (own, "off")
    engine.dispose()


@pytest.mark.parametrize("is_late", [False, True])
def test_of_a_claim_that_outlasts_its_leases_only_what_it_settles_commits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """With an async driver a blocked event loop keeps the transaction open. Other processes would take its leases over."""
    bench.put()
    settled = claim_one(bench.store)
    id = bench.put()
    times = iter([0.0, LEASE.total_seconds() * is_late, 0.0])
    monkeypatch.setattr(exchange, "steady_clock", lambda: next(times))

    found = asyncio.run(bench.store.exchange([(settled, Settle("delivered", 1))], claim_request()))

    assert found.settled == {settled.lease}
    assert [entry.id for entry in found.claimed] == ([] if is_late else [id])
    row = bench.row(id)
    assert (row.state, row.deliveries) == (("pending", 0) if is_late else ("sending", 1))


def test_two_claimers_at_once_never_get_the_same_entry(postgresql: Database, ob: outbox.Outbox) -> None:
    ids = put(postgresql, ob, count=200)

    taken = [entry.id for entry in claim_at_once(postgresql, ob, permits=8)]

    assert sorted(taken) == sorted(ids)
    assert {row.deliveries for row in postgresql.queue} == {1}


# --- the other questions


@pytest.mark.parametrize("names", [[], ["crm"], ["a", "b", "crm", "ü", "zz"], [f"host-{n:03}" for n in range(120)]])
def test_the_destinations_are_those_with_unsettled_entries(bench: Bench, names: list[str]) -> None:
    for name in names:
        put(bench.database, bench.ob, destination=name, count=2 if len(names) < 10 else 1)

    assert sorted(asyncio.run(bench.store.survey()).destinations) == sorted(names)


def test_gauges_count_unsettled_entries_by_destination_and_state(bench: Bench) -> None:
    put(bench.database, bench.ob, count=3)
    put(bench.database, bench.ob, "mail.send")
    (entry,) = claim(bench.store, quota(permits=1))
    settle(bench.store, (entry, moves(entry)["uncertain"]))

    gauges = asyncio.run(report_gauges(bench.store.run, TABLES))

    assert gauges == {"crm": Gauge({"pending": 2, "uncertain": 1}, True), "mail": Gauge({"pending": 1}, True)}


def test_gauges_of_a_long_queue_say_that_there_is_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bench.database, bench.ob, count=5)
    put(bench.database, bench.ob, "mail.send")
    (entry,) = claim(bench.store, quota(permits=1))
    settle(bench.store, (entry, moves(entry)["uncertain"]))
    monkeypatch.setattr(store_gauges, "MAX_ROWS_OF_ONE", 3)
    monkeypatch.setattr(store_gauges, "ROWS_OF_ONE_MIN", 3)

    gauges = asyncio.run(report_gauges(bench.store.run, TABLES))

    assert gauges == {"crm": Gauge({"pending": 2, "uncertain": 1}, False), "mail": Gauge({"pending": 1}, True)}


# --- what the database itself refuses


@pytest.mark.every_value
@pytest.mark.parametrize(
    "broken",
    [
        {"state": "done"},
        {"state": "delivered"},
        {"state": "sending"},
        {"lease_token": TOKEN, "lease_until": NEVER, "leased_at": EPOCH},
        {"state": "sending", "lease_token": TOKEN, "leased_at": EPOCH},
        {"state": "sending", "lease_token": TOKEN, "lease_until": NEVER},
        {"lease_until": NEVER},
        {"leased_at": EPOCH},
        {"in_doubt_since": EPOCH},
        {"attempts": -1},
        {"deliveries": -1},
        {"key_epoch": -1},
    ],
    ids=lambda broken: ", ".join(f"{name}={str(value)[:4]}" for name, value in broken.items()),
)
def test_the_database_refuses_half_a_lease_and_unknown_states(
    database: Database, ob: outbox.Outbox, broken: dict[str, Any]
) -> None:
    id = put_one(database, ob)

    with pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError)) as caught:
        change(database, id, **broken)
    assert "CONSTRAINT" in str(caught.value).upper()


# --- closing


@pytest.mark.parametrize("kind", ["Engine", "AsyncEngine", "URL"])
def test_closing_disposes_of_an_engine_only_if_it_was_made_here(
    database: Database, ob: outbox.Outbox, kind: str
) -> None:
    disposed: list[str] = []
    inconclusive = {"Engine": database.new_engine, "AsyncEngine": database.async_engine, "URL": lambda: database.url}[
        kind
    ]()
    store = DatabaseStore(inconclusive, ob.configuration)
    sa.event.listen(store._engine, "engine_disposed", lambda engine: disposed.append("disposed"))

    asyncio.run(store.close())

    assert disposed == (["disposed"] if kind == "URL" else [])
