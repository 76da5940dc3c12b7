"""Equal requests have equal fingerprints and others do not: RFC 8785, its examples and its properties."""

import hashlib
import json
import math
import struct
from collections import OrderedDict
from types import MappingProxyType

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import outbox
from outbox.requests.fingerprint import canonical_json, fingerprint

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
