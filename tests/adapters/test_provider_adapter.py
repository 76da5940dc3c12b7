"""ProviderAdapter: a profile makes the request, and reads the answer."""

import asyncio
import html
import json
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.cli_runner import command
from support.dashboard import Browser, dashboard
from support.database import Database
from support.doctor import beat
from support.entries import age, dispatcher, put_one, run_once, state
from support.profiles import profile

import outbox
from dispatchers import Deferred, Delivered, Delivery, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.adapters.providers import PROVIDERS, Profile, resend, sendgrid
from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import BodyField, GraphQLArgument, Header, Mark, NoKey, QueryField
from dispatchers.adapters.providers.operations import Delete, Post
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.delivery import KeyFormat
from dispatchers.pipeline.routing import merge
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.faulty_http import FaultyHttp, answer, close, cut_short
from outbox.errors import ConfigurationError
from outbox.keys import Tag, encode_native

MAIL = {"from": "shop@example.com", "to": "ada@example.com", "subject": "Hello", "html": "<p>Hello</p>"}
DAY = timedelta(days=1)


def send(adapter: Any, operation: str, payload: Any, key: str = "ck1_abc") -> Outcome:
    delivery = Delivery(ENTRY, operation, json.dumps(payload, separators=(",", ":")).encode(), key, 1, {}, {}, 0.0)

    async def main() -> Outcome:
        try:
            outcome: Outcome = await adapter.send(delivery)
            return outcome
        finally:
            await adapter.aclose()

    return asyncio.run(main())


def place_of(given: Profile) -> NoKey:
    assert isinstance(given.key, NoKey)
    return given.key


def test_a_named_operation_is_the_service_s_own_json(remote: FaultyHttp) -> None:
    remote.behave(answer(200, json={"id": "49a3999c", "html": "<p>Hello</p>"}))

    outcome = send(resend(api_key="re_secret_1", base_url=remote.url), "resend.emails.send", MAIL)

    (request,) = remote.requests
    assert (request.method, request.target, json.loads(request.body)) == ("POST", "/emails", MAIL)
    assert (request.headers["authorization"], request.headers["idempotency-key"]) == ("Bearer re_secret_1", "ck1_abc")
    assert outcome == Delivered({"status": 200, "id": "49a3999c"})


def test_an_enqueued_mail_is_sent_once(database: Database, ob: outbox.Outbox, remote: FaultyHttp) -> None:
    remote.behave(answer(200, json={"id": "49a3999c"}))
    entry = put_one(database, ob, "resend.emails.send", payload=MAIL)

    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_1", base_url=remote.url)})

    assert state(database, entry) == "delivered"
    assert [request.headers["idempotency-key"][:4] for request in remote.requests] == ["ck1_"]


def test_ids_of_the_url_are_members_of_the_payload(remote: FaultyHttp) -> None:
    adapter = profile()(api_key="k", base_url=remote.url)

    send(adapter, "pay.payments.capture", {"payment": "pay/1 ü", "amount": 5})

    (request,) = remote.requests
    assert (request.target, request.body) == ("/payments/pay%2F1%20%C3%BC/captures", b'{"amount":5}')


@pytest.mark.parametrize("id", [None, "", "..", " . ", True, ["x"]])
def test_a_payload_without_the_url_s_id_is_rejected_unsent(remote: FaultyHttp, id: Any) -> None:
    outcome = send(profile()(api_key="k", base_url=remote.url), "pay.payments.capture", {"payment": id})

    assert isinstance(outcome, Rejected)
    assert "needs 'payment'" in outcome.reason
    assert remote.requests == []


# --- where the key goes


def test_a_key_in_the_body_is_a_member_of_it(remote: FaultyHttp) -> None:
    adapter = profile(key=BodyField("options.idempotency_key"))(api_key="k", base_url=remote.url)

    send(adapter, "pay.payments.create", {"amount": 5})

    assert json.loads(remote.requests[0].body) == {"amount": 5, "options": {"idempotency_key": "ck1_abc"}}


