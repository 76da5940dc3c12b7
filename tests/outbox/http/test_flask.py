"""What only Flask has: scoped sessions, forms that were read before, views that are coroutines, handlers of errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, Database, Order, colliding_order
from support.http_requests import flask_app
from support.http_shop import Shop
from werkzeug.middleware.dispatcher import DispatcherMiddleware

import outbox
from outbox.http import ClaimedRequest
from outbox.http.flask import Idempotency

pytestmark = pytest.mark.as_app

HEADERS = {"Authorization": "ada-token", "Idempotency-Key": "retry-001"}


@pytest.fixture
def shop(database: Database, ob: outbox.Outbox) -> Shop:
    return Shop(database, ob)


@pytest.fixture
def app() -> flask.Flask:
    made = flask.Flask("shop")
    made.testing = True  # errors come out of the client instead of a 500
    return made


def idempotency_of(shop: Shop, **settings: Any) -> Idempotency:
    sessions = settings.pop("sessions", sessionmaker(shop.database.engine))
    return Idempotency(sessions, scope=lambda: "ada", policy=shop.policy, **settings)


def post(app: flask.Flask, **request: Any) -> Any:
    return app.test_client().post("/orders", headers=HEADERS, **request)


def test_a_retry_is_replayed_on_every_database(shop: Shop) -> None:
    answers = [post(flask_app(shop), json={"do": "place"}) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].data == answers[1].data
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert shop.database.counts() == ALL


def test_the_session_of_a_scoped_session_is_the_one_of_the_rest_of_the_app(shop: Shop, app: flask.Flask) -> None:
    sessions = scoped_session(sessionmaker(shop.database.engine))
    idempotency = idempotency_of(shop, sessions=sessions)

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> dict[str, bool]:
        sessions.add(Order(customer="ada", amount=2000))
        return {"same": sessions() is request.session}

    assert post(app).json == {"same": True}
    assert len(shop.database.orders) == 1
    sessions.remove()


def roll_back(session: Session) -> None:
    session.rollback()


def roll_back_and_continue(session: Session) -> None:
    session.rollback()
    session.execute(sa.insert(Order).values(customer="bob", amount=1))


def end_the_savepoint_of_the_claim(session: Session) -> None:
    savepoint = session.get_nested_transaction()
    assert savepoint is not None
    savepoint.rollback()


def close(session: Session) -> None:
    session.close()


@pytest.mark.parametrize("collides", [False, True])
@pytest.mark.parametrize("end", [roll_back, roll_back_and_continue, end_the_savepoint_of_the_claim, close])
def test_a_view_may_roll_back_a_session_in_use_and_answer_with_an_error(
    shop: Shop, app: flask.Flask, end: Callable[[Session], None], collides: bool
) -> None:
    """A good answer after it is none: what it speaks of is lost, and so is what was in the session before."""
    app.testing = False
    sessions = scoped_session(sessionmaker(shop.database.engine))
    idempotency = idempotency_of(shop, sessions=sessions)
    statuses = [409, 201]

    @app.before_request
    def log_in() -> None:
        sessions.execute(sa.insert(Order).values(customer="visitor", amount=0))

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> tuple[dict[str, str], int]:
        shop.ob.enqueue(sessions(), CHARGE, PAYLOAD)
        sessions.add_all([colliding_order() for _ in range(1 + collides)])
        try:
            sessions.flush()
        except sa.exc.IntegrityError:
            assert collides
        end(sessions())
        return {"error": "taken"}, statuses.pop(0)

    answers = [post(app) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [409, 500]
    assert shop.database.counts() == NOTHING
    sessions.remove()


NOT_ASYNC = (
    "the claim of a Flask view works in a Session, not in an AsyncSession: pass"
    " sessionmaker(create_engine(...)) to Idempotency, for async views too"
)


def test_sessions_that_are_asynchronous_are_refused_at_once(shop: Shop) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        idempotency_of(shop, sessions=shop.async_sessions())

    assert str(refused.value) == NOT_ASYNC


def test_a_factory_of_async_sessions_is_refused_at_the_first_request(shop: Shop, app: flask.Flask) -> None:
    sessions = shop.async_sessions()
    idempotency = idempotency_of(shop, sessions=lambda: sessions())

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> str:
        raise AssertionError("the view was reached")

    with pytest.raises(outbox.ConfigurationError) as refused:
        post(app)
    assert str(refused.value) == NOT_ASYNC


def test_what_makes_no_sessions_is_refused_at_once(shop: Shop) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        idempotency_of(shop, sessions="sqlite://")

    assert (
        str(refused.value)
        == "sessions must make a Session for each request, as a sessionmaker does; str makes no Session"
    )


def test_the_arguments_of_the_route_follow_the_claimed_request(shop: Shop, app: flask.Flask) -> None:
    idempotency = idempotency_of(shop)

    @app.post("/orders/<int:number>")
    @idempotency.claim
    def place(request: ClaimedRequest[Any], number: int) -> dict[str, int]:
        return {"number": number}

    assert app.test_client().post("/orders/7", headers=HEADERS).json == {"number": 7}


def test_an_error_that_the_app_handles_is_undone(shop: Shop, app: flask.Flask) -> None:
    idempotency = idempotency_of(shop)

    @app.errorhandler(KeyError)
    def handle(error: KeyError) -> tuple[str, int]:
        return "handled", 200

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> str:
        request.session.add(Order(customer="ada", amount=2000))
        request.session.flush()
        raise KeyError("amount")

    assert post(app).text == "handled"
    assert shop.database.counts() == NOTHING


def test_a_form_that_was_read_before_the_claim_is_an_error_with_advice(shop: Shop, app: flask.Flask) -> None:
    """Its body is gone: two different forms would look like one request, and the second get the first's answer."""
    idempotency = idempotency_of(shop)

    @app.before_request
    def read() -> None:
        assert flask.request.form["amount"]

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> str:
        return "placed"

    with pytest.raises(outbox.ClaimError) as refused:
        post(app, data={"amount": 1})

    assert str(refused.value) == (
        "the request's body was read before the claim, and 0 of its 8 bytes are left, so a retry could not be"
        " distinguished from another request: call request.get_data() before anything else reads the body, because it"
        " keeps the bytes, or set Idempotency(content=...)"
    )
    assert shop.database.counts() == NOTHING


