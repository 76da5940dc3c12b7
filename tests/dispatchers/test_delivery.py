"""The contract with adapters: what they get, what they answer, and which keys a service can be given."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.decide import decide
from dispatchers.delivery import (
    NATIVE,
    Adapter,
    Deferred,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    KeyFormat,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.sanitize import OUTCOMES, storable
from dispatchers.stored_outcome import read_outcome
from dispatchers.time_limits import Memory
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, Settle
from outbox.keys import Tag

TAG = Tag(bytes(range(32)))
TAGS = st.binary(min_size=32, max_size=32).map(Tag)
FORMATS = [
    KeyFormat(),
    KeyFormat(encoding="uuid"),
    KeyFormat(encoding="uuid", uuid_version=4),
    KeyFormat(encoding="uuid", uuid_version=5),
    KeyFormat(encoding="hex"),
]
EVERY_FORMAT = pytest.mark.parametrize("key_format", FORMATS, ids=str)
NOW = datetime(2026, 1, 31, tzinfo=UTC)

ONE_OF_EACH: dict[type, Outcome] = {
    Delivered: Delivered(),
    Rejected: Rejected("no"),
    KeyConflict: KeyConflict("other parameters"),
    Deferred: Deferred("busy"),
    InProgress: InProgress(),
    Unknown: Unknown("reset"),
}


def delivery(payload_json: bytes = b"{}") -> Delivery:
    return Delivery(
        id=UUID(int=1),
        operation="mail.send",
        payload_json=payload_json,
        key="ck1_a",
        attempt=1,
        options={},
        headers={},
        deadline=0.0,
    )


def claimed() -> ClaimedEntry:
    """What no rule looks at is None."""
    blank = ClaimedEntry(**dict.fromkeys(ClaimedEntry._fields))  # type: ignore[arg-type]
    return blank._replace(
        first_leased_at=NOW, leased_at=NOW, deliveries=1, attempts=0, maybe_sent=False, in_doubt_since=None
    )


# --- a delivery


def test_the_payload_is_the_json_parsed() -> None:
    assert delivery(b'{"amount": 250, "lines": ["a", null, 1.5]}').payload == {"amount": 250, "lines": ["a", None, 1.5]}


def test_the_payload_is_parsed_each_time_so_that_changes_stay_apart() -> None:
    sent = delivery(b'{"lines": []}')

    sent.payload["lines"].append("changed")

    assert sent.payload == {"lines": []}
    assert sent.payload_json == b'{"lines": []}'


def test_the_json_of_the_payload_is_what_was_enqueued_to_the_byte() -> None:
    enqueued = '{"b": 1.0,  "a": "é", "a": 2}'.encode()

    assert delivery(enqueued).payload_json == enqueued


@pytest.mark.parametrize(
    "value",
    [
        delivery(b'{"iban": "DE02"}')._replace(options={"account": "DE02"}, headers={"trace": "DE02"}),
        claimed()._replace(
            payload=b'{"iban": "DE02"}', options={"account": "DE02"}, outcome=read_outcome('{"reason": "DE02"}')
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_logs_an_attempt_logs_no_payload(value: Any) -> None:
    assert repr(value).startswith(f"{type(value).__name__}(id=")
    assert "DE02" not in f"{value!r} {value}"


# --- what an adapter answers


def test_the_outcomes_are_a_closed_union_of_six() -> None:
    assert set(get_args(Outcome)) == set(ONE_OF_EACH)


def test_the_dispatcher_takes_each_outcome_and_nothing_else() -> None:
    assert set(OUTCOMES) == set(get_args(Outcome))


@pytest.mark.parametrize("member", get_args(Outcome), ids=lambda member: member.__name__)
def test_every_outcome_is_decided(member: type) -> None:
    change = decide(claimed(), ONE_OF_EACH[member], Memory(window=timedelta(days=1)), NOW, jitter=0.5)

    assert isinstance(change, Settle | Retry | MarkUncertain)


@pytest.mark.parametrize("answer", [None, "delivered", 200, Delivered, {}], ids=repr)
def test_what_is_no_outcome_is_never_decided(answer: Any) -> None:
    with pytest.raises(AssertionError):
        decide(claimed(), answer, Memory(window=None), NOW, jitter=0.5)


def test_what_an_outcome_claims_must_be_said() -> None:
    """Nothing is conclusive, final or a repeat, and no time is asked for, by default."""
    assert Rejected("no") == Rejected("no", conclusive=False, result=None)
    assert Unknown("reset") == Unknown("reset", after=None, final=False)
    assert Delivered() == Delivered(result=None, replayed=False)
    assert Deferred("busy") == Deferred("busy", after=None)
    assert InProgress() == InProgress(after=None)


# --- values stay what they are


@pytest.mark.parametrize(
    "value",
    [*ONE_OF_EACH.values(), delivery(), KeyFormat(), Memory(window=None)],
    ids=lambda value: type(value).__name__,
)
def test_a_value_cannot_be_changed(value: Any) -> None:
    names = value._fields if isinstance(value, tuple) else [field.name for field in fields(value)]
    for name in names:
        with pytest.raises(AttributeError):  # FrozenInstanceError is one
            setattr(value, name, None)

    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("make", [delivery, KeyFormat, lambda: Unknown("reset")], ids=["delivery", "format", "outcome"])
def test_equal_values_are_equal(make: Callable[[], Any]) -> None:
    assert make() == make()


# --- what an adapter declares


OF_THE_DISPATCHER = {"margin", "fencing_delay", "can_look_up", "form"}


@pytest.mark.parametrize("name", [field.name for field in fields(Memory) if field.name not in OF_THE_DISPATCHER])
def test_what_decide_knows_of_a_service_has_an_adapters_names_and_defaults(name: str) -> None:
    declared = Adapter.retry if hasattr(Adapter.retry, name) else Adapter

    assert getattr(Memory(window=None), name) == getattr(declared, name)


# --- keys


@pytest.mark.parametrize(
    ("key_format", "key"),
    [
        (NATIVE, "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"),
        (KeyFormat(encoding="uuid"), "00010203-0405-8607-8809-0a0b0c0d0e0f"),
        (KeyFormat(encoding="uuid", uuid_version=4), "00010203-0405-4607-8809-0a0b0c0d0e0f"),
        (KeyFormat(encoding="uuid", uuid_version=5), "00010203-0405-5607-8809-0a0b0c0d0e0f"),
        (KeyFormat(encoding="hex"), "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"),
    ],
    ids=str,
)
def test_a_tag_is_written_as_the_service_takes_it(key_format: KeyFormat, key: str) -> None:
    assert key_format.encode(TAG) == key


@given(TAGS)
def test_the_length_of_a_key_does_not_depend_on_the_tag(tag: Tag) -> None:
    lengths = {str(key_format): len(key_format.encode(tag)) for key_format in FORMATS}

    assert lengths == {"native": 36, "uuid8": 36, "uuid4": 36, "uuid5": 36, "hex": 64}


@given(TAGS)
def test_a_key_consists_of_letters_digits_hyphens_and_underscores(tag: Tag) -> None:
    """`misfit` looks at each encoding's alphabet instead of at every key: no key may go beyond it."""
    assert re.fullmatch("ck1_[A-Za-z0-9_-]{32}", KeyFormat().encode(tag))
    assert re.fullmatch("[0-9a-f]{64}", KeyFormat(encoding="hex").encode(tag))
    assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", KeyFormat(encoding="uuid").encode(tag))


