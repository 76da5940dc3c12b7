"""What only Django has: two ways to write in one transaction, its nested blocks, and what cannot be joined."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from django.http import HttpResponse, JsonResponse
from django.template.response import SimpleTemplateResponse
from django.test import RequestFactory
from receiving import use_django
from support import ALL, CHARGE, NOTHING, PAYLOAD, Database

import outbox
from outbox.http import Policy
from outbox.http.django import ClaimedRequest, Idempotency, as_response, joined_session

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
    return idempotency.claimed(view)(request)


def buying(ob: outbox.Outbox, end: Any) -> Any:
    """A view that writes by Django, enqueues, and answers what `end(claim)` returns."""

    def view(request: Any, claimed: ClaimedRequest) -> HttpResponse:
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


def test_an_error_that_nobody_chose_undoes_what_both_have_written(shop: Database, ob: outbox.Outbox) -> None:
    answer = ask(buying(ob, lambda claim: HttpResponse(status=404)), ob)

    assert answer.status_code == 404
    assert shop.counts() == NOTHING


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
    shop._observer.dispose()
    ask(buying(ob, count), ob)

    assert seen == [1]


# --- django's own blocks inside


def test_an_entry_goes_with_the_nested_block_that_is_rolled_back(shop: Database, ob: outbox.Outbox) -> None:
    def view(request: Any, claimed: ClaimedRequest) -> HttpResponse:
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
    def view(request: Any, claimed: ClaimedRequest) -> HttpResponse:
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


def test_a_claim_that_is_open_at_the_end_keeps_all_of_it_from_being_committed(
    shop: Database, ob: outbox.Outbox
) -> None:
    def leave_it_open() -> None:
        with transaction.atomic(), joined_session() as session:
            ob.idempotent(session, "retry-001", scope="ada", request=b"").__enter__()
            place()

    with pytest.raises(outbox.ClaimOpen):
        leave_it_open()

    assert shop.counts() == NOTHING


def test_without_a_transaction_of_djangos_there_is_nothing_to_join(shop: Database) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused, joined_session():
        pass

    assert str(refused.value) == (
        "Django has no transaction open on 'default', which the outbox could join: with transaction.atomic(using='default')"
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
        "the outbox joins Django on PostgreSQL with psycopg 3 only, and 'side' is another database"
    )


def test_instants_without_a_time_zone_are_refused(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "USE_TZ", False)

    with pytest.raises(outbox.ConfigurationError) as refused, transaction.atomic(), joined_session():
        pass

    assert str(refused.value) == (
        "the outbox needs instants with their time zone from Django's connection: set USE_TZ = True"
    )


def test_an_async_view_is_refused(shop: Database, ob: outbox.Outbox) -> None:
    async def view(request: Any, claimed: ClaimedRequest) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(outbox.ConfigurationError) as refused:
        ask(view, ob)

    assert str(refused.value) == "the view 'view' is async, and Django's transactions are not: make it a def"


@pytest.mark.parametrize("scope", [None, "ada"])
def test_a_scope_that_is_no_function_is_an_error(scope: Any) -> None:
    with pytest.raises(outbox.ConfigurationError, match=r"For example scope=lambda request: request\.user"):
        Idempotency(scope=scope)


def test_an_app_says_itself_what_must_be_equal(shop: Database, ob: outbox.Outbox) -> None:
    for body_of in ({"amount": 1}, {"amount": 1}, {"amount": 2}):
        answer = ask(lambda request, claimed: HttpResponse(status=201), ob, content=lambda request, body=body_of: body)

    assert answer.status_code == 422
    assert len(shop.records) == 1


def test_a_row_of_the_database_is_seen_by_both(shop: Database) -> None:
    with transaction.atomic():
        place()
        with joined_session() as session:
            assert session.scalar(sa.text("SELECT count(*) FROM shop_order")) == 1
