"""Keys of requests that bring none: the body's, for a window, across its edges and a rotation; and natural ones."""

import base64
import hashlib
import hmac
import threading
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session
from support.body_keys import BODY, EDGE, SECOND, WINDOW, at
from support.daemons import wait_for
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, REQUEST
from support.leases import Shop
from support.retention import elapse

import outbox
from outbox import BodyKey, Fingerprint
from outbox.keys import pae
from outbox.requests.body_key import BodyRequest, body_key
from outbox.times import EPOCH

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

PRINT = bytes(32)


# --- the keys


def test_a_key_is_the_same_throughout_a_span_and_the_next_ones_earlier_key():
    before, current = body_key(PRINT, WINDOW, EDGE)

    assert body_key(PRINT, WINDOW, EDGE + WINDOW - SECOND) == (before, current)
    assert body_key(PRINT, WINDOW, EDGE + WINDOW)[0] == current
    assert body_key(PRINT, WINDOW, EDGE - SECOND)[1] == before
    assert before != current


instants = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
windows = st.timedeltas(SECOND, timedelta(days=400))


@given(first=instants, window=windows, fraction=st.floats(0, 1))
def test_two_requests_less_than_a_window_apart_always_have_a_key_in_common(first, window, fraction):
    second = first + window * fraction

    assert body_key(PRINT, window, first)[1] in body_key(PRINT, window, second) or fraction == 1


@given(first=instants, window=windows)
def test_two_requests_two_windows_apart_never_do(first, window):
    assert not set(body_key(PRINT, window, first)) & set(body_key(PRINT, window, first + 2 * window))


def test_the_key_is_published():
    """Another process, another release: the same key. HMAC-SHA-256 under 32 zero bytes, over the PAE of docs/keys.md."""
    span = int(EDGE.timestamp()) // 600
    message = pae(b"obx/body-key/v1-public", PRINT, b"600000000", str(span).encode())
    digest = hmac.new(bytes(32), message, hashlib.sha256).digest()[:24]

    assert body_key(PRINT, WINDOW, EDGE)[1] == "body-" + base64.urlsafe_b64encode(digest).decode()
    assert body_key(PRINT, WINDOW, EDGE)[1] == "body-qy8rmZvoNEhBIRA5YhXgYwH3Wo1t3L86"


def test_other_bodies_and_other_windows_have_other_keys():
    keys = {
        body_key(PRINT, WINDOW, EDGE)[1],
        body_key(bytes([1]) * 32, WINDOW, EDGE)[1],
        body_key(PRINT, 2 * WINDOW, EDGE)[1],
    }

    assert len(keys) == 3


@pytest.mark.parametrize("window", [timedelta(0), timedelta(milliseconds=999), 600])
def test_a_window_outside_its_limits_is_refused(window):
    with pytest.raises(outbox.InvalidValue) as caught:
        BodyKey(window)

    assert str(caught.value) == f"window {window!r}: must be a timedelta of at least 1 s, and 36525 days at most"


# --- requests


def test_an_equal_body_within_the_window_is_a_retry(client, database):
    first = client.request(key=BODY)

    assert client.request(lambda session, claim: claim.respond(500), key=BODY) == first
    assert database.counts() == ALL
    (record,) = database.records
    assert record.source == "http.body"
    assert abs(record.replay_until - record.created_at - WINDOW) < SECOND
    (entry,) = database.entries
    assert (entry.parent, entry.source, entry.record_id) == (record.parent, "http.body", record.id)


def test_equal_requests_a_second_apart_across_the_edge_of_two_spans_meet(client, database, monkeypatch):
    with monkeypatch.context() as patch:
        at(patch, EDGE - SECOND)
        first = client.request(key=BODY)

    with monkeypatch.context() as patch:
        at(patch, EDGE)
        assert client.request(lambda session, claim: claim.respond(500), key=BODY) == first
    assert database.counts() == ALL


