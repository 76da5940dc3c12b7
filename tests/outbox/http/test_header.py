"""The Idempotency-Key header, against the HTTP working group's own test cases and another implementation."""

import json
from pathlib import Path
from typing import Any

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outbox
from outbox.http import parse_key

SUITE = Path(__file__).parent / "data" / "structured-field-tests"
FILES = ("string", "string-generated", "token", "token-generated", "item")
KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"


def cases() -> dict[str, Any]:
    """Those of the suite, each under a name by which it can be found there."""
    found = [(file, case) for file in FILES for case in json.loads((SUITE / f"{file}.json").read_text())]
    return {f"{file}: {case['name']}": case for file, case in found if case["header_type"] == "item"}


def key_or_refusal(lines: list[str], **mode: bool) -> str | type[outbox.RequestError]:
    try:
        return parse_key(lines, **mode)
    except outbox.RequestError as refusal:
        return type(refusal)


def string_of(case: dict[str, Any]) -> str | None:
    """The String that the suite expects of a case, if it expects one that is short enough to be a key."""
    value = None if case.get("must_fail") else case["expected"][0]
    return value if isinstance(value, str) and 1 <= len(value) <= 255 and len(case["raw"]) == 1 else None


# --- the suite


def test_the_suite_is_there() -> None:
    strings = [case for case in cases().values() if string_of(case) is not None]

    assert len(cases()) > 500
    assert len(strings) > 90


def test_strict_takes_the_strings_of_the_suite_and_nothing_else() -> None:
    expected = {name: string_of(case) or outbox.KeyMalformed for name, case in cases().items()}

    assert {name: key_or_refusal(case["raw"], strict=True) for name, case in cases().items()} == expected


def test_lenient_takes_the_same_strings_as_the_same_keys() -> None:
    found = {name: key_or_refusal(case["raw"]) for name, case in cases().items()}

    assert {name: key for name, key in found.items() if key not in lenient_keys(cases()[name])} == {}


def lenient_keys(case: dict[str, Any]) -> list[Any]:
    """What a lenient server may make of a case. A bare key is what was sent, or nothing."""
    if string_of(case) is not None:
        return [string_of(case)]
    sent = case["raw"][0].strip(" \t")
    return [outbox.KeyMalformed] if sent.startswith('"') else [sent, outbox.KeyMalformed]


# --- another implementation

text = st.text(st.characters(max_codepoint=0x17F), max_size=20)
quoted = text.map(lambda value: f'"{value}"')
strings = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(http_sf.ser)
values = st.sampled_from(
    [
        "1",
        "-1.5",
        "1.",
        "1234567890123456",
        "tok/en",
        ":YWJj:",
        ":YWJ=:",
        ":=:",
        "?1",
        "?2",
        "@1",
        "@1.5",
        '%"f%c3%bc"',
        '"x',
    ]
)
keys = st.sampled_from(["a", "*b", "A", "a.b-c_d*", "1", ""])
parameters = st.lists(st.tuples(st.sampled_from([";", "; ", " ;", ";;"]), keys, st.none() | values), max_size=3).map(
    lambda found: "".join(f"{mark}{key}" + (f"={value}" if value else "") for mark, key, value in found)
)
fields = st.one_of(text, quoted, strings, st.tuples(strings, parameters).map("".join))


def string_as_parsed_elsewhere(line: str) -> str | None:
    try:
        value, _ = http_sf.parse(line.encode(), tltype="item")
    except ValueError:
        return None
    return value if type(value) is str and value else None


@given(st.tuples(st.sampled_from(["", " ", "\t"]), fields, st.sampled_from(["", " ", "\t"])).map("".join))
def test_strict_reads_what_another_parser_reads(line: str) -> None:
    assert key_or_refusal([line], strict=True) == (string_as_parsed_elsewhere(line) or outbox.KeyMalformed)


@given(strings, parameters)
def test_parameters_are_checked_and_mean_nothing(string: str, more: str) -> None:
    found = key_or_refusal([string + more])

    assert found == (string_as_parsed_elsewhere(string + more) or outbox.KeyMalformed)


