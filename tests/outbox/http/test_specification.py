"""The idempotency specification that an API publishes: it says what is in force, and changes with it."""

import json
import re
from datetime import timedelta
from typing import Any

import openapi_spec_validator
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_spec_validator.validation.exceptions import OpenAPIValidationError

import outbox
from outbox.http import HEADER, REPLAYED, Policy, parse_key, problem_of
from outbox.http.policy import COMPARED, request_content
from outbox.http.problems import KINDS
from outbox.http.specification import KeyForm, Route, Specification, specify
from outbox.http.specification_openapi import openapi_of
from outbox.http.specification_page import page_of

KEYRING = outbox.Keyring({"k1": bytes(range(32))})
HOUR = timedelta(hours=1)


def configured(**settings: Any) -> outbox.Outbox:
    return outbox.Outbox(KEYRING, env="test", **settings)


def specified(*, settings: dict[str, Any] | None = None, **policy: Any) -> Specification:
    return specify(Policy(**{"outbox": configured(), **policy}), **(settings or {}))


def customer() -> str:
    """the customer
    of the access token.

    Not this.
    """
    return "ada"


def undocumented() -> str:
    return "ada"


# --- the page says what is in force

ACCEPTED = "A retry gets the `202` until"

CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "strict": ({"strict": True}, 'the key without quotes: visible ASCII except `"` `,` `;` `\\`', ""),
    "in_flight": (
        {"in_flight": "wait"},
        "is being processed, the API refuses the second",
        "the second waits for the answer, for 5 seconds at most",
    ),
    "wait": (
        {"in_flight": "wait", "wait": timedelta(seconds=90)},
        "is being processed, the API refuses the second",
        "for 90 seconds at most. After that the API refuses the second with `409`",
    ),
    "keep": ({"keep": 48 * HOUR}, "| for 24 hours |", "| for 2 days |"),
    "keep longer than audit": ({"keep": 2400 * HOUR}, "| for 30 days at least |", "| for 100 days at least |"),
    "audit": ({"outbox": configured(audit=2400 * HOUR)}, "| for 30 days at least |", "| for 100 days at least |"),
    "kept_headers": ({"kept_headers": ["X-Order"]}, "`Location`", "it gets: `X-Order`."),
    "no kept headers": ({"kept_headers": []}, "`Location`", "it gets: none."),
    "problem_types": (
        {"problem_types": "https://api.example.com/"},
        "`tag:sqlalchemy-outbox,2026:key-missing`",
        "`https://api.example.com/key-missing`",
    ),
    "one problem's type": (
        {"problem_types": {"key-missing": "https://a.example/"}},
        "2026:key-missing`",
        "`https://a.example/`",
    ),
    "status_url": ({"outbox": configured(status_url="/jobs/{id}")}, "", "in the form `/jobs/{id}`. `Retry-After` says"),
    "routes": (
        {"settings": {"routes": [Route("POST", "/orders")]}},
        "of an operation that takes it",
        "- `POST /orders`",
    ),
    "scope": (
        {"settings": {"scope": customer}},
        "the authenticated caller. If two",
        "the authenticated caller: the customer of the access token. If two",
    ),
    "content": (
        {"settings": {"content": customer}},
        "- the body's bytes, as they came",
        "in:\n\n- the customer of the access token\n\nNothing",
    ),
    "body_bytes_max": ({"settings": {"body_bytes_max": 2**16}}, "have 1 MiB at most", "have 64 KiB at most"),
    "an odd body_bytes_max": ({"settings": {"body_bytes_max": 1001}}, "have 1 MiB at most", "have 1001 bytes at most"),
    "refused": (
        {"settings": {"refused": timedelta(days=42)}},
        "as long as the API remembers these effects",
        "until 42 days after the last of these effects has ended",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_changes_the_page(name: str) -> None:
    change, before, after = CHANGES[name]

    default, changed = page_of(specified()), page_of(specified(**change))

    assert before in default
    assert not before or before not in changed
    assert after in changed
    assert not after or after not in default


def test_the_page_has_no_empty_section_and_each_of_them_once() -> None:
    headings = re.findall(r"^#+ (.*)$", page_of(specified()), re.M)

    assert headings == [
        *("Idempotency", "The key", "Whose key it is", "What is the same request", "What a retry gets"),
        *("Two requests at the same time", "For how long", "Refusals"),
    ]
    assert ACCEPTED in page_of(specified(outbox=configured(status_url="/jobs/{id}")))


def test_the_page_does_not_offer_a_key_that_is_an_earlier_requests() -> None:
    refused = {kind.name for error, kind in KINDS.items() if error.status == outbox.RequestMismatch.status}

    assert refused == {"request-mismatch", "key-expired"}
    assert "after `422` the key still belongs to the earlier request" in page_of(specified())


def test_the_page_and_the_fragment_name_every_problem_as_it_is_answered() -> None:
    policy = Policy(outbox=configured(), problem_types="https://api.example.com/")
    page, fragment = page_of(specify(policy)), openapi_of(specify(policy))

    for refused, kind in KINDS.items():
        problem = json.loads(policy.problem(_raised(refused)).body)
        assert f"| {problem['status']} | `{problem['type']}` | {problem['title']} | {kind.remedy} |" in page
        content = fragment["components"]["responses"][f"Idempotency{problem['status']}"]["content"]
        example = content["application/problem+json"]["examples"][kind.name]["value"]
        assert example | {"detail": ""} == problem | {"detail": ""}


@pytest.mark.parametrize("refused", KINDS)
def test_what_is_said_to_come_with_a_retry_after_comes_with_it(refused: type[outbox.RequestRefused]) -> None:
    answer = problem_of(_raised(refused))

    assert ("Retry-After" in dict(answer.headers)) == KINDS[refused].has_retry_after


def _raised(refused: type[outbox.RequestRefused]) -> outbox.RequestRefused:
    with_instant: tuple[Any, ...] = ("refused", HOUR) if KINDS[refused].has_retry_after else ("refused",)
    return refused(*with_instant)


def test_as_many_things_are_said_to_be_compared_as_are() -> None:
    requests = {
        request_content(*parts)
        for parts in (
            ("POST", "/", b"", "", b""),
            ("PATCH", "/", b"", "", b""),
            ("POST", "/1", b"", "", b""),
            ("POST", "/", b"a=1", "", b""),
            ("POST", "/", b"", "text/csv", b""),
            ("POST", "/", b"", "", b"{}"),
        )
    }

    assert len(requests) == 1 + len(COMPARED)


def test_the_names_of_the_headers_are_those_of_the_wire() -> None:
    page = page_of(specified())

    assert f"Send the header `{HEADER}`" in page
    assert f"`{REPLAYED}: true`" in page


# --- the key's form

SOME_TEXT = st.text(st.characters(max_codepoint=130), max_size=12)
TEXTS = SOME_TEXT | SOME_TEXT.map(lambda text: f'"{text}"') | st.integers(0, 300).map(lambda length: "k" * length)


@pytest.mark.parametrize("strict", [False, True])
@given(line=TEXTS)
def test_what_matches_the_published_pattern_is_a_key(strict: bool, line: str) -> None:
    form = KeyForm.of(Policy(outbox=configured(), strict=strict))

    if re.fullmatch(form.pattern, line):
        assert form.bytes_min <= len(parse_key([line], strict=strict)) <= form.bytes_max
    elif line == line.strip() and ";" not in line:  # the pattern leaves out white space around a key, and parameters
        with pytest.raises(outbox.RequestRefused):
            parse_key([line], strict=strict)


def test_the_published_example_is_a_key() -> None:
    for strict in (False, True):
        form = KeyForm.of(Policy(outbox=configured(), strict=strict))

        assert re.fullmatch(form.pattern, form.example)
        assert parse_key([form.example], strict=strict)


# --- the fragment of OpenAPI


@pytest.mark.parametrize("name", [None, *CHANGES])
def test_the_fragment_is_a_valid_document(name: str | None) -> None:
    change = CHANGES[name][0] if name else {}

    openapi_spec_validator.validate(openapi_of(specified(**change)))


def test_a_document_that_is_not_valid_is_noticed() -> None:
    fragment = openapi_of(specified())
    del fragment["components"]["parameters"]["IdempotencyKey"]["schema"]

    with pytest.raises(OpenAPIValidationError):
        openapi_spec_validator.validate(fragment)


def test_a_route_of_the_fragment_has_header_parameters_and_refusals() -> None:
    routes = [Route.of("POST /orders/{id}/refunds"), Route.of("PATCH /orders/{id}/refunds")]

    path = openapi_of(specified(settings={"routes": routes}))["paths"]["/orders/{id}/refunds"]

    assert path.keys() == {"post", "patch"}
    assert path["post"]["responses"].keys() == {"400", "409", "413", "422", "503"}
    assert path["post"]["parameters"] == [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
        {"$ref": "#/components/parameters/IdempotencyKey"},
    ]


def test_the_fragment_has_the_status_url_of_what_is_accepted() -> None:
    fragment = openapi_of(specified(outbox=configured(status_url="/jobs/{id}")))

    accepted = fragment["components"]["responses"]["Idempotency202"]["headers"]["Location"]["description"]
    assert accepted == "The URL of the request's status: /jobs/{id}"


def test_the_fragment_says_with_which_refusal_a_retry_after_comes() -> None:
    responses = openapi_of(specified())["components"]["responses"]

    said = [name for name, response in responses.items() if "Retry-After" in response.get("headers", {})]
    assert said == ["Idempotency409", "Idempotency503"]


# --- what is refused


@pytest.mark.parametrize("text", ["/orders", "post /orders", "POST orders", "POST /orders /refunds", "POST"])
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as refused:
        Route.of(text)

    assert str(refused.value) == (
        f"route {text!r}: must be a method and a path, 'POST /orders/{{id}}', with one of the methods"
        " GET, PUT, POST, DELETE, OPTIONS, HEAD, PATCH, TRACE"
    )


@pytest.mark.parametrize("name", ["scope", "content"])
def test_a_function_that_does_not_declare_what_it_does_is_refused(name: str) -> None:
    with pytest.raises(outbox.InvalidValue) as refused:
        specified(settings={name: undocumented})

    assert str(refused.value) == (f"{name} 'undocumented': has no docstring, which the page quotes: write one")
