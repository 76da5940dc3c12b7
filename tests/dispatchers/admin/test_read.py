"""What operators read: what a key or a part of an answer leads to, requests, the summary, and the pages of a list."""

import json
import time
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.accepted import Checkout
from support.cli_runner import put_ended, put_uncertain
from support.database import TABLES, Database
from support.entries import age, change, put, put_one, run_once

import outbox
from dispatchers import Delivered
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause
from dispatchers.admin.read import counts, destinations
from dispatchers.admin.read.counts import Count, count_rows, count_uncertain
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.keyset import following
from dispatchers.admin.read.plain_values import Place, plain
from dispatchers.admin.read.requests import RequestFilter, list_requests, read_request
from dispatchers.admin.read.search import MAX_FOUND, Found, find
from dispatchers.admin.read.summary import read_summary
from dispatchers.admin.read.table_health import read_database_health
from dispatchers.errors import EntryNotFound
from outbox.errors import InvalidValue
from outbox.keys import Tag, encode_hex, encode_native
from outbox.sql.clock import clock_plus
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.column_types import Instant
from outbox.times import MAX_SPAN, NEVER


def search(database: Database, text: str, **settings: Any) -> Found:
    with database.engine.begin() as connection:
        return find(connection, TABLES, text, **settings)


def ids(found: Found) -> list[UUID]:
    return [entry.id for entry in found.entries]


