"""What only Django has: two ways to write in one transaction, its nested blocks, and what cannot be joined."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from django.http import HttpResponse, JsonResponse
from django.template.response import SimpleTemplateResponse
from django.test import Client, RequestFactory
from django.urls import include, path
from support.database import ALL, CHARGE, NOTHING, PAYLOAD, Database
from support.hints import listening
from support.http_requests import use_django

import outbox
from outbox.django import joined_session
from outbox.http import ClaimedRequest, Policy
from outbox.http.django import Idempotency, as_response

pytestmark = pytest.mark.as_app

PLACE = "INSERT INTO shop_order (customer, amount) VALUES ('ada', 2000)"


@pytest.fixture
def shop(postgresql: Database) -> Iterator[Database]:
    use_django(postgresql, "READ_COMMITTED", [])
    yield postgresql
    connections["default"].close()


def place() -> None:
    """Write a row as Django's ORM does."""
    with connections["default"].cursor() as cursor:
        cursor.execute(PLACE)


def ask(view: Any, ob: outbox.Outbox, **settings_of: Any) -> HttpResponse:
    idempotency = Idempotency(scope=lambda request: "ada", policy=Policy(outbox=ob), **settings_of)
    headers = {"Idempotency-Key": "retry-001"}
    request = RequestFactory().post("/orders", b"{}", content_type="application/json", headers=headers)
    return idempotency.claim(view)(request)


def buying(ob: outbox.Outbox, end: Any) -> Any:
    """A view that writes by Django, enqueues, and answers what `end(claim)` returns."""

    def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        place()
        ob.enqueue(claimed.session, CHARGE, PAYLOAD)
        answer: HttpResponse = end(claimed.claim)
        return answer

    return view


def raising(claim: outbox.Claim) -> HttpResponse:
    raise LookupError


# --- one transaction


def test_what_django_writes_commits_with_the_record_and_the_entry(shop: Database, ob: outbox.Outbox) -> None:
    view = buying(ob, lambda claim: JsonResponse({"order": 1}, status=201))

    first, retry = ask(view, ob), ask(view, ob)

    assert [(answer.status_code, json.loads(answer.content)) for answer in (first, retry)] == [(201, {"order": 1})] * 2
    assert [answer.headers.get("Idempotent-Replayed") for answer in (first, retry)] == [None, "true"]
    assert shop.counts() == ALL


def test_an_exception_undoes_what_both_have_written(shop: Database, ob: outbox.Outbox) -> None:
    with pytest.raises(LookupError):
        ask(buying(ob, raising), ob)

    assert shop.counts() == NOTHING


def test_an_unexpected_error_undoes_what_both_have_written(shop: Database, ob: outbox.Outbox) -> None:
    answer = ask(buying(ob, lambda claim: HttpResponse(status=404)), ob)

    assert answer.status_code == 404
    assert shop.counts() == NOTHING


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(("status", "is_kept"), [(201, True), (400, False)])
def test_a_hook_of_the_views_runs_if_its_work_is_kept_only(
    shop: Database, ob: outbox.Outbox, status: int, is_kept: bool, is_nested: bool
) -> None:
    """In a block of the app's own around it, too: that continues, with what it has written and its own hooks."""
    ran: list[str] = []

    def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        place()
        transaction.on_commit(lambda: ran.append("the view's"))
        return HttpResponse(status=status)

    with transaction.atomic() if is_nested else nullcontext():
        if is_nested:
            transaction.on_commit(lambda: ran.append("the app's"))
        answer = ask(view, ob)
        if is_nested:
            place()

    assert answer.status_code == status
    assert ran == is_nested * ["the app's"] + is_kept * ["the view's"]
    assert shop.counts() == NOTHING | {"orders": is_kept + is_nested, "records": int(is_kept)}


def test_a_rejection_undoes_what_django_has_written_too(shop: Database, ob: outbox.Outbox) -> None:
    answer = ask(buying(ob, lambda claim: as_response(claim.reject(402, {"error": "declined"}))), ob)

    assert (answer.status_code, json.loads(answer.content)) == (402, {"error": "declined"})
    assert shop.counts() == NOTHING | {"records": 1}


