"""A request is remembered with its response: replayed without another write, refused for another content, forgotten in time."""

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from support.database import ALL, CHARGE, PAYLOAD, REQUEST, TABLES, Order

import outbox
from outbox.requests.fingerprint import fingerprint

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

DAY = timedelta(hours=24)
A_MOMENT = timedelta(minutes=1)


def respond(status, body=None, headers=None):
    return lambda session, claim: claim.respond(status, body, headers)


def place_order_only(session, claim):
    session.add(Order(customer="ada", amount=2000))
    claim.respond(201)


# --- replay


def test_a_request_stores_its_record_its_order_and_its_entry(client, database):
    client.request()

    assert database.counts() == ALL


def test_a_retry_gets_the_first_response_and_does_nothing(client, database):
    first = client.request()

    retry = client.request(respond(500, "another answer"))

    assert retry == first == outbox.Response(201, b'{"order":"placed"}', {"Content-Type": "application/json"})
    assert retry.json() == {"order": "placed"}
    assert database.counts() == ALL


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("body", "stored", "content_type"),
    [
        (None, b"", None),
        ({"b": 1, "a": "é"}, '{"b":1,"a":"é"}'.encode(), "application/json"),
        ([], b"[]", "application/json"),
        (0, b"0", "application/json"),
        ("héllo", "héllo".encode(), "text/plain; charset=utf-8"),
        ("", b"", "text/plain; charset=utf-8"),
        (b"\x00\xff\n", b"\x00\xff\n", "application/octet-stream"),
    ],
)
def test_every_kind_of_body_is_replayed_to_the_byte(client, body, stored, content_type):
    client.request(respond(200, body))

    replay = client.request()

    assert replay.status == 200
    assert replay.body == stored
    assert replay.headers.get("Content-Type") == content_type


def test_headers_are_replayed_in_order_and_the_apps_content_type_wins(client):
    headers = {"Location": "/orders/1", "content-type": "application/vnd.shop+json", "X-Note": "é"}

    client.request(respond(201, {"order": 1}, headers))

    assert list(client.request().headers.items()) == list(headers.items())


def test_members_in_another_order_are_the_same_request(client):
    client.request(respond(201), content={"a": 1, "b": [2, 3.0]})

    assert client.request(content={"b": [2.0, 3], "a": 1}).status == 201


def test_a_raw_body_is_compared_byte_by_byte(client):
    client.request(respond(201), content=b'{"a": 1}')

    assert client.request(content=b'{"a": 1}').status == 201
    with pytest.raises(outbox.RequestMismatch):
        client.request(content=b'{"a":1}')


def test_the_record_row_holds_the_request_and_its_answer(client, database):
    client.request(lambda session, claim: claim.respond(201, {"order": 1}, {"Location": "/orders/1"}))

    (record,) = database.records
    row = record._asdict()
    times = {name: row.pop(name) for name in ("created_at", "answered_at", "replay_until", "keep_until")}
    assert row.pop("id") is not None
    assert row == {
        "env": "test",
        "scope": "acct_1",
        "source": "http",
        "parent": "retry-001",
        "kid": "k1",
        "state": "succeeded",
        "fingerprint": fingerprint(REQUEST),
        "fingerprint_version": 1,
        "status": 201,
        "body": b'{"order":1}',
        "headers": '{"Location": "/orders/1", "Content-Type": "application/json"}',
        "completion": None,
        "lease_token": None,
        "lease_until": None,
        "body_day": None,
    }
    assert abs(times["created_at"] - datetime.now(UTC)) < A_MOMENT
    assert abs(times["replay_until"] - times["created_at"] - DAY) < A_MOMENT
    assert abs(times["keep_until"] - times["created_at"] - timedelta(days=30)) < A_MOMENT


def test_a_window_longer_than_the_audit_keeps_the_record_as_long(client, database):
    client.request(retention=timedelta(days=90))

    (record,) = database.records
    assert abs(record.keep_until - record.replay_until) < A_MOMENT


