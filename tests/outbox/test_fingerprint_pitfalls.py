"""The seven ways in which naive hashing fails, each beside the code that fails in it, and what is left out by choice."""

import json
import math
from array import array
from decimal import Decimal
from hashlib import sha256

import pytest
from django.utils.datastructures import MultiValueDict
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import FormData, QueryParams
from support.database import TABLES
from werkzeug.datastructures import ImmutableMultiDict, MultiDict

import outbox
from outbox import Fingerprint
from outbox.requests.fingerprint import FINGERPRINT_VERSION, fingerprint


def django_dict(pairs):
    """What Django's QueryDict is made of, and needs no settings."""
    return MultiValueDict(by_name(pairs))


def sorted_dump(value):
    """What most write."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def whitelisted(body, fields=("amount", "currency")):
    """What an article on idempotency keys of 2026 advises."""
    return sorted_dump({field: body[field] for field in fields if field in body})


def of(body, **settings):
    return Fingerprint.json(body, **settings)


def test_1_a_field_that_no_list_names_counts():
    before, after = {"amount": 1, "currency": "eur"}, {"amount": 1, "currency": "eur", "tip": 100}
    assert whitelisted(before) == whitelisted(after)

    assert of(before) != of(after)


def test_2_what_is_inside_a_member_counts_as_do_bodies_of_unknown_fields():
    one, other = {"cart": {"amount": 1}}, {"cart": {"amount": 2}}
    assert whitelisted(one) == whitelisted(other)

    assert of(one) != of(other)


def test_3_an_absent_member_and_a_null_differ():
    def merged(body):
        return sorted_dump({name: value for name, value in body.items() if value is not None})

    assert merged({"coupon": None}) == merged({})

    assert of({"coupon": None}) != of({})


@pytest.mark.parametrize("form", [Fingerprint.raw, Fingerprint.json])
@pytest.mark.parametrize("what", ["method", "route", "content_type"])
def test_4_the_same_body_to_another_endpoint_is_another_request(form, what):
    body = b'{"amount": 1}'
    assert sorted_dump(json.loads(body)) == sorted_dump(json.loads(body))

    sent = {"method": "POST", "route": "/orders", "content_type": "application/json"}
    assert form(body, **sent) != form(body, **{**sent, what: "another"})
    assert form(body, **sent) == form(body, **sent)


def test_5_a_number_is_the_same_however_it_is_written_and_is_no_boolean():
    assert sorted_dump(1) != sorted_dump(1.0)

    assert of(b'{"a": 1}') == of(b'{"a": 1.0}') == of(b'{"a": 1e0}') == of({"a": 1}) == of({"a": Decimal("1.00")})
    assert of({"a": 1}) != of({"a": True})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"[10.00000000000000000001]", b"[10.00000000000000000002]"),
        (b"[0.1]", b"[0.1000000000000000055511151231257827]"),
        (b"[1e400]", b"[1e401]"),
        (b"[1e400]", b"[-1e400]"),
        (b"[9007199254740992]", b"[9007199254740993]"),
        (b"[1e-400]", b"[0]"),
    ],
)
def test_6_numbers_that_round_to_one_float_differ(one, other):
    assert sorted_dump(json.loads(one, parse_int=float)) == sorted_dump(json.loads(other, parse_int=float)) or (
        math.isinf(json.loads(one)[0])
    )

    assert of(one) != of(other)
    assert of(one) == of(one.replace(b"]", b" ]"))


def test_7_what_two_parsers_read_differently_is_refused():
    twice = b'{"amount": 1, "amount": 2}'
    assert sorted_dump(json.loads(twice)) == sorted_dump({"amount": 2})

    with pytest.raises(outbox.RequestError, match="a duplicate member name: parsers disagree about which one counts"):
        of(twice)
    with pytest.raises(outbox.RequestError, match="NaN in the request is not a JSON number"):
        of(b'{"amount": NaN}')


def test_a_text_is_not_normalised_so_that_no_two_texts_are_merged():
    """Composed and decomposed letters look alike; a client that sends one of them sends it again in a retry."""
    assert of("é") != of("e\u0301")
    assert of(b'"\xc3\xa9"') == of(b'"\\u00e9"')


def test_raw_bytes_are_the_default_and_nothing_is_overlooked():
    assert fingerprint(b'{"a":1}') == Fingerprint.raw(b'{"a":1}').digest != Fingerprint.raw(b'{"a": 1}').digest
    assert fingerprint({"a": 1}) == of({"a": 1}).digest == of(b'{ "a" : 1 }').digest
    assert fingerprint(of({"a": 1})) == of({"a": 1}).digest


def test_no_two_endpoints_run_into_each_other():
    assert Fingerprint.raw(b"x", method="a", route="b") != Fingerprint.raw(b"x", method="", route="ab")
    assert Fingerprint.raw(b"[]", route="/") != Fingerprint.json(b"[]", route="/")


# --- left out by path


def test_members_are_left_out_by_their_paths():
    pointers = ["/sent_at", "/trace/id", "/items/1/at", "/a~1b", "/m~0n"]
    one = {"sent_at": 1, "trace": {"id": 2, "kept": 3}, "items": [{"at": 4}, {"at": 5, "sku": 6}], "a/b": 7, "m~n": 8}
    other = {"sent_at": 9, "trace": {"kept": 3}, "items": [{"at": 4}, {"at": 9, "sku": 6}], "m~n": None}

    assert of(one, leave_out=pointers) == of(other, leave_out=pointers)
    assert of(one) != of(other)


@pytest.mark.parametrize(
    "changed",
    [{"trace": {"id": 1, "kept": 4}}, {"id": 5}, {"amount": 2}, {"trace": {}}, {"trace": "id"}, {"sent_at": {"id": 1}}],
)
def test_everything_else_counts_also_what_the_app_does_not_know(changed):
    body = {"amount": 1, "trace": {"id": 1, "kept": 3}}

    assert of(body, leave_out=["/trace/id"]) != of(body | changed, leave_out=["/trace/id"])


def test_leaving_out_an_element_of_a_list_moves_no_other():
    assert of([1, 2, 3], leave_out=["/0", "/1"]) == of([7, 8, 3], leave_out=["/0", "/1"])
    assert of([1, 2, 3], leave_out=["/0"]) != of([1, 9, 3], leave_out=["/0"])


def test_leaving_out_changes_nothing_of_the_callers():
    body = {"trace": {"id": 1}}

    of(body, leave_out=["/trace/id", "/absent/too"])

    assert body == {"trace": {"id": 1}}


def test_a_body_without_left_out_members_has_the_plain_fingerprint():
    """So a path may be added to the list while clients that never sent it retry."""
    assert of({"amount": 1}, leave_out=["/sent_at"]) == of({"amount": 1})


@pytest.mark.parametrize(
    ("pointers", "text"),
    [
        (["$.sent_at"], "'$.sent_at': must be a JSON Pointer (RFC 6901), e.g. '/sent_at' or '/trace/id'"),
        ([""], "'': must be a JSON Pointer (RFC 6901), e.g. '/sent_at' or '/trace/id'"),
        ([1], "1: must be a JSON Pointer (RFC 6901), e.g. '/sent_at' or '/trace/id'"),
        (["/a~2"], "'/a~2': has a '~' that is not '~0' (for '~') or '~1' (for '/')"),
        ("/sent_at", "'/sent_at': must be a list of JSON Pointers, not one str"),
    ],
)
def test_a_path_that_leaves_nothing_out_is_refused(pointers, text):
    with pytest.raises(outbox.InvalidValue) as caught:
        of({}, leave_out=pointers)

    assert str(caught.value) == f"leave_out {text}"


# --- no JSON


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xff", "the request is not JSON: its bytes are not UTF-8"),
        (b'{"amount": 4242', "the request is not JSON: Expecting ',' delimiter at character 15"),
        (b"\xef\xbb\xbf{}", "the request is not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) at character 0"),
        (b"[" * 100_000, "the request is nested too deeply, or contains itself"),
        (b"-Infinity", "-Infinity in the request is not a JSON number"),
        (b"1" * 5000, "the request contains an integer with more digits than Python reads"),
        (b"1e" + b"9" * 30, "the request contains a number whose exponent is too large"),
        (b'"\\ud800"', "the request contains a lone surrogate, which UTF-8 cannot encode"),
        (Decimal("sNaN"), "sNaN in the request is not a JSON number"),
    ],
)
def test_a_body_that_is_no_json_is_refused_and_not_shown(body, text):
    """What came off the wire is the client's mistake, a 400; a value is the app's."""
    with pytest.raises(outbox.RequestError if isinstance(body, bytes) else outbox.NotSerializable) as caught:
        of(body)

    assert str(caught.value) == text
    assert getattr(caught.value, "status", 400) == 400


@given(text=st.from_regex(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_a_number_on_the_wire_counts_as_the_decimal_that_it_says(text):
    assert of(f"[{text}]".encode()) == of([Decimal(text)])


# --- what is no JSON value, and looks like one


@pytest.mark.parametrize("hidden", [b"ab", bytearray(b"ab"), memoryview(b"ab"), array("B", b"ab")])
@pytest.mark.parametrize("leave_out", [[], ["/at"]])
def test_bytes_inside_a_request_are_refused_and_are_no_list_of_numbers(hidden, leave_out):
    for body in ({"sum": hidden}, [hidden], {"a": [{"b": hidden}]}):
        with pytest.raises(outbox.NotSerializable, match="in the request is not a JSON value"):
            of(body, leave_out=leave_out)


values = st.lists(
    st.tuples(st.sampled_from(["item", "amount", "at"]), st.sampled_from(["book", "car", ""])), max_size=5
)


def by_name(pairs, without=()):
    return {name: [value for n, value in pairs if n == name] for name, _ in pairs if name not in without}


@pytest.mark.parametrize("kind", [MultiDict, ImmutableMultiDict, QueryParams, FormData, django_dict])
@given(one=values, other=values)
def test_every_value_of_a_form_counts(kind, one, other):
    form, another = kind(one), kind(other)

    assert (fingerprint(form) == fingerprint(another)) == (by_name(one) == by_name(other))
    assert fingerprint(form) == fingerprint(by_name(one))
    assert (of(form, leave_out=["/at"]) == of(another, leave_out=["/at"])) == (
        by_name(one, ["at"]) == by_name(other, ["at"])
    )


def test_raw_takes_bytes_only():
    with pytest.raises(outbox.NotSerializable) as caught:
        Fingerprint.raw({"a": 1})

    assert str(caught.value) == "Fingerprint.raw takes bytes, not dict: use Fingerprint.json for JSON"


@given(
    number=st.decimals(allow_nan=False, allow_infinity=False), other=st.decimals(allow_nan=False, allow_infinity=False)
)
def test_decimals_are_equal_exactly_if_their_values_are(number, other):
    assert (of(number) == of(other)) == (number == other)


# --- the version that is stored


@pytest.mark.parametrize("version", [FINGERPRINT_VERSION - 1, FINGERPRINT_VERSION + 1])
def test_a_fingerprint_of_another_version_is_not_compared_but_replayed(database, client, version):
    """After a refusal the client would take a new key, and be charged twice, in every roll-out and roll-back."""
    first = client.request()
    database.execute(TABLES.record.update().values(fingerprint_version=version))

    assert client.request(content=b"what an unknown algorithm cannot distinguish from the first") == first


def test_a_request_may_be_given_as_its_fingerprint(client):
    first = client.request(content=of({"amount": 1, "at": 1}, leave_out=["/at"]))

    assert client.request(content=of({"amount": 1, "at": 2}, leave_out=["/at"])) == first
    with pytest.raises(outbox.RequestMismatch):
        client.request(content=of({"amount": 2, "at": 1}, leave_out=["/at"]))