def test_a_template_is_rendered_before_the_commit(shop: Database, ob: outbox.Outbox) -> None:
    class Page(SimpleTemplateResponse):
        @property
        def rendered_content(self) -> str:
            place()
            return "an order"

    answer = ask(lambda request, claimed: Page("none.html", status=201), ob)

    assert answer.content == b"an order"
    assert shop.counts() == NOTHING | {"orders": 1, "records": 1}


def test_the_outbox_takes_no_connection_of_its_own(shop: Database, ob: outbox.Outbox) -> None:
    seen = []

    def count(claim: outbox.Claim) -> HttpResponse:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            seen.append(cursor.fetchone()[0])
        return HttpResponse()

    shop.dispose()
    ask(buying(ob, count), ob)

    assert seen == [1]


# --- django's own blocks inside


def test_an_entry_goes_with_the_nested_block_that_is_rolled_back(shop: Database, ob: outbox.Outbox) -> None:
    def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        place()
        ob.enqueue(claimed.session, CHARGE, PAYLOAD, discriminator="stays")
        try:
            with transaction.atomic():
                place()
                ob.enqueue(claimed.session, CHARGE, PAYLOAD, discriminator="goes")
                raise LookupError
        except LookupError:
            return HttpResponse(status=201)

    ask(view, ob)

    assert [entry.discriminator for entry in shop.entries] == ["stays"]
    assert shop.counts() == ALL


def test_a_statement_of_djangos_that_fails_in_a_nested_block_is_survived(shop: Database, ob: outbox.Outbox) -> None:
    def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        ob.enqueue(claimed.session, CHARGE, PAYLOAD)
        with pytest.raises(DatabaseError), transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        place()
        return HttpResponse(status=201)

    ask(view, ob)

    assert shop.counts() == ALL


def test_a_block_around_it_that_is_rolled_back_leaves_nothing(shop: Database, ob: outbox.Outbox) -> None:
    def undo() -> None:
        with transaction.atomic():
            ask(buying(ob, lambda claim: HttpResponse(status=201)), ob)
            raise LookupError

    with pytest.raises(LookupError):
        undo()

    assert shop.counts() == NOTHING


# --- a session of the app's own


def test_a_session_can_be_had_without_a_claim(shop: Database, ob: outbox.Outbox) -> None:
    with transaction.atomic():
        place()
        with joined_session() as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="order:1")

    assert shop.counts() == ALL | {"records": 0}


def test_a_hint_is_sent_when_django_has_committed(shop: Database, ob: outbox.Outbox) -> None:
    with listening(shop) as ear:
        with transaction.atomic():
            with joined_session() as session:
                ob.enqueue(session, "mail.send", PAYLOAD, parent="order:1")
            transaction.set_rollback(True)
        with transaction.atomic(), joined_session() as session:
            ob.enqueue(session, CHARGE, PAYLOAD, parent="order:2", destination="100%s")

        assert ear.next().due == {("100%s", CHARGE)}


def test_a_claim_that_is_open_at_the_end_keeps_all_from_being_committed(shop: Database, ob: outbox.Outbox) -> None:
    def leave_it_open() -> None:
        with transaction.atomic(), joined_session() as session:
            ob.idempotent(session, "retry-001", scope="ada", content=b"").__enter__()
            place()

    with pytest.raises(outbox.ClaimLost) as lost:  # the session's close takes the savepoint of the claim away
        leave_it_open()

    assert isinstance(lost.value.__context__, outbox.ClaimOpen)
    assert shop.counts() == NOTHING


def test_without_a_transaction_of_djangos_there_is_nothing_to_join(shop: Database) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused, joined_session():
        pass

    assert str(refused.value) == (
        "Django has no open transaction on 'default' that the outbox can join: use `with transaction.atomic(using='default')`"
    )