@pytest.mark.parametrize("changed", [{"scope": "acct_2"}, {"source": "batch"}, {"key": "retry-002"}])
def test_another_scope_source_or_key_is_another_request(client, database, changed):
    client.request()

    client.request(**changed)

    assert database.counts() == {"orders": 2, "records": 2, "entries": 2, "queue": 2}


def test_the_same_key_in_another_environment_is_another_request(client, database, ob):
    client.request()
    staging = outbox.Outbox(ob.configuration.keyring, env="staging")

    with (
        database.begin() as session,
        staging.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim,
    ):
        claim.respond(201)

    assert len(database.records) == 2


# --- failures that the app chose to keep


@pytest.mark.parametrize(
    ("status", "state"), [(200, "succeeded"), (399, "succeeded"), (400, "failed"), (599, "failed")]
)
def test_a_status_from_400_on_is_a_failure_that_is_kept(client, database, status, state):
    def decline(session, claim):
        session.add(Order(customer="ada", amount=2000))
        claim.respond(status)

    client.request(decline)

    (record,) = database.records
    assert (record.state, record.status) == (state, status)
    assert len(database.orders) == 1
    assert client.request().status == status


@pytest.mark.parametrize("flushed", [True, False])
def test_reject_keeps_the_answer_and_nothing_else(client, database, ob, flushed):
    def decline(session, claim):
        session.add(Order(customer="ada", amount=2000))
        ob.enqueue(session, CHARGE, PAYLOAD)
        if flushed:
            session.flush()
        claim.reject(402, {"error": "no funds"})

    first = client.request(decline)

    assert database.counts() == {"orders": 0, "records": 1, "entries": 0, "queue": 0}
    assert database.records[0].state == "failed"
    assert (
        client.request() == first == outbox.Response(402, b'{"error":"no funds"}', {"Content-Type": "application/json"})
    )


def test_reject_leaves_what_the_caller_did_before_the_block(database, ob):
    with database.begin() as session:
        session.add(Order(customer="before", amount=1))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="before")
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
            session.add(Order(customer="inside", amount=1))
            ob.enqueue(session, CHARGE, PAYLOAD)
            claim.reject(402)

    assert [order.customer for order in database.orders] == ["before"]
    assert [entry.parent for entry in database.entries] == ["before"]


def test_reject_undoes_savepoints_of_the_handlers_own(client, database):
    def decline(session, claim):
        with session.begin_nested():
            session.add(Order(customer="released", amount=1))
        session.begin_nested()
        session.add(Order(customer="open", amount=1))
        claim.reject(402)

    client.request(decline)

    assert database.orders == []
    assert len(database.records) == 1


def test_savepoints_of_the_handlers_own_that_stay_open_are_kept(client, database):
    def place(session, claim):
        session.begin_nested()
        session.add(Order(customer="ada", amount=1))
        claim.respond(201)

    client.request(place)

    assert len(database.orders) == 1


# --- another request, an old key


def test_another_request_under_a_used_key_is_refused(client, database):
    client.request()

    with pytest.raises(outbox.RequestMismatch) as caught:
        client.request(content=REQUEST | {"amount": 2001})

    assert caught.value.status == 422
    assert str(caught.value) == (
        "key 'retry-001' was used before with another request: use a new key for a new request"
    )
    assert database.counts() == ALL


@pytest.mark.parametrize("retention", [DAY, timedelta(hours=1)])
def test_just_inside_its_window_a_key_is_replayed(client, database, retention):
    client.request(place_order_only, retention=retention)
    database.age_records(retention - A_MOMENT)

    assert client.request().status == 201
    assert len(database.orders) == 1


@pytest.mark.parametrize("request_", [REQUEST, {"another": "request"}])
def test_past_its_window_a_key_without_entries_is_free(client, database, request_):
    client.request(place_order_only, retention=timedelta(hours=1))
    database.age_records(timedelta(hours=1) + A_MOMENT)

    response = client.request(content=request_)

    assert response.json() == {"order": "placed"}
    assert database.counts() == {"orders": 2, "records": 1, "entries": 1, "queue": 1}
    assert database.records[0].fingerprint == fingerprint(request_)
    assert client.request(content=request_) == response