def test_a_key_in_the_query_follows_the_path(remote: FaultyHttp) -> None:
    operations = {"payments.create": Post("/payments?expand=1")}
    adapter = profile(key=QueryField("idempotencyKey"), operations=operations)(api_key="k", base_url=remote.url)

    send(adapter, "pay.payments.create", {"amount": 5})

    assert remote.requests[0].target == "/payments?expand=1&idempotencyKey=ck1_abc"


CHARGE = "mutation Charge($input: ChargeInput!) { charge(input: $input) { id } }"


def graphql(remote: FaultyHttp) -> Any:
    place = GraphQLArgument("input.apiRequestKey", used_as="(input: $input)")
    return profile(key=place, operations={"graphql": Post("/graphql")})(api_key="k", base_url=remote.url)


def test_a_key_in_graphql_is_a_variable(remote: FaultyHttp) -> None:
    send(graphql(remote), "pay.graphql", {"query": CHARGE, "variables": {"input": {"amount": "5"}}})

    sent = json.loads(remote.requests[0].body)
    assert sent == {"query": CHARGE, "variables": {"input": {"amount": "5", "apiRequestKey": "ck1_abc"}}}


def test_a_query_that_reads_no_key_is_rejected_unsent(remote: FaultyHttp) -> None:
    outcome = send(graphql(remote), "pay.graphql", {"query": "mutation { charge { id } }"})

    assert isinstance(outcome, Rejected)
    assert "would read no key" in outcome.reason
    assert remote.requests == []


@pytest.mark.parametrize(
    ("place", "payload", "said"),
    [
        (BodyField("idempotency_key"), {"idempotency_key": "mine"}, "must not set 'idempotency_key'"),
        (BodyField("meta.key"), {"meta": "text"}, "must have an object as 'meta'"),
        (NoKey(mark=Mark("custom.key")), {"custom": {"key": "mine"}}, "must not set 'custom.key'"),
        (NoKey(mark=Mark("tags[]")), {"tags": "text"}, "must have a list as 'tags'"),
        (BodyField("key"), ["a list"], "must be an object, not a list"),
        (Header("Key"), "a text", "must be an object"),
    ],
)
def test_a_payload_that_the_key_would_break_is_rejected_unsent(
    remote: FaultyHttp, place: Any, payload: Any, said: str
) -> None:
    keyless = {"stores": "nothing", "window": None} if isinstance(place, NoKey) else {}
    outcome = send(profile(key=place, **keyless)(api_key="k", base_url=remote.url), "pay.payments.create", payload)

    assert isinstance(outcome, Rejected)
    assert said in outcome.reason
    assert remote.requests == []


def test_without_a_key_the_child_key_is_where_an_operator_finds_it(remote: FaultyHttp) -> None:
    send(sendgrid(api_key="k", base_url=remote.url), "sendgrid.mail.send", {"custom_args": {"a": "b"}})

    assert json.loads(remote.requests[0].body) == {"custom_args": {"a": "b", "outbox_key": "ck1_abc"}}


def test_a_form_has_texts_lists_and_the_key(remote: FaultyHttp) -> None:
    fields = {
        "key": NoKey(mark=Mark("v:outbox_key")),
        "stores": "nothing",
        "window": None,
        "auth": basic("{sid}", "{token}"),
    }
    operations = {"send": Post("/{sid}/messages", content="form")}
    adapter = profile(**fields, operations=operations)(sid="AC1", token="t", base_url=remote.url)

    send(adapter, "pay.send", {"To": "+1", "tag": ["a", "b"], "tracking": True, "skipped": None})

    (request,) = remote.requests
    assert (request.target, request.headers["authorization"]) == ("/AC1/messages", "Basic QUMxOnQ=")
    assert request.body == b"To=%2B1&tag=a&tag=b&tracking=true&v%3Aoutbox_key=ck1_abc"


