"""`claim.accept`: what is stored and answered, and what a retry gets."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.accepted import Checkout
from support.database import CHARGE, NOTHING, TABLES, Client, Database, Order

import outbox
from dispatchers.store.records.queries import next_accepted
from outbox.keys import Keyring
from outbox.metrics.gauges import read_open_records
from outbox.requests.accepted import POLL_FIRST, POLL_LAST, poll_after

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

DAY = timedelta(days=1)


def accepting(ob: outbox.Outbox, *arguments: Any, **settings: Any) -> Any:
    def handler(session: Session, claim: outbox.Claim) -> None:
        session.add(Order(customer="ada", amount=2000))
        ob.enqueue(session, CHARGE, {"amount": 2000})
        claim.accept(*arguments, **{"completion": "checkout", "headers": {"Location": "/requests/1"}, **settings})

    return handler


@pytest.fixture
def checkout(database: Database, ob: outbox.Outbox) -> Checkout:
    return Checkout(database, ob)


@pytest.fixture
def ob_with_url() -> outbox.Outbox:
    return outbox.Outbox(Keyring({"k1": bytes(range(32))}), env="test", status_url="https://shop.example/requests/{id}")


# --- the answer


def test_accept_commits_an_open_record_with_the_entries_and_answers_202(
    client: Client, database: Database, ob: outbox.Outbox
) -> None:
    response = client.request(accepting(ob))

    (record,) = database.records
    (entry,) = database.entries
    assert (record.state, record.completion, record.answered_at) == ("accepted", "checkout", None)
    assert (entry.record_id, len(database.orders)) == (record.id, 1)
    assert response.status == 202
    assert response.headers == {"Location": "/requests/1", "Retry-After": "1", "Content-Type": "application/json"}
    assert response.json() == {"id": str(record.id), "state": "accepted", "status_url": "/requests/1"}


def test_the_status_url_is_made_of_the_configured_one_and_the_claims_id(
    database: Database, ob_with_url: outbox.Outbox
) -> None:
    with database.begin() as session, ob_with_url.idempotent(session, "k", scope="a", content={}) as claim:
        ob_with_url.enqueue(session, CHARGE, {})
        response = claim.accept("checkout")

    assert claim.id == database.records[0].id
    assert response.headers["Location"] == f"https://shop.example/requests/{claim.id}"
    assert response.json()["status_url"] == response.headers["Location"]


def test_the_apps_own_body_and_headers_go_before_ours(client: Client, ob: outbox.Outbox) -> None:
    headers = {"location": "/mine", "retry-after": "30", "X-Trace": "1"}

    response = client.request(accepting(ob, body={"mine": True}, headers=headers))

    assert response.headers == headers | {"Content-Type": "application/json"}
    assert response.json() == {"mine": True}


def test_a_retry_of_an_open_request_gets_the_same_202_and_does_nothing(
    client: Client, database: Database, ob: outbox.Outbox
) -> None:
    first = client.request(accepting(ob))
    before = database.counts()

    assert client.request(accepting(ob)) == first
    assert database.counts() == before


def test_a_retry_with_another_payload_is_refused_while_the_request_is_open(client: Client, ob: outbox.Outbox) -> None:
    client.request(accepting(ob))

    with pytest.raises(outbox.RequestMismatch):
        client.request(accepting(ob), content={"amount": 1})


def test_an_open_requests_key_does_not_expire(client: Client, database: Database, ob: outbox.Outbox) -> None:
    first = client.request(accepting(ob))
    database.age_records(400 * DAY)

    assert client.request(accepting(ob)) == first


# --- refusals: nothing is kept


def test_accept_without_an_entry_is_refused(client: Client, database: Database) -> None:
    def handler(session: Session, claim: outbox.Claim) -> None:
        claim.accept("checkout", headers={"Location": "/requests/1"})

    error = client.commit_despite(handler)

    assert isinstance(error, outbox.ClaimError)
    assert str(error) == (
        "claim.accept() of key 'retry-001' has nothing to wait for: enqueue an entry in the block, or answer with claim.respond()"
    )
    assert database.counts() == NOTHING


def test_accept_without_a_status_url_is_refused(client: Client, database: Database, ob: outbox.Outbox) -> None:
    error = client.commit_despite(accepting(ob, headers={}))

    assert isinstance(error, outbox.ConfigurationError)
    assert str(error) == (
        "claim.accept() has no status URL to answer with: set one, outbox.configure(status_url='/requests/{id}'), or give"
        " headers={'Location': ...}"
    )
    assert database.counts() == NOTHING


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("Check out", "completion 'Check out': must be lower-case words joined by dots, e.g. 'stripe.refunds.create'"),
        ("c" * 129, "completion .*: has 129 bytes of UTF-8; 1 to 128 are allowed"),
        (7, "completion 7: must be a str, not int"),
    ],
)
def test_a_malformed_completion_is_refused(
    client: Client, database: Database, ob: outbox.Outbox, completion: Any, says: str
) -> None:
    error = client.commit_despite(accepting(ob, completion=completion))

    assert isinstance(error, outbox.InvalidValue)
    with pytest.raises(outbox.InvalidValue, match=says):
        raise error
    assert database.counts() == NOTHING


def test_accept_is_an_answer_like_any_other(client: Client, ob: outbox.Outbox) -> None:
    def handler(session: Session, claim: outbox.Claim) -> None:
        ob.enqueue(session, CHARGE, {})
        claim.respond(201)
        with pytest.raises(outbox.AlreadyAnswered, match="accept after an answer"):
            claim.accept("checkout")

    assert client.request(handler).status == 201

    def again(session: Session, claim: outbox.Claim) -> None:
        claim.accept("checkout")

    with pytest.raises(outbox.AlreadyAnswered, match="accept inside a replay"):
        client.request(again, even_in_a_replay=True)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("/requests", "status_url must be a URL or path with {id} in it, e.g. '/requests/{id}', not '/requests'"),
        (7, "status_url must be a URL or path with {id} in it, e.g. '/requests/{id}', not 7"),
        ("/a b/{id}", "status_url '/a b/{id}' contains a character that is not allowed in a URL: percent-encode it"),
        (
            "/{id}\r\nX: 1",
            "status_url '/{id}\\r\\nX: 1' contains a character that is not allowed in a URL: percent-encode it",
        ),
    ],
)
def test_a_status_url_that_cannot_work_is_refused(template: Any, says: str) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        outbox.Outbox(Keyring({"k1": bytes(range(32))}), env="test", status_url=template)

    assert str(refused.value) == says


def test_another_status_url_is_another_configuration() -> None:
    keyring = Keyring({"k1": bytes(range(32))})
    one, other = (outbox.Outbox(keyring, env="test", status_url=url) for url in ("/a/{id}", "/b/{id}"))

    assert one.configuration != other.configuration


# --- request_status


def test_the_status_of_an_open_request_shows_its_effects_and_no_response(checkout: Checkout) -> None:
    checkout.accept(CHARGE, "mail.receipt")

    status = checkout.status()

    assert status is not None
    assert (status.id, status.state, status.response) == (checkout.record.id, "accepted", None)
    assert sorted((entry.operation, entry.state) for entry in status.entries) == [
        ("mail.receipt", "pending"),
        (CHARGE, "pending"),
    ]
    assert status.retry_after == POLL_FIRST
    assert "amount" not in repr(status), "the payload"


def test_the_status_of_a_request_is_for_its_owner_only(checkout: Checkout) -> None:
    checkout.accept()

    assert checkout.status(scope="acct_2") is None
    assert checkout.status(scope="") is None


def test_the_status_of_a_request_of_another_deployment_is_not_shown(checkout: Checkout) -> None:
    checkout.accept()
    staging = outbox.Outbox(Keyring({"k1": bytes(range(32))}), env="staging")

    with checkout.database.begin() as session:
        assert staging.request_status(session, checkout.record.id, scope="acct_1") is None


def test_effects_under_other_parents_are_shown_as_the_requests_own(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "k", scope="a", content={}) as claim:
        ob.enqueue(session, CHARGE, {}, parent="invoice:42")
        ob.enqueue(session, "mail.receipt", {})
        claim.accept("checkout", headers={"Location": "/1"})
    with database.begin() as session:
        ob.enqueue(session, "mail.receipt", {}, parent="invoice:42")

    with database.begin() as session:
        status = ob.request_status(session, claim.id, scope="a")

    assert status is not None
    assert sorted(entry.operation for entry in status.entries) == ["mail.receipt", CHARGE]


async def _status_async(database: Database, ob: outbox.Outbox, id: Any) -> outbox.RequestStatus | None:
    async with database.async_session() as session:
        return await ob.request_status(session, id, scope="acct_1")


def test_the_status_is_awaited_with_an_async_session(checkout: Checkout) -> None:
    checkout.accept()

    status = asyncio.run(_status_async(checkout.database, checkout.ob, checkout.record.id))

    assert status == checkout.status()


def test_a_request_that_was_answered_at_once_has_a_status_too(
    client: Client, database: Database, ob: outbox.Outbox
) -> None:
    response = client.request()

    with database.begin() as session:
        status = ob.request_status(session, database.records[0].id, scope="acct_1")

    assert status is not None
    assert (status.state, status.response, status.retry_after) == ("succeeded", response, None)


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (timedelta(0), POLL_FIRST),
        (timedelta(seconds=-5), POLL_FIRST),
        (timedelta(seconds=42), timedelta(seconds=4)),
        (timedelta(days=3), POLL_LAST),
    ],
)
def test_the_older_a_request_the_later_its_next_poll(age: timedelta, expected: timedelta) -> None:
    assert poll_after(age) == expected


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda connection: next_accepted(connection, TABLES, None), id="the dispatcher's look"),
        pytest.param(lambda connection: read_open_records(connection, TABLES), id="the gauges"),
    ],
)
def test_the_search_for_open_requests_reads_only_their_index(
    database: Database, ob: outbox.Outbox, read: Callable[[sa.Connection], object]
) -> None:
    plans: list[str] = []
    explain = "EXPLAIN QUERY PLAN" if database.name == "sqlite" else "EXPLAIN"

    def plan(_: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        cursor.execute(f"{explain} {statement}", parameters)
        plans.append("\n".join(str(row if database.name == "mariadb" else row[-1]) for row in cursor.fetchall()))

    with database.engine.begin() as connection:
        if database.name == "postgresql":  # a plan for any parameters, of a table too small for an index to pay
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
            connection.execute(sa.text("SET LOCAL plan_cache_mode = force_generic_plan"))
        sa.event.listen(connection, "before_cursor_execute", plan)
        read(connection)

    assert plans
    for explained in plans:
        assert "outbox_record_open" in explained
        assert "Filter: ((state" not in explained
