"""Requests as operators see them: lists of their records, and one with its entries."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.accepted import Checkout
from support.database import TABLES, Database

import outbox
from dispatchers.admin.read.plain_values import Place
from dispatchers.admin.read.requests import RequestFilter, list_requests, read_request
from dispatchers.errors import EntryNotFound
from outbox.errors import InvalidValue
from outbox.sql.clock import clock_plus
from outbox.times import MAX_SPAN


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
