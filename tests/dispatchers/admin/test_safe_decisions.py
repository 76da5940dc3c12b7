"""Which decisions are offered for an entry in which state, by the window of its key, and who counts as another person."""

import json
import unicodedata
from collections import namedtuple
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.admin.decide.key_window import key_window, memory_of
from dispatchers.admin.decide.persons import is_same_person
from dispatchers.admin.decide.safe import offers
from dispatchers.store.records.heartbeats import DispatcherSeen
from dispatchers.stored_outcome import KEY_CONFLICT
from dispatchers.time_limits import FOREVER, Memory
from outbox.times import NEVER

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
A_DAY = Memory(window=timedelta(days=1), can_look_up=True, form="native")
QueueRow = namedtuple(
    "QueueRow", "state suspended_reason outcome maybe_sent in_doubt_since key_epoch sent_as position due_at"
)


def row(state: str = "uncertain", *, outcome: Any = None, **changed: Any) -> Any:
    """A row of the queue; by default of an entry whose first attempt was an hour ago."""
    fields: dict[str, Any] = {
        "state": state,
        "suspended_reason": None,
        "outcome": json.dumps(outcome or {"reason": "no answer"}),
        "maybe_sent": state == "uncertain",
        "in_doubt_since": NOW - timedelta(hours=1) if state == "uncertain" else None,
        "key_epoch": 0,
        "sent_as": "native",
        "position": None,
        "due_at": NEVER if state == "uncertain" else NOW,
    }
    return QueueRow(**fields | changed)


def safe(row: Any, memory: Memory | None = A_DAY, *, is_suspended: bool = False) -> list[str]:
    found = offers(row, memory, NOW, is_suspended=is_suspended)
    return [offer.decision for offer in found if offer.why_not is None]


BY_HAND = ["happened", "did_not_happen"]


@pytest.mark.parametrize(
    ("memory", "changed", "expected"),
    [
        (A_DAY, {}, ["look_up", "same_key", *BY_HAND]),
        (A_DAY, {"in_doubt_since": NOW - timedelta(days=2)}, ["look_up", "new_key", *BY_HAND]),
        (A_DAY, {"in_doubt_since": NOW - timedelta(hours=23, minutes=59)}, ["look_up", "new_key", *BY_HAND]),
        (A_DAY, {"in_doubt_since": None}, ["look_up", "same_key", *BY_HAND]),
        (A_DAY, {"sent_as": "uuid8"}, ["same_key", *BY_HAND]),
        (A_DAY, {"outcome": {"reason": f"{KEY_CONFLICT}: other", "stored": True}}, ["new_key", *BY_HAND]),
        (A_DAY, {"outcome": {"reason": "declined", "stored": True}}, ["look_up", "new_key", *BY_HAND]),
        (A_DAY, {"outcome": {"reason": "", "known": {"state": "failed"}}}, ["same_key", *BY_HAND]),
        (Memory(window=FOREVER), {"in_doubt_since": NOW - timedelta(days=900)}, ["same_key", *BY_HAND]),
        (Memory(window=None), {}, ["new_key", *BY_HAND]),
        (Memory(window=None, can_look_up=True, form="native"), {}, ["look_up", "new_key", *BY_HAND]),
        (None, {}, BY_HAND),
    ],
)
def test_an_uncertain_entry_is_offered_what_its_service_makes_safe(
    memory: Memory | None, changed: dict[str, Any], expected: list[str]
) -> None:
    assert safe(row(**changed), memory) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (row("pending"), ["retry", "cancel"]),
        (row("retry"), ["retry", "cancel"]),
        (row("retry", maybe_sent=True), ["retry"]),
        (row("pending", maybe_sent=True), []),
        (row("pending", position=2, due_at=NEVER), ["cancel"]),
        (row("retry", outcome={"reason": "", "known": {"state": "delivered", "attempts": 1}}), ["retry"]),
        (row("pending", outcome={"reason": "", "known": {"state": "cancelled"}}), ["cancel"]),
        (row("sending"), []),
        (row("pending", suspended_reason="restored"), ["release"]),
        (row(suspended_reason="restored"), ["release"]),
    ],
)
def test_other_states_are_offered_what_they_allow(entry: Any, expected: list[str]) -> None:
    assert safe(entry) == expected


def test_nothing_is_cancelled_while_sending_is_suspended() -> None:
    assert safe(row("pending"), is_suspended=True) == ["retry"]