def test_after_the_window_an_equal_body_is_new_and_has_new_child_keys(client, database, monkeypatch):
    with monkeypatch.context() as patch:
        at(patch, EDGE - SECOND)
        client.request(key=BODY)
    elapse(database, WINDOW)

    with monkeypatch.context() as patch:
        at(patch, EDGE + WINDOW - SECOND)
        client.request(key=BODY)

    assert database.counts() == dict.fromkeys(ALL, 2)
    assert len({bytes(entry.tag) for entry in database.entries}) == 2


def test_after_the_window_an_equal_body_meets_its_successor_not_the_first(client, database, monkeypatch):
    """The first is at the end of one span, the second a window later, at the end of the next, the third just after it."""
    answers = []
    for number, instant in enumerate((EDGE - SECOND, EDGE + WINDOW - SECOND, EDGE + WINDOW)):
        with monkeypatch.context() as patch:
            at(patch, instant)
            answers.append(client.request(lambda session, claim, n=number: claim.respond(200, n), key=BODY).json())
        if not number:
            elapse(database, WINDOW)

    assert answers == [0, 1, 1]


def test_another_body_scope_or_endpoint_is_another_request(client, database):
    client.request(key=BODY)
    client.request(key=BODY, content={"customer": "ada", "amount": 2001})
    client.request(key=BODY, scope="acct_2")
    client.request(key=BODY, content=Fingerprint.json(REQUEST, route="/refunds"))

    assert len(database.records) == 4


def test_a_body_that_is_being_processed_is_in_flight_also_across_the_edge(postgresql, ob, monkeypatch):
    def claimed(session):
        return ob.idempotent(session, BODY, scope="acct_1", content=REQUEST)

    with postgresql.begin() as first, postgresql.begin() as second:
        with monkeypatch.context() as patch:
            at(patch, EDGE - SECOND)
            block = claimed(first)
            block.__enter__().respond(201)
        for instant in (EDGE - SECOND, EDGE):
            with monkeypatch.context() as patch:
                at(patch, instant)
                with pytest.raises(outbox.KeyInFlight, match="a request with key 'body-"):
                    claimed(second).__enter__()
        block.__exit__(None, None, None)


def test_what_was_answered_across_the_edge_since_the_snapshot_is_in_flight(postgresql, ob, monkeypatch):
    engine = postgresql.engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(engine) as late:
        late.execute(
            sa.text("SELECT count(*) FROM outbox_record")
        )  # from here on it sees nothing that is committed later
        with monkeypatch.context() as patch, postgresql.begin() as session:
            at(patch, EDGE - SECOND)
            with ob.idempotent(session, BODY, scope="acct_1", content=REQUEST) as claim:
                claim.respond(201)

        with monkeypatch.context() as patch:
            at(patch, EDGE)
            with pytest.raises(outbox.KeyInFlight, match="answered after this"):
                ob.idempotent(late, BODY, scope="acct_1", content=REQUEST).__enter__()


def test_who_waits_across_the_edge_gets_the_first_ones_answer(postgresql, ob, monkeypatch):
    answers = []

    def ask_again():
        with postgresql.begin() as session:
            block = ob.idempotent(session, BODY, scope="acct_1", content=REQUEST, wait=timedelta(seconds=5))
            with block as claim:
                answers.append(claim.response)

    thread = threading.Thread(target=ask_again)
    with postgresql.begin() as session:
        with monkeypatch.context() as patch:
            at(patch, EDGE - SECOND)
            block = ob.idempotent(session, BODY, scope="acct_1", content=REQUEST)
            claim = block.__enter__()
        monkeypatch.setattr(BodyRequest, "keys", at_edge(BodyRequest.keys))
        thread.start()
        wait_for_a_lock(postgresql)
        claim.respond(201)
        block.__exit__(None, None, None)
    thread.join()

    assert [answer.status for answer in answers] == [201]