def test_a_delete_without_a_payload_has_no_body(remote: FaultyHttp) -> None:
    adapter = profile(operations={"tokens.delete": Delete("/tokens/{token}")})(api_key="k", base_url=remote.url)

    send(adapter, "pay.tokens.delete", {"token": 7})

    assert (remote.requests[0].method, remote.requests[0].target, remote.requests[0].body) == (
        "DELETE",
        "/tokens/7",
        b"",
    )


def test_an_operation_has_the_key_of_its_own_place_and_no_other(remote: FaultyHttp) -> None:
    operations = {
        "a": Post("/a", key=Header("X-Own-Key")),
        "b": Post("/b", key=NoKey()),
        "c": Post("/c", key=BodyField("key")),
        "d": Post("/d"),
    }
    adapter = profile(operations=operations)(api_key="k", base_url=remote.url)

    for name in operations:
        send((adapter.parts or {}).get(name, adapter), f"pay.{name}", {})

    with_key = [
        [name for name in ("x-own-key", "idempotency-key") if name in request.headers]
        + ["body"] * (b"ck1_" in request.body)
        for request in remote.requests
    ]
    assert with_key == [["x-own-key"], [], ["body"], ["idempotency-key"]]


# --- what an answer means

SIGNALS: dict[str, Any] = {
    "in_flight": Signal(409, body={"name": "in_use"}),
    "mismatch": Signal(409, body={"name": "other_request"}),
    "errors": (
        (Signal(422, body={"errors": [{"code": "try_later"}]}), "deferred"),
        (Signal(200, body={"ok": False}), "rejected"),
    ),
    "error": ("name", "errors[].code"),
}


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (answer(409, json={"name": "in_use"}), InProgress()),
        (answer(409, json={"name": "in_use"}, headers={"Retry-After": "3"}), InProgress(timedelta(seconds=3))),
        (answer(409, json={"name": "other_request"}), KeyConflict("HTTP 409 other_request")),
        (answer(409, json={"name": "else"}), Unknown("HTTP 409 else")),
        (answer(422, json={"errors": [{"code": "a"}, {"code": "try_later"}]}), Deferred("HTTP 422 a")),
        (answer(422, json={"name": "it is 'ada@example.com'"}), Rejected("HTTP 422", result={"status": 422})),
        (answer(422, json={"name": "bad"}), Rejected("HTTP 422 bad", result={"status": 422, "name": "bad"})),
        (answer(200, json={"ok": False}), Rejected("HTTP 200", result={"status": 200})),
        (answer(200, json={"ok": True, "id": "x"}), Delivered({"status": 200, "id": "x"})),
        (answer(201), Delivered({"status": 201, "unparsed": True})),
        (answer(500), Unknown("HTTP 500")),
    ],
)
def test_an_answer_means_what_the_profile_says(remote: FaultyHttp, behaviour: Any, expected: Outcome) -> None:
    remote.behave(behaviour)

    assert send(profile(**SIGNALS)(api_key="k", base_url=remote.url), "pay.payments.create", {}) == expected


def test_a_broken_body_that_could_be_an_error_proves_nothing(remote: FaultyHttp) -> None:
    remote.behave(cut_short(200))

    outcome = send(profile(**SIGNALS)(api_key="k", base_url=remote.url), "pay.payments.create", {})

    assert isinstance(outcome, Unknown)


@pytest.mark.parametrize(
    ("behaviour", "after"),
    [
        (close, timedelta(minutes=1)),
        (answer(500), timedelta(minutes=1)),
        (answer(409, json={"name": "in_use"}, headers={"Retry-After": "90"}), timedelta(seconds=90)),
    ],
)
def test_after_doubt_the_next_attempt_keeps_the_service_s_pause(
    remote: FaultyHttp, behaviour: Any, after: timedelta
) -> None:
    remote.behave(behaviour)
    operations = {"payments.create": Post("/payments", pause=timedelta(minutes=1))}

    outcome = send(
        profile(**SIGNALS, operations=operations)(api_key="k", base_url=remote.url), "pay.payments.create", {}
    )

    assert isinstance(outcome, Unknown | InProgress)
    assert outcome.after == after