@given(
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='",;\\'), min_size=1, max_size=255)
)
def test_a_bare_key_and_the_same_key_in_quotes_are_one(key: str) -> None:
    assert parse_key([key]) == parse_key([http_sf.ser(key)]) == parse_key([f"\t{key} "]) == key


# --- by hand


@pytest.mark.parametrize("line", [KEY, f'"{KEY}"', f'"{KEY}";v=1', "KG5LxwFBepaKHyUD", "12345", "user@example.com:7"])
def test_the_keys_that_clients_send_are_taken(line: str) -> None:
    assert parse_key([line]) == line.removesuffix(";v=1").strip('"')


@pytest.mark.parametrize("line", [KEY, "token", "12345", ":YWJj:", "?1"])
def test_strict_takes_no_key_without_quotes(line: str) -> None:
    with pytest.raises(outbox.KeyMalformed) as refused:
        parse_key([line], strict=True)

    assert str(refused.value) == (
        f"Idempotency-Key {line!r} is not a String of RFC 9651: send the key in double quotes,"
        f' e.g. Idempotency-Key: "{KEY}"'
    )


@pytest.mark.parametrize("strict", [True, False])
def test_a_request_without_the_header_learns_what_to_send(strict: bool) -> None:
    with pytest.raises(outbox.KeyMissing) as refused:
        parse_key([], strict=strict)

    assert str(refused.value) == (
        "the request has no Idempotency-Key header: send one,"
        f' e.g. Idempotency-Key: "{KEY}", and repeat it with each retry'
    )


def test_two_headers_are_refused_even_if_equal() -> None:
    with pytest.raises(outbox.KeyMalformed, match=r"^the request has 2 Idempotency-Key headers: send one$"):
        parse_key([KEY, KEY])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("line", ['"a,b"', '"a"; b="c,d"'])
def test_a_comma_is_refused_where_the_server_may_have_put_it_there(line: str, strict: bool) -> None:
    assert parse_key([line], strict=strict).startswith("a")
    with pytest.raises(outbox.KeyMalformed) as refused:
        parse_key([line], strict=strict, are_joined=True)

    assert str(refused.value) == (
        f"Idempotency-Key {line!r} is not a key: it has a comma, and this server joins two headers by a comma; send one"
        " header, with a key that has no comma"
    )


@pytest.mark.parametrize(
    "line", ["a, b", "a,b", '"a", "b"', '"a","b"', "a;b", 'a"b', "a\\b", "a b", "ä", "a\x7f", "a\0b", ""]
)
def test_what_is_no_key_is_refused_with_an_example(line: str) -> None:
    with pytest.raises(outbox.KeyMalformed) as refused:
        parse_key([line])

    assert str(refused.value).startswith(f"Idempotency-Key {line!r} is not a ")
    assert str(refused.value).endswith(f'in double quotes, e.g. Idempotency-Key: "{KEY}"')


@pytest.mark.parametrize("strict", [True, False])
def test_a_key_has_1_to_255_bytes(strict: bool) -> None:
    assert parse_key([f'"{"k" * 255}"'], strict=strict) == "k" * 255
    for key in ("", "k" * 256):
        with pytest.raises(outbox.KeyMalformed, match=f"has a key of {len(key)} bytes: 1 to 255 are allowed$"):
            parse_key([f'"{key}"'], strict=strict)


def test_a_long_value_is_not_shown_in_full() -> None:
    with pytest.raises(outbox.KeyMalformed) as refused:
        parse_key(["k k" * 5000])

    assert "... (15000 characters) is not a key" in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "line", ['"' + "a" * 60_000, '"a"' + ";a" * 30_000 + "!", '"a";a=' + "1" * 60_000, '"' + "\\" * 60_001]
)
def test_a_faulty_value_is_refused_without_delay(line: str) -> None:
    """It would take minutes, and the test would time out, if the expression backtracked."""
    with pytest.raises(outbox.KeyMalformed):
        parse_key([line])