def assert_expired(client, database):
    before = database.counts()

    with pytest.raises(outbox.KeyExpired) as caught:
        client.request()

    assert caught.value.status == 422
    assert str(caught.value) == (
        "key 'retry-001' is older than its retry window, and its effects are still remembered: use a new key"
    )
    assert database.counts() == before


def test_past_its_window_a_key_with_entries_is_expired(client, database):
    client.request()
    database.age_records(DAY + A_MOMENT)

    assert_expired(client, database)


def test_past_its_window_a_key_with_entries_of_another_parent_is_expired(client, database, ob):
    def place(session, claim):
        ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        claim.respond(201)

    client.request(place)
    database.age_records(DAY + A_MOMENT)

    assert_expired(client, database)


def test_past_its_window_a_key_with_entries_from_outside_is_expired(client, database, ob):
    client.request(place_order_only)
    with database.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent=outbox.ParentKey("retry-001", scope="acct_1", source="http"))
    database.age_records(DAY + A_MOMENT)

    assert_expired(client, database)


def test_a_key_is_free_once_its_entries_are_forgotten(client, database):
    client.request()
    database.age_records(DAY + A_MOMENT)
    database.execute(sa.delete(TABLES.entry))
    database.execute(sa.delete(TABLES.queue))

    client.request()

    assert database.counts() == {"orders": 2, "records": 1, "entries": 1, "queue": 1}


def replace_with_tombstone(database, forget_at):
    (record,) = database.records
    database.execute(sa.delete(TABLES.record))
    database.execute(
        sa.insert(TABLES.tombstone).values(
            id=record.id,
            env=record.env,
            scope=record.scope,
            source=record.source,
            fingerprint=record.fingerprint,
            fingerprint_version=record.fingerprint_version,
            forget_at=forget_at,
        )
    )


def test_a_tombstone_answers_for_its_key(client, database):
    client.request(place_order_only)
    replace_with_tombstone(database, datetime.now(UTC) + DAY)

    assert_expired(client, database)


def test_a_tombstone_past_its_time_says_nothing(client, database):
    client.request(place_order_only)
    replace_with_tombstone(database, datetime.now(UTC) - A_MOMENT)

    client.request()

    assert len(database.records) == 1


# --- Inside a replay nothing is written, enqueued or answered again, whatever the caller does with the error.


TRACE = (
    "the request with key 'retry-001' was answered before. Check claim.replayed first and return claim.response, or"
    " use outbox.run_idempotent, which does"
)


def enqueue_under_the_claims_key(session, claim, ob):
    ob.enqueue(session, "email.send", PAYLOAD)


def enqueue_under_a_key_of_its_own(session, claim, ob):
    ob.enqueue(session, "email.send", PAYLOAD, parent="invoice:42")


def enqueue_in_another_outbox(session, claim, ob):
    other = outbox.Outbox(ob.configuration.keyring, env="other")
    other.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")


def respond_again(session, claim, ob):
    claim.respond(200)


def reject_again(session, claim, ob):
    claim.reject(402)


def add_an_order(session, claim, ob):
    session.add(Order(customer="eve", amount=1))


def add_an_order_and_flush(session, claim, ob):
    session.add(Order(customer="eve", amount=1))
    session.flush()


def change_an_order(session, claim, ob):
    session.scalars(sa.select(Order)).one().amount = 1


def delete_an_order(session, claim, ob):
    session.delete(session.scalars(sa.select(Order)).one())


def insert_in_bulk(session, claim, ob):
    session.execute(sa.insert(Order), [{"customer": "eve", "amount": 1}])


def insert_into_the_table(session, claim, ob):
    session.execute(sa.insert(Order.__table__).values(customer="eve", amount=1))


def update_in_bulk(session, claim, ob):
    session.execute(sa.update(Order).values(amount=1))