def test_a_duplicate_that_names_what_exists_is_delivered(remote: FaultyHttp) -> None:
    exists = {"error": {"errors": [{"reason": "conflict", "links": {"id": "PM1"}}]}}
    duplicate = Duplicate(Signal(409, body={"error": {"errors": [{"reason": "conflict"}]}}), "error.errors[].links.id")
    remote.behave(answer(409, json=exists))

    adapter = profile(stores="duplicate_refused", duplicate=duplicate)(api_key="k", base_url=remote.url)

    assert send(adapter, "pay.payments.create", {}) == Delivered({"id": "PM1"}, replayed=True)


def test_the_service_s_own_mark_shows_a_repeated_answer(remote: FaultyHttp) -> None:
    remote.behave(answer(200, json={"id": "x"}, headers={"X-Replayed": "yes"}))
    adapter = profile(replay=Signal(200, headers={"X-Replayed": "yes"}))(api_key="k", base_url=remote.url)

    outcome = send(adapter, "pay.payments.create", {})

    assert outcome == Delivered({"status": 200, "id": "x"}, replayed=True)
    assert adapter.replays == 1


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_a_payload_that_cannot_be_written_again_is_rejected_unsent(remote: FaultyHttp, number: str) -> None:
    adapter = profile(key=BodyField("key"))(api_key="k", base_url=remote.url)
    payload = f'{{"amount": {number}}}'.encode()
    delivery = Delivery(ENTRY, "pay.payments.create", payload, "ck1_abc", 1, {}, {}, 0.0)

    outcome = asyncio.run(adapter.send(delivery))

    assert isinstance(outcome, Rejected)
    assert remote.requests == []


def test_a_duplicate_without_an_id_is_delivered(remote: FaultyHttp) -> None:
    remote.behave(answer(400, json={"code": "duplicate_parameter"}))
    duplicate = Duplicate(Signal(400, body={"code": "duplicate_parameter"}))

    adapter = profile(stores="duplicate_refused", duplicate=duplicate)(api_key="k", base_url=remote.url)

    assert send(adapter, "pay.payments.create", {}) == Delivered({"id": None}, replayed=True)


def test_a_star_in_a_signal_is_any_member(remote: FaultyHttp) -> None:
    in_use = {"data": {"*": {"userErrors": [{"code": "IN_USE"}]}}}
    remote.behave(answer(200, json={"data": {"refundCreate": {"userErrors": [{"code": "IN_USE"}]}}}))

    adapter = profile(in_flight=Signal(200, body=in_use))(api_key="k", base_url=remote.url)

    assert send(adapter, "pay.payments.create", {}) == InProgress()


