"""moved: what a lease that ended, but not its entry, leaves in the queue."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from support.decide import KEYS
from support.entries import HOUR

from dispatchers.decide import conclude
from dispatchers.store.queue.queue_update import Unsettled, queue_update
from dispatchers.stored_outcome import NOTHING_STORED, Known, read_outcome, write_outcome
from dispatchers.transitions import ClaimedEntry, End, MarkUncertain, Release, Retry, RetryCallback, SendAgain, Settle

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOW + HOUR
DELAY = timedelta(seconds=7)


def claimed(**fields: Any) -> ClaimedEntry:
    blank = ClaimedEntry(**dict.fromkeys(ClaimedEntry._fields))  # type: ignore[arg-type]
    given: dict[str, Any] = {
        "deliveries": 3,
        "attempts": 2,
        "maybe_sent": True,
        "in_doubt_since": NOW,
        "key_epoch": 1,
        "lease_token": UUID(int=1),
        "outcome": NOTHING_STORED,
    }
    return blank._replace(**given | fields)


MOVES: list[tuple[str, Unsettled, dict[str, Any], dict[str, Any]]] = [
    (
        "waits",
        Retry(DELAY, "busy", 4, True, LATER),
        {"state": "retry", "delay": DELAY, "attempts": 4, "in_doubt_since": LATER, "reason": "busy"},
        {"reason": "busy", "deliveries": 3},
    ),
    (
        "is parked",
        MarkUncertain("the window", 4, True, LATER),
        {"state": "uncertain", "delay": None, "attempts": 4, "in_doubt_since": LATER},
        {"reason": "the window"},
    ),
    (
        "is parked with an answer that is stored",
        MarkUncertain("500", 4, True, NOW, stored=True),
        {"state": "uncertain", "delay": None},
        {"reason": "500", "stored": True},
    ),
    (
        "is queued again",
        SendAgain(2, None, DELAY, "look again"),
        {"state": "pending", "delay": DELAY, "attempts": 0, "key_epoch": 2, "in_doubt_since": None, "maybe_sent": True},
        {"reason": "look again"},
    ),
    (
        "is kept as delivered",
        RetryCallback(Settle("delivered", 4, result={"id": 1}), DELAY, "delivered, but"),
        {"state": "retry", "delay": DELAY, "attempts": 4, "proof": True},
        {"reason": "delivered, but", "known": {"state": "delivered", "attempts": 4, "result": {"id": 1}}},
    ),
    (
        "is kept as failed",
        RetryCallback(Settle("failed", 4, reason="no"), DELAY, "failed, but"),
        {"state": "retry", "delay": DELAY, "proof": False},
        {"reason": "failed, but", "known": {"state": "failed", "attempts": 4, "reason": "no"}},
    ),
    (
        "is kept as an operator resolved it",
        RetryCallback(Settle("failed", 2, reason="looked", decided=True), DELAY, "failed, but"),
        {"state": "uncertain", "delay": DELAY, "attempts": 2, "proof": False},
        {"reason": "failed, but", "known": {"state": "failed", "reason": "looked"}},
    ),
    (
        "is kept as uncertain",
        RetryCallback(MarkUncertain("500", 4, True, LATER, stored=True), DELAY, "uncertain, but"),
        {"state": "uncertain", "delay": DELAY, "in_doubt_since": LATER, "proof": False},
        {"reason": "uncertain, but", "stored": True, "known": {"state": "uncertain", "attempts": 4, "reason": "500"}},
    ),
]


@pytest.mark.parametrize(("change", "columns", "record"), [move[1:] for move in MOVES], ids=[move[0] for move in MOVES])
def test_the_row_of_an_entry_has_what_its_lease_left(
    change: Unsettled, columns: dict[str, Any], record: dict[str, Any]
) -> None:
    values = queue_update(claimed(), change)

    assert values._asdict() | columns == values._asdict()
    assert values.outcome is not None
    assert json.loads(values.outcome) == record
    assert (values.uncounted, values.key_epoch) == (0, columns.get("key_epoch", 1))


@pytest.mark.parametrize("end", [Settle("failed", 1, reason="no"), Settle("cancelled", 0), Settle("delivered", 1)])
def test_whatever_is_kept_can_no_longer_be_cancelled(end: End) -> None:
    assert queue_update(claimed(maybe_sent=False, in_doubt_since=None), RetryCallback(end, DELAY, "")).maybe_sent


def test_the_doubt_of_a_first_attempt_is_kept_with_its_callback_due() -> None:
    """Without it a conclusive rejection after the window would later be taken for a failure."""
    first = claimed(maybe_sent=False, in_doubt_since=None)

    values = queue_update(first, RetryCallback(MarkUncertain("500", 1, True, NOW), DELAY, "uncertain, but"))

    assert (values.maybe_sent, values.in_doubt_since) == (True, NOW)


@pytest.mark.parametrize("state", ["delivered", "failed", "cancelled"])
def test_an_operators_decision_is_the_same_after_its_callback_failed(state: Any) -> None:
    """Else it would block its ordering group again, which an operator has released, and count as the answer of a service."""
    decided = claimed(outcome=read_outcome(write_outcome("looked", known=Known(state=state, reason="looked"))))
    end = concluded(decided)

    values = queue_update(decided, RetryCallback(end, DELAY, "its callback raised ValueError"))

    assert concluded(claimed(outcome=read_outcome(values.outcome))) == end


def concluded(entry: ClaimedEntry) -> Any:
    assert entry.outcome.known is not None
    return conclude(entry, entry.outcome.known, KEYS)


RELEASED_WITHIN: list[tuple[dict[str, Any], str]] = [
    ({"deliveries": 1, "maybe_sent": False, "in_doubt_since": None}, "pending"),
    ({}, "retry"),
    ({"outcome": read_outcome(write_outcome("busy"))}, "retry"),
    ({"outcome": read_outcome(write_outcome("looked", known=Known(state="delivered")))}, "uncertain"),
    ({"outcome": read_outcome(write_outcome("looked", known=Known(state="send_again")))}, "uncertain"),
    ({"outcome": read_outcome(write_outcome("but", known=Known(state="delivered", attempts=1)))}, "retry"),
    ({"outcome": read_outcome(write_outcome("but", known=Known(state="uncertain", attempts=1)))}, "uncertain"),
    (
        {
            "outcome": read_outcome(write_outcome("no", known=Known(state="cancelled"))),
            "maybe_sent": False,
            "deliveries": 1,
        },
        "pending",
    ),
    (
        {"outcome": read_outcome(write_outcome("no", known=Known(state="cancelled")))},
        "retry",
    ),  # its first claimer crashed
]


@pytest.mark.parametrize(("fields", "state"), RELEASED_WITHIN)
def test_what_is_released_without_an_attempt_is_as_it_was_and_not_counted(fields: dict[str, Any], state: str) -> None:
    entry = claimed(**fields)

    values = queue_update(entry, Release("no adapter serves it", DELAY))

    assert (values.state, values.delay, values.uncounted) == (state, DELAY, 1)
    assert (values.attempts, values.maybe_sent) == (entry.attempts, entry.maybe_sent)
    assert (values.in_doubt_since, values.key_epoch) == (entry.in_doubt_since, entry.key_epoch)
    assert (values.reason, values.outcome) == (None, None)


@pytest.mark.parametrize(
    "known",
    [
        Known(state="delivered", attempts=0, result={"a": [1, "é", None]}, reason="looked", stored=True),
        Known(state="uncertain", attempts=3, reason="500"),
        Known(state="send_again"),
        None,
    ],
)
def test_what_is_put_on_record_is_read_back_as_it_was(known: Known | None) -> None:
    stored = known.stored if known else False

    assert read_outcome(write_outcome("why", stored=stored, known=known)).known == known


def test_what_a_newer_release_puts_on_record_beside_that_is_passed_over() -> None:
    known = {"state": "delivered", "attempts": 2, "seen_by": "a newer release"}

    assert read_outcome(json.dumps({"reason": "but", "known": known})).known == Known(state="delivered", attempts=2)


def test_no_record_knows_nothing() -> None:
    assert read_outcome(None).known is None