def test_another_database_cannot_be_joined(shop: Database) -> None:
    connections.settings["side"] = connections.configure_settings(
        {"default": {}, "side": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    )["side"]
    try:
        with pytest.raises(outbox.ConfigurationError) as refused, transaction.atomic("side"), joined_session("side"):
            pass
    finally:
        connections["side"].close()
        del connections["side"], connections.settings["side"]

    assert str(refused.value) == (
        "the outbox works with Django only on PostgreSQL with psycopg 3, but 'side' is another database"
    )


def test_instants_without_a_time_zone_are_refused(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "USE_TZ", False)

    with pytest.raises(outbox.ConfigurationError) as refused, transaction.atomic(), joined_session():
        pass

    assert str(refused.value) == (
        "the outbox needs instants with their time zone from Django's connection: set USE_TZ = True"
    )


def test_an_async_view_is_refused(shop: Database, ob: outbox.Outbox) -> None:
    async def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(outbox.ConfigurationError) as refused:
        ask(view, ob)

    assert (
        str(refused.value)
        == "the view 'view' is async, but Django's transactions are sync: write the view as a plain def"
    )


@pytest.mark.parametrize("scope", [None, "ada"])
def test_a_scope_that_is_no_function_is_an_error(scope: Any) -> None:
    with pytest.raises(outbox.ConfigurationError, match=r"For example scope=lambda request: request\.user"):
        Idempotency(scope=scope)


def test_a_row_of_the_database_is_seen_by_both(shop: Database) -> None:
    with transaction.atomic():
        place()
        with joined_session() as session:
            assert session.scalar(sa.text("SELECT count(*) FROM shop_order")) == 1


# --- what surrounds a view


class Catching:
    """A middleware that answers every exception, by both ways that Django has for it."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        try:
            return self._get_response(request)
        except Exception:
            return HttpResponse("caught", status=500)

    def process_exception(self, request: Any, error: Exception) -> HttpResponse:
        return HttpResponse("caught", status=500)


def hide(request: Any) -> HttpResponse:
    return HttpResponse("hidden", status=500)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_replay_and_every_refusal_pass_all_that_catches(
    shop: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    idempotency = Idempotency(scope=lambda request: "ada", policy=Policy(outbox=ob), max_body_bytes=100)

    @idempotency.claim
    def view(request: Any, claimed: ClaimedRequest[Any]) -> HttpResponse:
        place()
        return HttpResponse("placed", status=201)

    urls = ModuleType("urls")
    vars(urls).update(urlpatterns=[path("v1/", include(([path("orders", view)], "orders")))], handler500=hide)
    monkeypatch.setattr(settings, "ROOT_URLCONF", urls)
    monkeypatch.setattr(settings, "MIDDLEWARE", [f"{__name__}.Catching"])
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    client, key = Client(), {"Idempotency-Key": "retry-001"}

    def post(body: bytes, headers: dict[str, str] = key) -> HttpResponse:
        return client.post("/v1/orders", body, content_type="text/plain", headers=headers)

    first, replay = post(b"{}"), post(b"{}")
    refusals = [post(b"other"), post(b"{}", {}), post(b"{}", {"Idempotency-Key": '"'}), post(b"x" * 101)]

    assert (first.status_code, replay.status_code, replay.content) == (201, 201, b"placed")
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert [refusal.status_code for refusal in refusals] == [422, 400, 400, 413]
    assert {refusal.headers["Content-Type"] for refusal in refusals} == {"application/problem+json"}
    assert shop.counts() == NOTHING | {"orders": 1, "records": 1}


@pytest.mark.parametrize("atomic", [False, True])
def test_a_conflict_at_the_commit_is_a_503_with_atomic_requests_too(
    shop: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    for statement in (
        "CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'met another' USING ERRCODE = '40001'; END $$",
        "CREATE CONSTRAINT TRIGGER meet AFTER INSERT ON shop_order DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION meet()",
    ):
        shop.execute(sa.text(statement))
    idempotency = Idempotency(scope=lambda request: "ada", policy=Policy(outbox=ob))
    view = idempotency.claim(buying(ob, lambda claim: HttpResponse(status=201)))
    monkeypatch.setattr(settings, "ROOT_URLCONF", (path("orders", view),))
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)

    answer = Client().post("/orders", b"{}", content_type="text/plain", headers={"Idempotency-Key": "retry-001"})

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert shop.counts() == NOTHING