def test_the_beginning_of_an_id_is_found(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    id = put_one(database, ob)

    assert ids(search(database, id.hex[:12])) == [id]
    assert ids(search(database, f" {str(id).upper()} ")) == [id]


@pytest.mark.parametrize("ended", [False, True])
def test_a_parent_key_is_found_without_its_scope_and_source(database: Database, ob: outbox.Outbox, ended: bool) -> None:
    make = put_ended if ended else put_uncertain
    parent = outbox.ParentKey("8e03978e-40d5", scope="acct_1", source="http")
    put(database, ob, count=2)
    id = make(database, ob, parent=parent)

    assert ids(search(database, "8e03978e-40d5")) == [id]
    assert ids(search(database, "8e03978e-40d")) == []  # a key is compared as a whole


def test_the_apps_own_key_is_found_by_an_index(database: Database, ob: outbox.Outbox) -> None:
    put_ended(database, ob)  # its dispatcher records the database's env
    put(database, ob, count=5)
    id = put_one(database, ob, parent="invoice:42")
    change(database, id, due_at=NEVER)

    assert ids(search(database, "invoice:42", max_rows=1)) == [id]


@pytest.mark.parametrize("encode", [encode_native, encode_hex, lambda tag: f" {encode_hex(tag).upper()} "])
def test_a_child_key_is_found(database: Database, ob: outbox.Outbox, encode: Any) -> None:
    put(database, ob, count=2)
    id = put_uncertain(database, ob)
    (tag,) = [row.tag for row in database.entries if row.id == id]

    assert ids(search(database, encode(Tag(bytes(tag))))) == [id]


def test_a_part_of_a_services_answer_is_found(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob)  # its result is {"id": "ch_1"}
    put_ended(database, ob, good=False)

    assert ids(search(database, "ch_1")) == [id]
    assert ids(search(database, "ch_2")) == []
    assert ids(search(database, "ch_")) == []  # too short: it would be in every answer


def test_an_answer_is_searched_letter_for_letter(database: Database, ob: outbox.Outbox) -> None:
    made = []
    for name in ('Müller a "b" c\\d 100% e_f_', "Muller a b cd 1000 exfx"):
        made.append(put_one(database, ob))
        run_once(database, ob, adapters={"crm": MemoryAdapter([Delivered({"name": name})])})

    found = [ids(search(database, text)) for text in ("Müller", 'a "b"', "c\\d 1", "100%", "e_f_")]

    assert found == [made[:1]] * 5


def test_an_ordering_key_is_found(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    group = put(database, ob, "crm.x", count=2, ordering_key="customer:7")

    assert set(ids(search(database, "customer:7", max_rows=1))) == set(group)


def test_a_request_is_found_with_its_entries(database: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(database, ob)
    checkout.accept("bank.charge", "mail.send", key="8e03978e-40d5")
    checkout.accept(key="another")
    record = next(record for record in database.records if record.parent == "8e03978e-40d5")

    found = search(database, "8e03978e-40d5")
    by_id = search(database, record.id.hex[:10])

    assert [request.id for request in found.requests] == [request.id for request in by_id.requests] == [record.id]
    assert {entry.operation for entry in found.entries} == {"bank.charge", "mail.send"}
    assert ids(by_id) == ids(found)


def test_the_result_says_how_far_it_searched(database: Database, ob: outbox.Outbox) -> None:
    first, *_ = put(database, ob, count=5)
    late = put_one(database, ob, parent="late")

    near, far = search(database, "late", max_rows=3), search(database, "late")

    waiting = {found.list: found for found in near.searched}["waiting entries, the longest due first"]
    assert (waiting.rows, waiting.is_whole, ids(near)) == (3, False, [])
    assert first not in ids(near)
    assert all(found.is_whole for found in far.searched)
    assert ids(far) == [late]


def test_what_many_entries_share_is_cut_off(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.x", count=MAX_FOUND + 1, ordering_key="customer:7")

    found = search(database, "customer:7")

    assert (len(found.entries), found.has_more) == (MAX_FOUND, True)


@pytest.mark.parametrize("text", ["", "x" * 256, "a\0b"])
def test_what_no_key_can_be_is_refused(database: Database, text: str) -> None:
    with pytest.raises(InvalidValue, match=r"text '.*this cannot be a key"):
        search(database, text)


# --- Requests as operators see them: lists of their records, and one with its entries.


def answer(database: Database, ob: outbox.Outbox, key: str, *, scope: str = "acct_1", status: int = 201) -> UUID:
    with database.begin() as session, ob.idempotent(session, key, scope=scope, content={}) as claim:
        ob.enqueue(session, "crm.x", {})
        claim.respond(status)
    return claim.id


def pages(database: Database, max_requests: int = 50, max_rows: int = 100, **wanted: Any) -> list[UUID]:
    """The requests of every page."""
    found: list[UUID] = []
    after: Place[UUID] | None = None
    for _ in range(100):
        with database.engine.begin() as connection:
            page = list_requests(
                connection,
                TABLES,
                RequestFilter(**wanted),
                max_requests=max_requests,
                after=after,
                max_rows=max_rows,
            )
        found += [request.id for request in page.requests]
        if page.next is None:
            return found
        after = page.next
    raise AssertionError("the list has no end")


def test_answered_requests_are_listed_the_newest_first(database: Database, ob: outbox.Outbox) -> None:
    ids = [answer(database, ob, f"key {number}") for number in range(5)]
    Checkout(database, ob).accept()

    assert pages(database) == ids[::-1]
    assert pages(database, max_requests=2) == ids[::-1]


@pytest.mark.every_value
@pytest.mark.parametrize(
    "wanted", [{"key": "mine"}, {"scope": "acct_2"}, {"status": 402}, {"key": "mine", "env": "test", "source": "http"}]
)
def test_a_filter_selects_requests_within_a_bound(
    database: Database, ob: outbox.Outbox, wanted: dict[str, Any]
) -> None:
    mine = answer(database, ob, "mine", scope="acct_2", status=402)
    for number in range(4):
        answer(database, ob, f"key {number}")

    with database.engine.begin() as connection:
        near = list_requests(connection, TABLES, RequestFilter(**wanted), max_requests=5, max_rows=2)

    assert near.requests == []
    assert near.next is not None
    assert pages(database, max_rows=2, **wanted) == [mine]


def test_open_requests_are_listed_by_their_state_the_oldest_first(database: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(database, ob)
    for number in range(3):
        checkout.accept(key=f"key {number}")
    answer(database, ob, "answered")
    opened = [row.id for row in sorted(database.records, key=lambda row: row.created_at) if row.state == "accepted"]

    assert pages(database, state="accepted", max_requests=2) == opened
    assert pages(database, state="leased") == []
    assert pages(database, state="accepted", key="key 1", max_rows=1) == [opened[1]]


def test_a_request_is_shown_with_its_entries(database: Database, ob: outbox.Outbox) -> None:
    Checkout(database, ob).accept("bank.charge", "mail.send", key="mine")
    (record,) = database.records

    with database.engine.begin() as connection:
        request = read_request(connection, TABLES, record.id)

    assert request.record is not None
    assert (request.record.key, request.record.state, request.record.completion) == ("mine", "accepted", "checkout")
    assert {entry.operation for entry in request.entries} == {"bank.charge", "mail.send"}


def test_a_deleted_request_is_shown_by_its_tombstone(database: Database, ob: outbox.Outbox) -> None:
    id = answer(database, ob, "mine")
    (record,) = database.records
    kept = {
        name: getattr(record, name) for name in ("id", "env", "scope", "source", "fingerprint", "fingerprint_version")
    }
    database.execute(sa.insert(TABLES.tombstone).values(**kept, forget_at=clock_plus(MAX_SPAN)))
    database.execute(sa.delete(TABLES.record))

    with database.engine.begin() as connection:
        request = read_request(connection, TABLES, id)

    assert request.record is None
    assert request.forget_at is not None
    assert len(request.entries) == 1


def test_a_request_that_was_never_made_is_not_found(database: Database) -> None:
    with database.engine.begin() as connection, pytest.raises(EntryNotFound, match="request"):
        read_request(connection, TABLES, uuid4())


def test_answered_is_no_state_of_an_open_request(database: Database) -> None:
    with database.engine.begin() as connection, pytest.raises(InvalidValue, match="must be one of"):
        list_requests(connection, TABLES, RequestFilter(state="failed"), max_requests=1, max_rows=1)


def mismatch(database: Database, id: UUID, requests: int, minutes: int) -> None:
    """As `outbox.sessions.mismatches` counts; its last request came so many minutes ago."""
    at = clock_plus(timedelta(minutes=-minutes))
    database.execute(sa.insert(TABLES.mismatch).values(id=id, requests=requests, first_at=at, last_at=at))


def test_mismatched_requests_are_listed_in_any_state_the_latest_first(database: Database, ob: outbox.Outbox) -> None:
    ids = [answer(database, ob, f"key {number}") for number in range(4)]
    Checkout(database, ob).accept(key="opened")
    (opened,) = [row.id for row in database.records if row.state == "accepted"]
    for minutes, id in enumerate([ids[2], opened, ids[0]]):
        mismatch(database, id, requests=10 + minutes, minutes=minutes)

    assert pages(database, state="mismatched", max_requests=1) == [ids[2], opened, ids[0]]
    assert pages(database, state="mismatched", key="key 0", max_rows=1) == [ids[0]]
    with database.engine.begin() as connection:
        found = list_requests(connection, TABLES, RequestFilter(state="mismatched"), max_requests=50, max_rows=100)
        usual = list_requests(connection, TABLES, RequestFilter(), max_requests=50, max_rows=100)
    assert [request.mismatches for request in found.requests] == [10, 11, 12]
    assert {request.id: request.mismatches for request in usual.requests} == dict(zip(ids, [12, 0, 10, 0], strict=True))
    assert [request.mismatched_at is None for request in usual.requests] == [True, False, True, False]


# --- The dashboard's overview: counted up to a limit, estimated above it.


def test_the_summary_counts_what_waits(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    put_uncertain(database, ob)
    age(database, timedelta(hours=2))
    with database.engine.begin() as connection:
        pause(connection, TABLES, "crm", actor="ada", reason="their release")

    with database.engine.begin() as connection:
        found = read_summary(connection, TABLES)

    crm, mail = found.destinations
    assert found.waiting == Count(value=4, is_exact=True)
    assert found.uncertain == Count(value=1, is_exact=True)
    assert (crm.due, crm.due_is_exact, crm.paused, crm.decided_by, crm.paused_reason) == (
        3,
        True,
        True,
        "ada",
        "their release",
    )
    assert (mail.due, found.states["mail"].states) == (0, {"uncertain": 1})
    assert found.oldest_due_seconds is not None
    assert 7200 <= found.oldest_due_seconds < 7300


@pytest.mark.parametrize("kind", ["rows", "uncertain", "due"])
def test_above_a_limit_the_planner_estimates(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(destinations, "MAX_COUNTED", 100)
    monkeypatch.setattr(counts, "MAX_DOUBTFUL", 100)
    put(postgresql, ob, count=500)
    if kind == "uncertain":
        postgresql.execute(sa.update(TABLES.queue).values(state="uncertain", maybe_sent=True))
    with postgresql.owner() as connection:
        connection.exec_driver_sql("ANALYZE outbox_queue")

    with postgresql.engine.begin() as connection:
        found = estimated(connection, kind)

    assert not found.is_exact
    assert 300 <= found.value <= 700


def estimated(connection: sa.Connection, kind: str) -> Count:
    if kind == "rows":
        return count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=100)
    if kind == "uncertain":
        return count_uncertain(connection, TABLES)
    (crm,) = read_destinations(connection, TABLES).destinations
    return Count(value=crm.due, is_exact=crm.due_is_exact)


def test_an_estimate_is_at_least_what_was_counted(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=20)  # unknown to the planner's statistics

    with database.engine.begin() as connection:
        exact = count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=20)
        estimate = count_rows(connection, sa.select(TABLES.queue.c.id), max_counted=19)

    assert exact == Count(value=20, is_exact=True)
    assert not estimate.is_exact
    assert estimate.value >= 19


def test_the_health_of_the_tables_shows_sizes_and_dead_rows(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)

    with database.engine.begin() as connection:
        health = read_database_health(connection, TABLES)

    if database.name not in ("postgresql", "mariadb"):
        assert (health.tables, health.holders, health.history) == ([], None, None)
        return
    assert (health.history is None) == (database.name == "postgresql")
    queue: Any = {table.name: table for table in health.tables}["outbox_queue"]
    assert queue.heap_bytes > 0
    assert queue.index_bytes > 0
    assert queue.vacuum_after == (2000 if database.name == "postgresql" else 0)
    assert {table.name for table in health.tables} >= {"outbox_entry", "outbox_settlement", "outbox_record"}


def test_a_session_that_holds_back_the_purge_of_mariadb_is_shown(mariadb: Database) -> None:
    """One at READ COMMITTED holds nothing back between its statements."""
    engine = mariadb.new_engine()
    with engine.connect() as holding, engine.connect() as harmless, engine.connect() as connection:
        holding.execution_options(isolation_level="REPEATABLE READ")
        ids = [str(each.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one()) for each in (holding, harmless)]
        for each in (holding, harmless):
            each.execute(sa.select(TABLES.queue.c.id)).all()

        def shown() -> list[str]:
            found = {holder.what.split()[2] for holder in dialect_of(connection).read_holders(connection) or []}
            return [each for each in ids if each in found]

        until = time.monotonic() + 60
        while shown() != ids[:1]:
            assert time.monotonic() < until
            time.sleep(0.2)  # InnoDB reads its transactions again only after a tenth of a second without a question
    engine.dispose()


def test_a_user_without_process_sees_no_session_of_mariadb(mariadb: Database) -> None:
    user = f"poor_{mariadb.owners_url.database}"
    with mariadb.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE USER {user}")
        connection.exec_driver_sql(f"GRANT SELECT ON * TO {user}")
    engine = sa.create_engine(mariadb.owners_url.set(username=user), poolclass=sa.NullPool)

    with engine.connect() as connection:
        health = read_database_health(connection, TABLES)

    with mariadb.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP USER {user}")
    assert health.holders is None
    assert (health.history is None) == (mariadb.server == "mysql")  # which asks for the right there too


def test_a_session_that_holds_back_the_vacuum_is_shown(postgresql: Database) -> None:
    other = postgresql.new_engine()
    with other.connect() as holding, postgresql.owner() as connection:
        holding.execution_options(isolation_level="REPEATABLE READ")
        holding.execute(sa.select(TABLES.queue.c.id)).all()
        pid = holding.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        health = read_database_health(connection, TABLES)
    other.dispose()

    assert health.holders is not None
    assert any(str(pid) in holder.what for holder in health.holders)


# --- Looking at a large outbox does not read all of it: the plans of the inspecting queries on PostgreSQL.


def test_reading_is_of_one_moment_and_cannot_write(postgresql: Database) -> None:
    from dispatchers.cli.connections import reading
    from dispatchers.cli.options import Target

    url = postgresql.url.render_as_string(hide_password=False)

    with reading(Target(url, None, "outbox_")) as (connection, tables):
        level = connection.execute(sa.text("SHOW transaction_isolation")).scalar_one()
        with pytest.raises(sa.exc.DBAPIError, match="read-only transaction"):
            connection.execute(sa.delete(tables.queue))

    assert level == "repeatable read"


def test_places_of_a_list_survive_being_written_as_text() -> None:
    from dispatchers.admin.read.plain_values import Place, instant
    from dispatchers.cli.options import Cursor

    at = datetime.fromisoformat("2026-01-31T12:00:00.123456+00:00")
    id = UUID("a4633227-889c-8a14-b547-b020040e96b6")

    assert Cursor().convert(f"{instant(at)},{id}", None, None) == Place(at, id)
    assert json.dumps(instant(at)) == '"2026-01-31T12:00:00.123456Z"'


# --- The conditions of a list's next page, against the whole list in Python's order.


START = datetime(2026, 1, 31, tzinfo=UTC)
ROWS = [(START + timedelta(hours=hour), UUID(int=number)) for hour, number in product(range(3), range(1, 4))]
LISTED = sa.table("listed", sa.column("at", Instant), sa.column("id", sa.Uuid))


@pytest.mark.parametrize(("is_descending", "has_ids_descending"), [*product([False, True], repeat=2)])
def test_after_each_place_come_the_later_rows_of_the_list(is_descending: bool, has_ids_descending: bool) -> None:
    ordered = sorted(ROWS, key=lambda row: row[1], reverse=has_ids_descending)
    ordered.sort(key=lambda row: row[0], reverse=is_descending)
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE listed (at, id)"))
        connection.execute(sa.insert(LISTED), [{"at": at, "id": id} for at, id in ROWS])

        def rows_after(place: Place[UUID] | None) -> set[Any]:
            conditions = following(
                place,
                LISTED.c.at,
                LISTED.c.id,
                is_descending=is_descending,
                has_ids_descending=has_ids_descending,
            )
            return {tuple(row) for row in connection.execute(sa.select(LISTED).where(*conditions))}

        found = [rows_after(Place(*row)) for row in ordered]
        everything = rows_after(None)

    assert found == [set(ordered[number + 1 :]) for number in range(len(ordered))]
    assert everything == set(ROWS)
    engine.dispose()


def test_a_place_is_read_as_it_was_written_and_json_has_its_text() -> None:
    by_id, by_number = Place(START, UUID(int=7)), Place(START, 7)

    assert Place.parse(str(by_id), UUID) == by_id
    assert Place.parse(str(by_number), int) == by_number
    assert plain([by_number]) == ["2026-01-31T00:00:00Z,7"]