# --- a profile that cannot be true


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "Pay Pal"}, "the name must be one lower-case word"),
        ({"name": "pay.pal"}, "the name must be one lower-case word"),
        ({"sources": ()}, "a value without a source is not written"),
        ({"operations": {}}, "needs operations"),
        ({"operations": {"Create": Post("/x")}}, "must be lower-case words"),
        ({"operations": {"a": Post("/a"), "a.b": Post("/b")}}, "is the beginning of 'a.b'"),
        ({"stores": "some"}, "stores='some' must be one of all, 2xx"),
        ({"stores": "nothing"}, "has a key, so stores='nothing' cannot be true"),
        ({"stores": "duplicate_refused"}, "goes with stores='duplicate_refused'"),
        ({"window": timedelta(0)}, "must be a positive timedelta"),
        ({"key": NoKey()}, "has no key, so it has no window"),
        ({"key": NoKey(), "window": None}, "the service stores 'nothing', not '2xx'"),
        ({"key": Header("Key", KeyFormat(max_chars=20))}, "no child key fits"),
        ({"key": BodyField("key"), "operations": {"a": Post("/a", payload="list")}}, "has no members for a key"),
        ({"key": BodyField("a.key"), "operations": {"a": Post("/a", content="form")}}, "has no nested members"),
        ({"errors": ((Signal(409), "perhaps"),)}, "errors must be pairs of a Signal and one of"),
        ({"result": ("data..id",)}, "must be names joined by dots"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        profile(**given)


# --- its declaration


def test_each_operation_has_its_own_window_and_key_form() -> None:
    operations = {
        "orders.create": Post("/orders"),
        "payouts.create": Post("/payouts", window=30 * DAY),
        "notes.add": Post("/notes", key=NoKey()),
    }

    merged = merge({"pp": profile(operations=operations)(api_key="k")})

    assert {name: adapter.window for name, adapter in merged.items()} == {
        "pp": DAY,
        "pp.payouts.create": 30 * DAY,
        "pp.notes.add": None,
    }


def test_an_unpublished_window_must_be_given() -> None:
    unpublished = profile(window=None)

    with pytest.raises(ConfigurationError, match="does not publish how long it remembers a key"):
        unpublished(api_key="k")

    assert unpublished(api_key="k", window=DAY).window == DAY


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs api_key=..."),
        ({"api_key": ""}, "needs api_key=..."),
        ({"api_key": "k", "token": "t"}, "has no setting 'token'; its settings are api_key"),
        ({"api_key": 7}, "api_key must be a text"),
    ],
)
def test_a_missing_or_unknown_setting_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        profile()(**settings)


def test_an_api_key_is_never_shown(remote: FaultyHttp) -> None:
    remote.behave(answer(422, json={"name": "re_secret_12345"}))
    adapter = resend(api_key="re_secret_12345", base_url=remote.url)

    outcome = send(adapter, "resend.emails.send", MAIL)

    assert "re_secret" not in f"{adapter!r} {adapter.pinned} {outcome!r}"


def test_every_profile_has_its_own_name() -> None:
    assert all(PROVIDERS[name].name == name for name in PROVIDERS)


def test_a_service_that_compares_nothing_gets_keys_bound_to_the_route() -> None:
    adapter = profile(compares="nothing")(api_key="k")

    parts = merge({"pay": adapter})

    tag = Tag(bytes(32))
    keys = {name: each.key_format.encode(tag) for name, each in parts.items() if name != "pay"}
    assert sorted(keys) == ["pay.payments.capture", "pay.payments.create"]
    assert len({*keys.values(), encode_native(tag)}) == 3


def test_a_changed_route_of_a_bound_key_is_another_form() -> None:
    """So an entry in doubt is not sent under the key of the new route."""
    before = profile(compares="nothing")(api_key="k")
    after = profile(compares="nothing", operations={"payments.create": Post("/v2/payments")})(api_key="k")

    forms = [str((each.parts or {})["payments.create"].key_format) for each in (before, after)]

    assert forms[0] != forms[1]
    assert all(form.startswith("native/") for form in forms)


# --- the scope of a key


@pytest.mark.parametrize(
    ("scope", "stays"), [("account", True), ("api_key", False), ("unknown", False), ("region", True)]
)
def test_another_api_key_is_another_form_where_it_voids_keys(scope: Any, stays: bool) -> None:
    one, other = (profile(scope=scope)(api_key=key) for key in ("secret_key_1", "secret_key_2"))

    assert (one.pinned == other.pinned) is stays
    assert "secret" not in one.pinned + other.pinned


def test_another_region_is_another_form() -> None:
    one, other = (profile(scope="account")(api_key="k", base_url=url) for url in ("https://eu.test", "https://us.test"))

    assert one.pinned != other.pinned


def test_another_path_of_the_service_is_another_form() -> None:
    urls = ("https://gateway.test/eu", "https://gateway.test/us")

    one, other = (profile(scope="account")(api_key="k", base_url=url) for url in urls)

    assert one.pinned != other.pinned


