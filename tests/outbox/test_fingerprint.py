"""Equal requests have equal fingerprints and others do not: RFC 8785, its examples and properties, and pitfalls of bodies."""

import hashlib
import json
import math
import struct
from array import array
from collections import OrderedDict
from decimal import Decimal
from hashlib import sha256
from types import MappingProxyType

import pytest
from django.utils.datastructures import MultiValueDict
from hypothesis import assume, given
from hypothesis import strategies as st
from starlette.datastructures import FormData, QueryParams
from support.database import TABLES
from werkzeug.datastructures import ImmutableMultiDict, MultiDict

import outbox
from outbox import Fingerprint
from outbox.requests.fingerprint import FINGERPRINT_VERSION, canonical_json, fingerprint

texts = st.text(max_size=12)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    max_leaves=12,
)

# --- the RFC's own examples


# Section 3.2.2: the input, with its escapes and odd numbers, and 3.2.4: the output in bytes.
EXAMPLE = r"""
{
  "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}
"""
EXAMPLE_CANONICAL = (
    '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
    '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
)


def test_the_example_of_section_3_2():
    assert canonical_json(json.loads(EXAMPLE)).decode() == EXAMPLE_CANONICAL


def test_members_are_sorted_by_utf16_code_units_as_in_section_3_2_3():
    members = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }

    assert list(json.loads(canonical_json(members)).values()) == [
        "Carriage Return",
        "One",
        "Control",
        "Latin Small Letter O With Diaeresis",
        "Euro Sign",
        "Emoji: Grinning Face",
        "Hebrew Letter Dalet With Dagesh",
    ]


@pytest.mark.parametrize(
    ("ieee754", "written"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_the_numbers_of_appendix_b(ieee754, written):
    (number,) = struct.unpack(">d", bytes.fromhex(ieee754))

    assert canonical_json(number).decode() == written


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("\b\t\n\f\r", r'"\b\t\n\f\r"'),
        ("\0\x1f", r'"\u0000\u001f"'),
        ('"\\/', r'"\"\\/"'),
        ("\x7f\u2028é🦆", '"\x7f\u2028é🦆"'),
    ],
)
def test_only_what_must_be_escaped_is(text, written):
    assert canonical_json(text).decode() == written


# --- equal, or not


def permuted(value, data):
    match value:
        case dict():
            names = data.draw(st.permutations(list(value)))
            return {name: permuted(value[name], data) for name in names}
        case list():
            return [permuted(item, data) for item in value]
    return value


@given(value=values, data=st.data())
def test_the_order_of_members_does_not_count(value, data):
    assert fingerprint(permuted(value, data)) == fingerprint(value)


@given(value=values)
def test_the_canonical_form_parses_back_equal_and_is_its_own(value):
    canonical = canonical_json(value)

    parsed = json.loads(canonical, parse_int=float)  # as ECMAScript reads it, to which the RFC writes
    assert parsed == value
    assert canonical_json(parsed) == canonical


@given(one=values, other=values)
def test_different_values_have_different_fingerprints(one, other):
    assume(canonical_json(one) != canonical_json(other))

    assert fingerprint(one) != fingerprint(other)


@given(number=st.integers(-(2**53), 2**53))
def test_a_whole_number_is_the_same_as_an_int_and_as_a_float(number):
    assert fingerprint({"amount": number}) == fingerprint({"amount": float(number)})


@given(number=st.integers())
def test_a_number_and_its_text_differ(number):
    assert fingerprint(number) != fingerprint(str(number))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"),
        (1, True),
        (0, False),
        (None, "null"),
        ({}, []),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        ({"a": None}, {}),
        (2**53, 2**53 + 1),
        (1.1, 1.1000000000000003),
        ("é", "e\u0301"),
        (b"", ""),
        (b"{}", {}),
        (b'"a"', "a"),
        (b"null", None),
    ],
)
def test_these_are_different_requests(one, other):
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (0, -0.0),
        ((1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (b"ab", bytearray(b"ab")),
        (b"ab", memoryview(b"ab")),
    ],
)
def test_these_are_the_same_request(one, other):
    assert fingerprint(one) == fingerprint(other)


@given(body=st.binary(max_size=30))
def test_bytes_count_as_they_are(body):
    assert fingerprint(body) == hashlib.sha256(b"raw\0" + body).digest()


def test_json_and_bytes_are_distinguished_by_a_label():
    assert fingerprint({}) == hashlib.sha256(b"json\0{}").digest()


# --- no JSON

HIMSELF: list[object] = []
HIMSELF.append(HIMSELF)
SURROGATE = "the request contains a lone surrogate, which UTF-8 cannot encode"
DEEP = "the request is nested too deeply, or contains itself"


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (math.nan, "nan in the request is not a JSON number"),
        ([math.inf], "inf in the request is not a JSON number"),
        ({"a": -math.inf}, "-inf in the request is not a JSON number"),
        ("\ud800", SURROGATE),
        ({"\udfff": 1}, SURROGATE),
        (["a\udc00b"], SURROGATE),
        ({1: 2}, "the member name 1 in the request is not a str"),
        ({1, 2}, "a set in the request is not a JSON value"),
        ({"a": object()}, "a object in the request is not a JSON value"),
        (1j, "a complex in the request is not a JSON value"),
        (HIMSELF, DEEP),
    ],
)
def test_what_is_no_json_is_refused(request_, text):
    with pytest.raises(outbox.NotSerializable) as caught:
        fingerprint(request_)

    assert str(caught.value) == text


def test_an_integer_too_long_to_be_written_is_refused():
    with pytest.raises(outbox.NotSerializable):
        fingerprint({"amount": 10**5000})


class Meters(float):
    def __repr__(self):
        return f"{float(self)} m"


def test_a_number_of_the_apps_own_type_counts_by_its_value():
    assert canonical_json(Meters(1.5)) == b"1.5"
    assert canonical_json(Meters(-2.0)) == b"-2"


# --- The seven ways in which naive hashing fails, each beside the code that fails in it, and what is left out by choice.


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


exact_values = st.lists(
    st.tuples(st.sampled_from(["item", "amount", "at"]), st.sampled_from(["book", "car", ""])), max_size=5
)


def by_name(pairs, without=()):
    return {name: [value for n, value in pairs if n == name] for name, _ in pairs if name not in without}


@pytest.mark.parametrize("kind", [MultiDict, ImmutableMultiDict, QueryParams, FormData, django_dict])
@given(one=exact_values, other=exact_values)
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