def test_what_is_not_safe_names_the_reason() -> None:
    found = {offer.decision: offer.why_not for offer in offers(row(), A_DAY, NOW, is_suspended=False)}

    assert found["new_key"] == "the service still remembers its key: under a new key it may happen twice"


# --- The window of a key, by what live dispatchers declare.


HOUR, DAY = timedelta(hours=1), timedelta(days=1)
DECLARED = {
    "window": 86400.0,
    "timeout": 30.0,
    "max_attempts": 20,
    "max_age": 259200.0,
    "at_least_once": False,
    "can_look_up": False,
    "form": "native",
}


def seen(operations: dict[str, Any], *, is_live: bool = True) -> DispatcherSeen:
    settings = {"lease": 60.0, "margin": 5.0, "operations": operations}
    return DispatcherSeen(
        host="web-1",
        pid=1,
        version="1",
        since=NOW,
        seen_at=NOW,
        is_live=is_live,
        in_flight=0,
        settings_digest="",
        operations=sorted(operations),
        settings=settings,
        is_readable=True,
    )


def test_the_longest_registered_prefix_declares_the_memory() -> None:
    dispatchers = [seen({"stripe": DECLARED, "stripe.refunds": DECLARED | {"window": 3600.0}})]

    found = memory_of("stripe.refunds.create", dispatchers)

    assert found is not None
    assert (found.window, found.fencing_delay) == (HOUR, timedelta(seconds=65))
    assert memory_of("crm.upsert", dispatchers) is None


def test_of_differing_dispatchers_the_shortest_window_counts() -> None:
    dispatchers = [
        seen({"crm": DECLARED | {"window": "forever"}}),
        seen({"crm": DECLARED | {"can_look_up": True}}),
        seen({"crm": DECLARED | {"window": 60.0}}, is_live=False),
    ]

    found = memory_of("crm", dispatchers)

    assert found is not None
    assert (found.window, found.can_look_up) == (DAY, True)


@pytest.mark.parametrize(
    ("memory", "since", "next_at", "expected"),
    [
        (None, NOW, None, ("unknown", False)),
        (Memory(window=None), NOW, None, ("no_keys", False)),
        (Memory(window=FOREVER), NOW, None, ("forever", False)),
        (Memory(window=DAY), None, None, ("unsent", False)),
        (Memory(window=DAY), NOW - 2 * DAY, None, ("closed", False)),
        (Memory(window=DAY), NOW - HOUR, NOW + HOUR, ("open", False)),
        (Memory(window=DAY), NOW - HOUR, NOW + DAY, ("open", True)),
        (Memory(window=DAY), NOW - HOUR, None, ("open", True)),
    ],
)
def test_the_window_warns_if_it_closes_before_the_next_step(
    memory: Memory | None, since: datetime | None, next_at: datetime | None, expected: Any
) -> None:
    found = key_window(memory, since, next_at, NOW)

    assert (found.kind, found.closes_before_next) == expected


def test_the_window_ends_earlier_by_the_timeout_and_the_margin() -> None:
    found = key_window(Memory(window=DAY), NOW, None, NOW)

    assert found.closes_at == NOW + DAY - timedelta(seconds=35)


# --- Names of operators: another spelling of one name is the same person, another name is not.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Ada", " ada "),
        ("José", unicodedata.normalize("NFD", "José")),
        ("ada", "ａｄａ"),
        ("ada", "a\u200bd\u2060a\ufeff"),
        ("ada", "a\u00adda\ufe0f"),
        ("ada", "ad\u034fa\u3164"),
        ("Ada Lovelace", "Ada\u00a0 \t Lovelace"),
        ("STRASSE", "straße"),
        ("ﬁona", "FIONA"),
        ("e\u200b\u0301ve", "éve"),
    ],
)
def test_another_spelling_is_the_same_person(first: str, second: str) -> None:
    assert is_same_person(first, second)
    assert is_same_person(second, first)


@pytest.mark.parametrize(
    ("first", "second"), [("ada", "adam"), ("José", "Jose"), ("สม", "สิม"), ("ada", "аda"), ("ada l", "adal")]
)
def test_another_name_is_another_person(first: str, second: str) -> None:
    assert not is_same_person(first, second)


@given(st.text())
def test_every_normal_form_of_a_name_is_the_same_person(name: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert is_same_person(name, unicodedata.normalize(form, name))