@given(TAGS, st.sampled_from([4, 5, 8]))
def test_a_uuid_has_the_version_that_the_service_validates(tag: Tag, version: Any) -> None:
    key = UUID(KeyFormat(encoding="uuid", uuid_version=version).encode(tag))

    assert key.variant == RFC_4122
    assert key.version == version


@EVERY_FORMAT
def test_the_same_tag_is_the_same_key_every_time(key_format: KeyFormat) -> None:
    assert key_format.encode(TAG) == key_format.encode(Tag(bytes(TAG)))


@EVERY_FORMAT
def test_another_tag_is_another_key(key_format: KeyFormat) -> None:
    assert key_format.encode(TAG) != key_format.encode(Tag(bytes(reversed(range(32)))))


@EVERY_FORMAT
def test_by_default_every_encoding_fits(key_format: KeyFormat) -> None:
    assert key_format.misfit() is None


@pytest.mark.parametrize(("encoding", "chars"), [("native", 36), ("uuid", 36), ("hex", 64)])
def test_a_key_fits_exactly_or_not_at_all(encoding: Any, chars: int) -> None:
    """Never cut short: two effects could then share a key."""
    assert KeyFormat(encoding=encoding, max_chars=chars).misfit() is None
    assert (
        KeyFormat(encoding=encoding, max_chars=chars - 1).misfit()
        == f"{encoding} keys have {chars} characters, the service takes {chars - 1}"
    )


def test_a_character_that_only_some_keys_contain_is_a_misfit_too() -> None:
    """No hyphen is in the key of this tag; another entry's would have one."""
    assert "-" not in NATIVE.encode(TAG)

    assert KeyFormat(alphabet="[A-Za-z0-9_]").misfit() == "native keys contain '-', the service takes [A-Za-z0-9_]"


def test_an_unpadded_key_needs_no_sign_beyond_its_alphabet() -> None:
    assert "=" not in NATIVE.encode(TAG)


# --- What the dispatcher keeps of an adapter's result.


@pytest.mark.parametrize(
    ("result", "stored"),
    [
        ({"offset": math.nan}, {"unstorable": "dict"}),
        ({"offset": 10**5000}, {"unstorable": "dict"}),
        ({"offset": {"at": object()}}, {"unstorable": "dict"}),
        ({"text": "x" * 70_000}, {"unstorable": "70012 bytes of JSON"}),
        ({"x" * 70_000: 1}, {"unstorable": "70007 bytes of JSON"}),
        ({f"field {number:04}": 1 for number in range(5_000)}, {"unstorable": "85000 bytes of JSON"}),
    ],
    ids=["not a number", "too many digits", "no JSON", "a long text", "a long name", "many fields"],
)
def test_a_result_that_cannot_be_kept_is_replaced_by_what_it_was(result: Any, stored: Any) -> None:
    assert storable(Delivered(result)) == Delivered(stored)


@pytest.mark.parametrize("result", [{"stream": "ORDERS", "seq": 7}, {"at": [1.5, None, True]}, {7: "x"}, "text", None])
def test_a_result_that_can_be_kept_is_kept(result: Any) -> None:
    assert storable(Delivered(result)) == Delivered(result)