def delete_in_bulk(session, claim, ob):
    session.execute(sa.delete(Order))


def save_in_bulk(session, claim, ob):
    session.bulk_save_objects([Order(customer="eve", amount=1)])


def insert_on_the_connection(session, claim, ob):
    session.connection().execute(sa.insert(Order.__table__).values(customer="eve", amount=1))


def add_an_order_after_a_rollback(session, claim, ob):
    session.rollback()
    session.add(Order(customer="eve", amount=1))


def enqueue_after_a_rollback(session, claim, ob):
    session.rollback()
    ob.enqueue(session, "email.send", PAYLOAD, parent="invoice:42")


WORK = {
    enqueue_under_the_claims_key: "enqueue inside a replay: ",
    enqueue_under_a_key_of_its_own: "enqueue inside a replay: ",
    enqueue_in_another_outbox: "enqueue inside a replay: ",
    respond_again: "respond inside a replay: ",
    reject_again: "reject inside a replay: ",
    add_an_order: "a write inside a replay: ",
    add_an_order_and_flush: "a write inside a replay: ",
    change_an_order: "a write inside a replay: ",
    delete_an_order: "a write inside a replay: ",
    insert_in_bulk: "a write inside a replay: ",
    insert_into_the_table: "a write inside a replay: ",
    update_in_bulk: "a write inside a replay: ",
    delete_in_bulk: "a write inside a replay: ",
    save_in_bulk: "a write inside a replay: ",
    insert_on_the_connection: "a write inside a replay: ",
    add_an_order_after_a_rollback: "",
    enqueue_after_a_rollback: "",
}


@pytest.mark.parametrize(("work", "text"), WORK.items(), ids=[work.__name__ for work in WORK])
def test_work_inside_a_replay_is_refused_and_a_commit_keeps_nothing_of_it(client, database, ob, work, text):
    client.request()

    caught = client.commit_despite(lambda session, claim: work(session, claim, ob))

    # after a rollback inside `async with session.begin()`, SQLAlchemy itself refuses the rest
    assert isinstance(caught, outbox.AlreadyAnswered if text else (outbox.ClaimError, sa.exc.InvalidRequestError))
    assert not text or str(caught) == text + TRACE
    assert database.counts() == ALL
    assert [(order.customer, order.amount) for order in database.orders] == [("ada", 2000)]


def test_a_commit_inside_a_replay_is_refused(client, database):
    client.request()

    with pytest.raises(outbox.ClaimOpen):
        client.request(lambda session, claim: session.commit(), even_in_a_replay=True)


def test_reading_inside_a_replay_is_free(client, database):
    client.request()
    seen = []

    client.request(
        lambda session, claim: seen.extend(session.scalars(sa.select(Order.customer))), even_in_a_replay=True
    )

    assert seen == ["ada"]


def test_an_attribute_set_to_what_it_was_is_no_write(client, database):
    def set_the_same(session, claim):
        order = session.scalars(sa.select(Order)).one()
        order.amount = order.amount

    client.request()

    assert client.request(set_the_same, even_in_a_replay=True).status == 201


def test_what_the_caller_wrote_before_a_replay_is_kept(database, ob, client):
    client.request()

    with database.begin() as session:
        session.add(Order(customer="before", amount=1))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="before")
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST) as claim:
            assert claim.replayed

    assert "before" in [order.customer for order in database.orders]
    assert "before" in [entry.parent for entry in database.entries]


def test_after_a_replay_the_session_is_as_free_as_before(client, database, ob):
    client.request()

    with database.begin() as session:
        with ob.idempotent(session, "retry-001", scope="acct_1", content=REQUEST):
            pass
        session.add(Order(customer="after", amount=1))
        session.flush()
        session.execute(sa.update(Order).where(Order.customer == "after").values(amount=2))
        ob.enqueue(session, CHARGE, PAYLOAD, parent="after")

    assert [order.amount for order in database.orders if order.customer == "after"] == [2]
    assert "after" in [entry.parent for entry in database.entries]
