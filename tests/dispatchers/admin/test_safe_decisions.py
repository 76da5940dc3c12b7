"""Which decisions are offered for an entry in which state."""

import json
from collections import namedtuple
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatchers.admin.decide.safe import offers
from dispatchers.stored_outcome import KEY_CONFLICT
from dispatchers.time_limits import FOREVER, Memory
from outbox.times import NEVER

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
DAY = Memory(window=timedelta(days=1), can_look_up=True, form="native")
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


def safe(row: Any, memory: Memory | None = DAY, *, is_suspended: bool = False) -> list[str]:
    found = offers(row, memory, NOW, is_suspended=is_suspended)
    return [offer.decision for offer in found if offer.why_not is None]


BY_HAND = ["happened", "did_not_happen"]


@pytest.mark.parametrize(
    ("memory", "changed", "expected"),
    [
        (DAY, {}, ["look_up", "same_key", *BY_HAND]),
        (DAY, {"in_doubt_since": NOW - timedelta(days=2)}, ["look_up", "new_key", *BY_HAND]),
        (DAY, {"in_doubt_since": NOW - timedelta(hours=23, minutes=59)}, ["look_up", "new_key", *BY_HAND]),
        (DAY, {"in_doubt_since": None}, ["look_up", "same_key", *BY_HAND]),
        (DAY, {"sent_as": "uuid8"}, ["same_key", *BY_HAND]),
        (DAY, {"outcome": {"reason": f"{KEY_CONFLICT}: other", "stored": True}}, ["new_key", *BY_HAND]),
        (DAY, {"outcome": {"reason": "declined", "stored": True}}, ["look_up", "new_key", *BY_HAND]),
        (DAY, {"outcome": {"reason": "", "known": {"state": "failed"}}}, ["same_key", *BY_HAND]),
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
    found = {offer.decision: offer.why_not for offer in offers(row(), DAY, NOW, is_suspended=False)}

    assert found["new_key"] == "the service still remembers its key: under a new key it may happen twice"