def test_a_body_of_unknown_length_is_limited_too(shop: Shop, app: flask.Flask) -> None:
    idempotency = idempotency_of(shop, max_body_bytes=10)

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> str:
        return "placed"

    response = post(app, data=b"x" * 11, environ_overrides={"CONTENT_LENGTH": "", "wsgi.input_terminated": True})

    assert response.status_code == 413
    assert "has more than 10 bytes" in response.json["detail"]


def test_a_stream_is_closed_once_it_is_kept(shop: Shop, app: flask.Flask) -> None:
    closed = []
    idempotency = idempotency_of(shop)

    class Lines:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"a", b"b"])

        def close(self) -> None:
            closed.append(True)

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> flask.Response:
        return flask.Response(Lines())  # type: ignore[arg-type]

    with post(app) as response:
        assert response.data == b"ab"

    assert closed == [True]


def test_a_file_is_kept_and_can_be_read_by_what_comes_after(shop: Shop, app: flask.Flask) -> None:
    read = []
    idempotency = idempotency_of(shop)

    @app.after_request
    def look(response: flask.Response) -> flask.Response:
        read.append(response.get_data())
        return response

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> flask.Response:
        return flask.send_file(__file__, mimetype="text/plain")

    answers = [post(app) for _ in range(2)]

    assert answers[0].data == answers[1].data == Path(__file__).read_bytes()
    assert read == [answers[0].data] * 2


def test_a_stream_without_end_is_broken_off_and_undone(shop: Shop, app: flask.Flask) -> None:
    idempotency = idempotency_of(shop)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 1024

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> flask.Response:
        return flask.Response(endless())

    with pytest.raises(outbox.NotSerializable) as refused:
        post(app)

    assert str(refused.value) == (
        "the answer has more than 262144 bytes, the maximum that can be stored for a replay: send a smaller answer, or a"
        " link, or set max_payload_bytes"
    )
    assert shop.database.counts() == NOTHING


def test_every_connection_is_given_back(shop: Shop, app: flask.Flask) -> None:
    app.testing = False
    idempotency = idempotency_of(shop)

    @app.post("/orders")
    @idempotency.claim
    def place(request: ClaimedRequest[Any]) -> str:
        raise RuntimeError

    for _ in range(3):
        assert post(app).status_code == 500
    assert app.test_client().post("/orders").status_code == 400

    assert shop.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


# --- what surrounds a view


def test_a_replay_and_every_refusal_pass_all_that_catches(shop: Shop) -> None:
    """A blueprint in an app that is mounted in another, with handlers of every error, in production and as tests have it."""
    for propagate in (False, True):
        inner, blueprint = flask.Flask("inner"), flask.Blueprint("orders", "orders")
        idempotency = idempotency_of(shop, max_body_bytes=100)

        @blueprint.post("/orders")
        @idempotency.claim
        def place(request: ClaimedRequest[Any]) -> tuple[str, int]:
            return "placed", 201

        @blueprint.errorhandler(Exception)
        @inner.errorhandler(Exception)
        @inner.errorhandler(500)
        def hide(error: Exception) -> tuple[str, int]:
            return "hidden", 500

        inner.testing = inner.config["PROPAGATE_EXCEPTIONS"] = propagate
        inner.register_blueprint(blueprint)
        inner.after_request(lambda response: response)
        app = flask.Flask("outer")
        app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/v1": inner})  # type: ignore[method-assign]
        client, key = app.test_client(), {"Idempotency-Key": f"retry-{propagate}"}
        first = client.post("/v1/orders", headers=key)
        replay = client.post("/v1/orders", headers=key)
        refusals = [
            client.post("/v1/orders", headers=key, data=b"other"),
            client.post("/v1/orders"),
            client.post("/v1/orders", headers={"Idempotency-Key": '"'}),
            client.post("/v1/orders", headers=key, data=b"x" * 101),
        ]

        assert (first.status_code, replay.status_code, replay.data) == (201, 201, b"placed")
        assert replay.headers["Idempotent-Replayed"] == "true"
        assert [refusal.status_code for refusal in refusals] == [422, 400, 400, 413]
        assert {refusal.content_type for refusal in refusals} == {"application/problem+json"}
