"""Requests over real HTTP, in every framework alike: answered once, replayed, refused, undone."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import ALL, NOTHING, Database
from support.http_requests import FRAMEWORKS, Caller, served
from support.http_shop import CHUNKS, Shop, shop_with_a_hot_row

import outbox
from outbox.http.openapi import kinds_by_status

pytestmark = pytest.mark.as_app

SECOND = timedelta(seconds=1)


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)  # a test that needs not all of them names its own


@pytest.fixture
def shop(postgresql: Database, ob: outbox.Outbox) -> Shop:
    return Shop(postgresql, ob)


@pytest.fixture
def caller(framework: str, shop: Shop) -> Iterator[Caller]:
    with served(framework, shop) as url:
        caller = Caller(url)
        yield caller
        caller.close()


def problem_of(response: Any) -> tuple[int, str]:
    """The status and the name of the problem that a response is."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem.keys() == {"type", "title", "status", "detail"}
    assert problem["status"] == response.status_code
    return problem["status"], problem["type"].removeprefix("tag:sqlalchemy-outbox,2026:")


# --- answered once


def test_a_request_commits_all_of_its_work_with_its_answer(caller: Caller, shop: Shop) -> None:
    response = caller.post()

    assert (response.status_code, response.json()) == (201, {"order": "placed", "call": 1})
    assert response.headers["set-cookie"].startswith("cart=")
    assert "idempotent-replayed" not in response.headers
    assert shop.database.counts() == ALL


def test_a_retry_gets_the_same_answer_and_does_nothing(caller: Caller, shop: Shop) -> None:
    first, retry = caller.post(), caller.post()

    assert (retry.status_code, retry.content) == (first.status_code, first.content)
    assert retry.headers["content-type"] == first.headers["content-type"]
    assert retry.headers["location"] == first.headers["location"]
    assert retry.headers["idempotent-replayed"] == "true"
    assert shop.calls == 1
    assert shop.database.counts() == ALL


def test_a_replay_has_the_allowed_headers_only(caller: Caller, shop: Shop) -> None:
    caller.post()

    retry = caller.post()

    assert "set-cookie" not in retry.headers
    assert "x-trace" not in retry.headers
    (record,) = shop.database.records
    assert "cart=" not in record.headers


def test_an_answer_without_a_body_is_replayed_without_one(caller: Caller) -> None:
    first, retry = caller.post("empty"), caller.post("empty")

    assert [(answer.status_code, answer.content) for answer in (first, retry)] == [(204, b"")] * 2
    assert retry.headers["idempotent-replayed"] == "true"
    assert retry.headers.get("content-type") == first.headers.get("content-type")


def test_a_body_of_a_status_that_has_none_is_neither_sent_nor_kept(caller: Caller, shop: Shop) -> None:
    first, retry = caller.post("empty, and yet null"), caller.post("empty, and yet null")

    assert [(answer.status_code, answer.content) for answer in (first, retry)] == [(204, b"")] * 2
    assert retry.headers["idempotent-replayed"] == "true"
    assert [record.body for record in shop.database.records] == [b""]


def test_the_key_in_quotes_is_the_same_key(caller: Caller, shop: Shop) -> None:
    answers = [caller.post(key=key) for key in ("retry-001", '"retry-001"', '"retry-001";v=2')]

    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true", "true"]
    assert shop.calls == 1


def test_two_callers_with_one_key_are_two_requests(caller: Caller, shop: Shop) -> None:
    answers = [caller.post(token=token) for token in ("ada-token", "bob-token")]

    assert [answer.json()["call"] for answer in answers] == [1, 2]
    assert {record.scope for record in shop.database.records} == {"ada", "bob"}


def test_a_stream_is_kept_and_replayed_as_a_whole(caller: Caller, shop: Shop) -> None:
    answers = [caller.post("stream") for _ in range(2)]

    assert [answer.content for answer in answers] == [b"".join(CHUNKS)] * 2
    assert answers[1].headers["content-type"].startswith("text/csv")
    assert shop.calls == 1


def test_what_runs_after_the_answer_sees_it_committed(caller: Caller, shop: Shop) -> None:
    caller.post()

    assert shop.has_deferred.wait(60)
    assert shop.deferred == [ALL]


# --- errors that are kept, and errors that are not


def test_a_chosen_error_is_kept_with_its_work_and_replayed(caller: Caller, shop: Shop) -> None:
    first, retry = caller.post("choose"), caller.post("choose")

    assert [(answer.status_code, answer.json()) for answer in (first, retry)] == [(402, {"error": "declined"})] * 2
    assert [answer.headers["x-reason"] for answer in (first, retry)] == ["declined"] * 2
    assert shop.calls == 1
    assert shop.database.counts() == ALL