def test_another_place_of_the_key_is_another_form() -> None:
    """The service finds no key where it was before."""
    places = [Header("Key"), Header("X-Key"), BodyField("key"), BodyField("meta.key")]

    forms = {profile(key=place)(api_key="k").pinned for place in places}

    assert len(forms) == len(places)


def test_another_account_in_a_setting_is_another_form() -> None:
    of_shops = profile(scope="account", base_url="https://pay.example.com/{shop}")

    one, other = (of_shops(api_key="k", shop=shop) for shop in ("shop_1", "shop_2"))

    assert one.pinned != other.pinned


def test_a_new_api_key_does_not_stop_entries_that_have_no_key() -> None:
    one, other = (sendgrid(api_key=key) for key in ("secret_key_1", "secret_key_2"))

    assert one.pinned == other.pinned == "sendgrid"


def test_an_entry_in_doubt_is_not_sent_with_another_api_key(
    database: Database, ob: outbox.Outbox, remote: FaultyHttp
) -> None:
    remote.behave(close)
    entry = put_one(database, ob, "resend.emails.send", payload=MAIL)
    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_1", base_url=remote.url)})
    remote.behave(answer(200, json={"id": "x"}))

    age(database, timedelta(hours=1))
    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_2", base_url=remote.url)})
    within = (len(remote.requests), state(database, entry))
    age(database, DAY)
    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_2", base_url=remote.url)})

    assert within == (1, "retry")
    assert (len(remote.requests), state(database, entry)) == (1, "uncertain")


def test_an_entry_in_doubt_is_sent_again_with_the_same_api_key(
    database: Database, ob: outbox.Outbox, remote: FaultyHttp
) -> None:
    remote.behave(close)
    entry = put_one(database, ob, "resend.emails.send", payload=MAIL)
    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_1", base_url=remote.url)})
    remote.behave(answer(200, json={"id": "x"}))

    age(database, timedelta(hours=1))
    run_once(database, ob, adapters={"resend": resend(api_key="re_secret_1", base_url=remote.url)})

    assert (len(remote.requests), state(database, entry)) == (2, "delivered")
    assert len({bytes(request) for request in remote.requests}) == 1


# --- what an operator and a user see


def test_an_entry_in_doubt_without_a_key_shows_what_to_search_for(
    database: Database, ob: outbox.Outbox, remote: FaultyHttp
) -> None:
    remote.behave(close)
    entry = put_one(database, ob, "sendgrid.mail.send", payload=MAIL)
    adapters = {"sendgrid": sendgrid(api_key="any", base_url=remote.url)}
    run_once(database, ob, adapters=adapters)
    beat(dispatcher(database, ob, adapters=adapters))

    with dashboard(database) as app:
        page, document = Browser(app).text(f"/entries/{entry}"), Browser(app).api(f"/entries/{entry}").json()
    shown = command("show", str(entry), database=database).stdout

    key = document["entry"]["child_key"]
    search = str(place_of(sendgrid).search).replace("{key}", key)
    assert document["entry"]["state"] == "uncertain"
    assert search in html.unescape(page)
    assert search == document["search"]
    assert key.encode() in remote.requests[0].body
    assert search[:20] in " ".join(shown.split())


def test_a_service_without_keys_says_so_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outbox.dispatcher"):
        sendgrid(api_key="any")
        sendgrid(api_key="any", at_least_once=True)

    assert caplog.messages == [
        "SendGrid keeps no keys for mail.send: an entry in doubt becomes uncertain, and is not sent again",
        "SendGrid keeps no keys for mail.send: an entry in doubt may happen twice",
    ]


def test_a_changed_value_is_logged_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outbox.dispatcher"):
        resend(api_key="any")
        resend(api_key="any", window=timedelta(hours=12))
        replace(resend, stores="all")(api_key="any")

    assert [message.partition(" as of")[0] for message in caplog.messages] == [
        "Resend: window=12:00:00, not 1 day, 0:00:00",
        "Resend: stores=all, not success",
    ]