class StalledClock:
    """The database's clock as two requests see it: the first one reads it, stalls while the second comes and goes, and reads on.

    starts, second, resumes: offsets from the edge of two spans.
    """

    def __init__(self, monkeypatch, starts, second, resumes, while_stalled):
        self._readings = [starts]
        self._second, self._resumes = second, resumes
        self._while_stalled = while_stalled
        derive = BodyRequest.keys
        monkeypatch.setattr(BodyRequest, "keys", lambda request, read: derive(request, self._read(read)))

    def _read(self, read):
        if read == EPOCH:  # asked by the library for a name
            return read
        if self._readings:
            first, self._now = self._readings.pop(), self._second
            self._while_stalled()
            self._now = self._resumes
            return EDGE + first
        return EDGE + self._now


offsets = st.timedeltas(-WINDOW, WINDOW)


@given(offsets=st.tuples(offsets, offsets, offsets).map(sorted))
@example(offsets=(-SECOND, SECOND, SECOND))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("leased", [False, True], ids=["one transaction", "leased"])
def test_two_equal_requests_within_the_window_meet_whatever_stalls(postgresql, ob, leased, offsets):
    starts, second, resumes = offsets
    request = {"body": str(uuid4())}
    executed = []

    def ask(name, leased):
        if leased:
            with ob.leased(postgresql.engine, BODY, scope="acct_1", content=request) as claim:
                if not claim.replayed:
                    executed.append(name)
                    claim.respond(201)
            return
        with postgresql.begin() as session:
            block = ob.idempotent(session, BODY, scope="acct_1", content=request, wait=timedelta(seconds=5))
            with block as claim:
                if not claim.replayed:
                    executed.append(name)
                    claim.respond(201)

    with pytest.MonkeyPatch.context() as patch:
        StalledClock(patch, starts, second, resumes, lambda: ask("second", False))
        ask("first", leased)

    assert executed == ["second"] or (resumes - second >= WINDOW and executed == ["second", "first"])


def at_edge(derive):
    return lambda self, _: derive(self, EDGE)


def wait_for_a_lock(postgresql):
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with postgresql.engine.connect() as connection:
        wait_for(lambda: connection.scalar(waiting), "a transaction to wait for the lock")


def test_a_rotation_within_the_window_changes_nothing(database, ob):
    rotated = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32)), "k2": bytes(32)}, current="k2"), env="test")
    for each in (ob, rotated):
        with database.begin() as session, each.idempotent(session, BODY, scope="acct_1", content=REQUEST) as claim:
            if not claim.replayed:
                each.enqueue(session, CHARGE, PAYLOAD)
                claim.respond(201)

    assert len(database.records) == len(database.entries) == 1


def test_no_client_can_send_a_key_that_meets_a_bodys(client, database):
    client.request(key=BODY)
    (record,) = database.records

    client.request(key=record.parent)

    assert len(database.records) == 2


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_leased_request_may_be_keyed_by_its_body_too(database, ob, monkeypatch, is_async):
    shop, other = Shop(database, ob, is_async=is_async), Shop(database, ob)
    keys = []

    def be_met(claim):
        keys.append(claim.child_key(CHARGE))
        with monkeypatch.context() as patch:
            at(patch, EDGE)
            with pytest.raises(outbox.KeyInFlight):
                other.request(key=BODY)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        at(patch, EDGE - SECOND)
        with pytest.raises(ZeroDivisionError):
            shop.request(be_met, key=BODY)
    at(monkeypatch, EDGE)
    shop.request(lambda claim: keys.append(claim.child_key(CHARGE)), key=BODY)

    assert keys[0] == keys[1]
    assert database.counts() == ALL


@pytest.mark.parametrize("changed", [{"scope": ""}, {"source": "s" * 60}])
def test_what_cannot_name_a_body_is_refused(client, database, changed):
    with pytest.raises(outbox.InvalidValue):
        client.request(key=BODY, **changed)

    assert database.counts() == NOTHING


# --- natural keys


def test_a_natural_key_needs_no_scope_and_its_children_are_enqueues(client, database, ob):
    natural = {"key": "invoice:42", "source": "app", "scope": ""}
    first = client.request(**natural)

    assert client.request(lambda session, claim: claim.respond(500), **natural) == first
    (entry,) = database.entries
    with database.begin() as session:
        again = ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42", if_exists="ignore")
    assert again.id == entry.id
    assert len(database.entries) == 1