def test_a_rejection_keeps_its_answer_and_nothing_else(caller: Caller, shop: Shop) -> None:
    answers = [caller.post("reject") for _ in range(2)]

    assert [answer.status_code for answer in answers] == [402, 402]
    assert shop.calls == 1
    assert shop.database.counts() == NOTHING | {"records": 1}


@pytest.mark.parametrize(
    ("do", "status"),
    [
        ("raise", 500),
        ("abort", 404),
        ("error", 400),
        ("choose and abort", 404),
        ("contradict", 500),
        ("large", 500),
        ("stream breaks", 500),
        ("commits itself", 500),
    ],
)
def test_an_unexpected_error_undoes_all_and_frees_the_key(caller: Caller, shop: Shop, do: str, status: int) -> None:
    answers = [caller.post(do) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [status, status]
    assert shop.calls == 2
    assert shop.database.counts() == NOTHING
    assert caller.post().status_code == 201


def test_a_commit_that_fails_is_never_a_success(caller: Caller, shop: Shop) -> None:
    shop.database.execute(sa.text("CREATE TABLE fussy (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    response = caller.post("commit fails")

    assert response.status_code == 500
    assert b"placed" not in response.content
    assert shop.database.counts() == NOTHING
    assert shop.deferred == []
    assert caller.post().status_code == 201


class TestConflict:
    """Two transactions want one row: PostgreSQL ends one of them with 40001, in the handler or at its commit."""

    @pytest.fixture
    def shop(self, postgresql: Database, ob: outbox.Outbox) -> Shop:
        return shop_with_a_hot_row(postgresql, ob)

    @pytest.mark.parametrize("do", ["meets another", "meets another at its commit"])
    def test_a_request_that_the_database_undoes_works_when_it_comes_again(
        self, caller: Caller, shop: Shop, do: str
    ) -> None:
        undone = caller.post(do)
        left = shop.database.counts()
        again = caller.post(do)

        assert problem_of(undone) == (503, "request-undone")
        assert undone.headers["retry-after"] == "1"
        assert undone.json()["detail"] == (
            "the database ended this request's transaction in favour of another one: nothing was stored; send the request again"
        )
        assert left == NOTHING
        assert (again.status_code, again.headers.get("idempotent-replayed")) == (201, None)
        assert shop.database.counts() == ALL

    def test_every_refusal_that_an_api_publishes_is_answered_and_no_other(self, caller: Caller, shop: Shop) -> None:
        answers = [caller.post("meets another"), caller.post(key=None), caller.post(key="")]
        answers += [
            caller.post(padding="x" * 1024 * 1024),
            caller.post_empty_chunks(),
            caller.post(),
            caller.post("reject"),
        ]
        shop.database.age_records(timedelta(days=2))
        answers.append(caller.post())
        with shop.database.begin() as session, shop.ob.idempotent(session, "held", scope="ada", content=b"") as claim:
            answers.append(caller.post(key="held"))
            claim.respond(201)

        published = [(status, kind.name) for status, kinds in kinds_by_status().items() for kind in kinds]
        assert sorted(problem_of(answer) for answer in answers if answer.status_code != 201) == sorted(published)


@pytest.fixture
def hurried(shop: Shop) -> None:
    """The database lets no statement of a new connection take longer than a moment."""
    name = shop.database.url.database
    shop.database.execute(sa.text(f'ALTER DATABASE "{name}" SET statement_timeout = 1000'))
    shop.database.dispose()


@pytest.mark.parametrize("framework", ["starlette", "flask", "django"], indirect=True)
def test_a_request_that_the_database_has_no_time_for_gets_a_retry_after(
    hurried: None, caller: Caller, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    answer = caller.post("takes too long")

    assert problem_of(answer) == (503, "request-undone")
    assert answer.headers["retry-after"] == "1"
    assert shop.database.counts() == NOTHING
    assert "one of its statements timed out (SQLSTATE 57014)" in caplog.text


@pytest.mark.parametrize("do", ["collide and abort", "roll back and abort", "close and abort"])
def test_the_answer_of_a_handler_that_has_lost_its_transaction_is_kept(caller: Caller, shop: Shop, do: str) -> None:
    """Nothing of it was going to be kept: a failed flush that the handler answers with an error is the usual case."""
    answer = caller.post(do)

    assert answer.status_code == 404
    assert shop.database.counts() == NOTHING


# --- refused


def test_a_request_without_a_key_is_refused(caller: Caller, shop: Shop) -> None:
    assert problem_of(caller.post(key=None)) == (400, "key-missing")
    assert shop.calls == 0


@pytest.mark.parametrize("key", ['"unbalanced', "a b", "a,b", "k" * 256])
def test_a_malformed_key_is_refused(caller: Caller, shop: Shop, key: str) -> None:
    assert problem_of(caller.post(key=key)) == (400, "key-malformed")
    assert shop.calls == 0


@pytest.mark.parametrize(("one", "other"), [("retry-001", "retry-001"), ('"q1', 'q2"'), ('"q1";a="', '"'), ('"', '"')])
def test_two_headers_are_refused_over_the_wire(caller: Caller, shop: Shop, one: str, other: str) -> None:
    """In WSGI they are one line, and may look like one String."""
    response = caller.post(key=one, lines=[("Idempotency-Key", other)])

    assert problem_of(response) == (400, "key-malformed")
    assert shop.calls == 0


@pytest.mark.parametrize("change", [{"do": "error"}, {"path": "/orders?dry=1"}, {"path": "/orders/1/refunds"}])
def test_a_key_with_another_request_is_refused(caller: Caller, shop: Shop, change: dict[str, str]) -> None:
    caller.post()

    assert problem_of(caller.post(**change)) == (422, "request-mismatch")
    assert shop.calls == 1


def test_one_body_for_two_resources_is_two_requests(caller: Caller) -> None:
    caller.post(path="/orders/1/refunds")

    assert problem_of(caller.post(path="/orders/2/refunds")) == (422, "request-mismatch")


def test_an_expired_key_whose_effects_are_remembered_is_refused(caller: Caller, shop: Shop) -> None:
    caller.post()
    shop.database.age_records(timedelta(hours=25))

    assert problem_of(caller.post()) == (422, "key-expired")


def test_a_large_request_is_refused(caller: Caller, shop: Shop) -> None:
    assert problem_of(caller.post(padding="x" * 1024 * 1024)) == (413, "request-too-large")
    assert shop.calls == 0


def test_an_unknown_client_is_refused_before_anything_is_claimed(caller: Caller, shop: Shop) -> None:
    response = caller.post(token="nobody", key=None)

    assert response.status_code == 401
    assert shop.database.counts() == NOTHING
    assert caller.post().status_code == 201


def test_who_lost_access_gets_no_replay(caller: Caller) -> None:
    caller.post()

    response = caller.post(token="nobody")

    assert response.status_code == 401
    assert b"placed" not in response.content


# --- in flight


def test_a_request_in_flight_is_a_conflict_at_once(caller: Caller, shop: Shop) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(caller.post, "wait")
        assert shop.entered.wait(60)

        second = caller.post("wait")
        shop.may_leave.set()

        assert problem_of(second) == (409, "key-in-flight")
        assert second.headers["retry-after"] == "1"
        assert first.result().status_code == 201
    assert caller.post("wait").headers["idempotent-replayed"] == "true"
    assert shop.calls == 1


class TestWaiting:
    @pytest.fixture
    def shop(self, postgresql: Database, ob: outbox.Outbox, request: pytest.FixtureRequest) -> Shop:
        return Shop(postgresql, ob, {"wait": request.param})

    @pytest.mark.parametrize("shop", [30 * SECOND], indirect=True)
    def test_a_request_may_wait_for_the_one_in_flight_and_get_its_answer(self, caller: Caller, shop: Shop) -> None:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(caller.post, "wait")
            assert shop.entered.wait(60)
            second = pool.submit(caller.post, "wait")
            until_a_session_waits(shop.database)
            shop.may_leave.set()

            assert first.result().content == second.result().content
            assert second.result().headers["idempotent-replayed"] == "true"
        assert shop.calls == 1

    @pytest.mark.parametrize("shop", [60 * SECOND], indirect=True)
    @pytest.mark.parametrize("framework", ["starlette", "flask", "django"], indirect=True)
    def test_a_statement_timeout_within_the_wait_is_a_conflict(self, hurried: None, caller: Caller, shop: Shop) -> None:
        with shop.database.begin() as session, shop.ob.idempotent(session, "held", scope="ada", content=b"") as claim:
            answer = caller.post(key="held")
            claim.respond(201)

        assert problem_of(answer) == (409, "key-in-flight")
        assert answer.headers["retry-after"] == "1"
        assert caller.post().status_code == 201

    @pytest.mark.parametrize("shop", [SECOND / 100], indirect=True)
    def test_a_budget_that_runs_out_is_a_conflict(self, caller: Caller, shop: Shop) -> None:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(caller.post, "wait")
            assert shop.entered.wait(60)

            second = caller.post("wait")
            shop.may_leave.set()

            assert problem_of(second) == (409, "key-in-flight")
            assert second.headers["retry-after"] == "1"
            assert first.result().status_code == 201


def until_a_session_waits(database: Database) -> None:
    """Return once a backend of this database waits for a lock."""
    waiting, deadline = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted"), time.monotonic() + 30
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        while not connection.scalar(waiting):
            assert time.monotonic() < deadline, "no process waits"
