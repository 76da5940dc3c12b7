"""decide and admit: state transitions, arrow by arrow, and what may be sent. The picture and the words: docs/how-it-works.md."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from support.decide import (
    DAY,
    EVERY_SERVICE,
    EVERY_SERVICE_WITH_KEYS,
    FOREVER_KEYS,
    HOUR,
    INSTANT,
    KEYS,
    LEASED_AT,
    MARGIN,
    MINUTE,
    NO_KEYS,
    NO_KEYS_AT_LEAST_ONCE,
    NOW,
    SECOND,
    TIMEOUT,
    WINDOW,
    after,
    fresh,
    in_doubt,
    state_of,
)

from dispatchers.decide import admit, conclude, leave
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.stored_outcome import Known, StoredOutcome, read_outcome, write_outcome
from dispatchers.time_limits import Memory, last_safe_send, remembered
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, Retry, Settle

# --- the diagram, one arrow a row


class Arrow(NamedTuple):
    """`given` and the outcome `answer` end in `state`; waiting and parked entries carry `doubt` on."""

    name: str
    given: ClaimedEntry
    memory: Memory
    answer: Outcome
    state: str
    doubt: bool | None = None


ARROWS = [
    Arrow("delivered is delivered", fresh(), KEYS, Delivered(), "delivered"),
    Arrow("delivered ends doubt", in_doubt(), KEYS, Delivered(replayed=True), "delivered"),
    Arrow("delivered, without keys", fresh(), NO_KEYS, Delivered(), "delivered"),
    Arrow("rejected at first", fresh(), KEYS, Rejected("no"), "failed"),
    Arrow("rejected at first, without keys", fresh(), NO_KEYS, Rejected("no"), "failed"),
    Arrow("rejected in doubt", in_doubt(), KEYS, Rejected("no"), "uncertain", True),
    Arrow("rejected in doubt, forever", in_doubt(), FOREVER_KEYS, Rejected("no"), "uncertain", True),
    Arrow("rejected in doubt, at least once", in_doubt(), NO_KEYS_AT_LEAST_ONCE, Rejected("no"), "uncertain", True),
    Arrow("conclusively rejected in doubt", in_doubt(), KEYS, Rejected("no", conclusive=True), "failed"),
    Arrow("conclusively, forever", in_doubt(), FOREVER_KEYS, Rejected("no", conclusive=True), "failed"),
    Arrow("key conflict at first", fresh(), KEYS, KeyConflict("other"), "uncertain", True),
    Arrow("key conflict in doubt", in_doubt(), KEYS, KeyConflict("other"), "uncertain", True),
    Arrow("deferred at first", fresh(), KEYS, Deferred("busy"), "retry", False),
    Arrow("deferred in doubt", in_doubt(), KEYS, Deferred("busy"), "retry", True),
    Arrow("deferred, without keys", fresh(), NO_KEYS, Deferred("busy"), "retry", False),
    Arrow("deferred, at least once", fresh(), NO_KEYS_AT_LEAST_ONCE, Deferred("busy"), "retry", False),
    Arrow("in progress at first", fresh(), KEYS, InProgress(), "retry", True),
    Arrow("in progress in doubt", in_doubt(), KEYS, InProgress(), "retry", True),
    Arrow("unknown at first", fresh(), KEYS, Unknown("reset"), "retry", True),
    Arrow("unknown in doubt", in_doubt(), KEYS, Unknown("reset"), "retry", True),
    Arrow("unknown, forever", fresh(), FOREVER_KEYS, Unknown("reset"), "retry", True),
    Arrow("unknown, without keys", fresh(), NO_KEYS, Unknown("reset"), "uncertain", True),
    Arrow("unknown, at least once", fresh(), NO_KEYS_AT_LEAST_ONCE, Unknown("reset"), "retry", True),
    Arrow("unknown past the window", in_doubt(NOW - WINDOW), KEYS, Unknown("reset"), "uncertain", True),
    Arrow("finally unknown", fresh(), KEYS, Unknown("500", final=True), "uncertain", True),
    Arrow("finally unknown in doubt", in_doubt(), KEYS, Unknown("500", final=True), "uncertain", True),
    Arrow("finally unknown, forever", fresh(), FOREVER_KEYS, Unknown("500", final=True), "uncertain", True),
    Arrow("finally, at least once", fresh(), NO_KEYS_AT_LEAST_ONCE, Unknown("500", final=True), "uncertain", True),
]


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.name)
def test_every_arrow_of_the_diagram_leads_where_it_is_drawn(arrow: Arrow) -> None:
    change = after(arrow.given, arrow.answer, arrow.memory)

    assert state_of(change) == arrow.state
    assert getattr(change, "maybe_sent", None) == arrow.doubt


# --- what is kept of an answer


def test_a_delivery_keeps_what_the_service_answered() -> None:
    change = after(fresh(), Delivered({"id": "re_1"}))

    assert change == Settle("delivered", attempts=1, result={"id": "re_1"})


def test_a_rejection_keeps_its_reason_and_what_the_service_answered() -> None:
    change = after(fresh(), Rejected("card_declined", result={"code": "card_declined"}))

    assert change == Settle("failed", attempts=1, result={"code": "card_declined"}, reason="card_declined")


def test_an_uncertain_rejection_has_the_answer_and_why_it_proves_nothing() -> None:
    change = after(in_doubt(), Rejected("no such charge"))

    assert isinstance(change, MarkUncertain)
    assert change.reason == "no such charge; but an earlier attempt may have been executed"


@pytest.mark.parametrize(
    "outcome",
    [Delivered(), Rejected("no"), KeyConflict("other"), InProgress(), Unknown("reset"), Unknown("500", final=True)],
    ids=lambda outcome: type(outcome).__name__,
)
def test_what_may_have_reached_the_service_counts_as_an_attempt(outcome: Outcome) -> None:
    change = after(fresh(attempts=3), outcome)

    assert getattr(change, "attempts", None) == 4


# --- doubt: when it begins, what keeps it, what ends it


@pytest.mark.parametrize(
    "outcome",
    [InProgress(), Unknown("reset"), Unknown("500", final=True), KeyConflict("other")],
    ids=["in progress", "unknown", "finally unknown", "key conflict"],
)
def test_doubt_begins_with_the_start_of_the_lease_under_which_it_arose(outcome: Outcome) -> None:
    """Not with the answer: the service may have seen the key at any time since then."""
    change = after(fresh(), outcome)

    assert isinstance(change, Retry | MarkUncertain)
    assert change.in_doubt_since == LEASED_AT


@pytest.mark.parametrize(
    "outcome",
    [
        InProgress(),
        Unknown("reset"),
        Unknown("500", final=True),
        KeyConflict("other"),
        Deferred("busy"),
        Rejected("no"),
    ],
    ids=["in progress", "unknown", "finally unknown", "key conflict", "deferred", "rejected"],
)
def test_doubt_stays_with_the_first_attempt_in_doubt_however_many_follow(outcome: Outcome) -> None:
    first = NOW - HOUR

    change = after(in_doubt(first), outcome)

    assert isinstance(change, Retry | MarkUncertain)
    assert change.maybe_sent
    assert change.in_doubt_since == first


def test_deferred_counts_no_attempt_and_begins_no_doubt() -> None:
    change = after(fresh(attempts=3), Deferred("connection refused"), jitter=0)

    assert change == Retry(timedelta(0), "connection refused", attempts=3, maybe_sent=False, in_doubt_since=None)


def test_deferred_never_clears_an_earlier_doubt() -> None:
    first = NOW - HOUR

    change = after(in_doubt(first, attempts=3), Deferred("connection refused"), jitter=0)

    assert change == Retry(timedelta(0), "connection refused", attempts=3, maybe_sent=True, in_doubt_since=first)


@pytest.mark.parametrize(
    "outcome", [Deferred("busy"), InProgress(), Unknown("reset")], ids=["deferred", "409", "unknown"]
)
def test_in_doubt_there_is_no_retry_from_the_last_safe_moment_on(outcome: Outcome) -> None:
    first = NOW - (WINDOW - TIMEOUT - MARGIN)

    assert state_of(after(in_doubt(first + INSTANT), outcome, jitter=0)) == "retry"
    assert state_of(after(in_doubt(first), outcome, jitter=0)) == "uncertain"


def test_a_doubt_past_the_window_while_its_process_slept_is_uncertain() -> None:
    change = after(fresh(leased_at=NOW - WINDOW), Unknown("reset"))

    assert isinstance(change, MarkUncertain)
    assert change.in_doubt_since == NOW - WINDOW


@pytest.mark.parametrize(
    ("since", "state"),
    [
        (NOW - (WINDOW - MARGIN) + INSTANT, "failed"),
        (NOW - (WINDOW - MARGIN), "uncertain"),
        (NOW - 2 * WINDOW, "uncertain"),
    ],
    ids=["just inside", "at its end", "long past"],
)
def test_a_conclusive_rejection_ends_doubt_while_the_service_remembers(since: datetime, state: str) -> None:
    """Past the window it may be the first answer that the service still knows of, not the first that there was."""
    change = after(in_doubt(since), Rejected("declined", conclusive=True))

    assert state_of(change) == state


def test_a_service_without_keys_cannot_reject_conclusively() -> None:
    """It stores no answer under a key: its rejection says nothing of an earlier attempt, whatever the adapter claims."""
    change = after(in_doubt(), Rejected("declined", conclusive=True), NO_KEYS_AT_LEAST_ONCE)

    assert state_of(change) == "uncertain"


@EVERY_SERVICE
@pytest.mark.parametrize("entry", [fresh(), in_doubt()], ids=["at first", "in doubt"])
def test_a_key_conflict_is_never_failed_and_never_sent_again(entry: ClaimedEntry, memory: Memory) -> None:
    """An earlier request under this key has reached the service: something may have happened."""
    change = after(entry, KeyConflict("other parameters"), memory)

    assert isinstance(change, MarkUncertain)
    assert change.maybe_sent


@EVERY_SERVICE
def test_in_progress_is_not_success(memory: Memory) -> None:
    change = after(fresh(), InProgress(), memory)

    assert isinstance(change, Retry)
    assert change.maybe_sent


# --- limits: of attempts, of age


@pytest.mark.parametrize("outcome", [InProgress(), Unknown("reset")], ids=["in progress", "unknown"])
def test_the_last_allowed_attempt_without_an_answer_is_uncertain(outcome: Outcome) -> None:
    memory = Memory(window=WINDOW, max_attempts=4)

    last_but_one = after(in_doubt(attempts=2), outcome, memory)
    last = after(in_doubt(attempts=3), outcome, memory)

    assert state_of(last_but_one) == "retry"
    assert state_of(last) == "uncertain"


def test_a_single_allowed_attempt_without_an_answer_is_uncertain() -> None:
    change = after(fresh(), Unknown("reset"), Memory(window=WINDOW, max_attempts=1))

    assert state_of(change) == "uncertain"


def test_deferred_does_not_use_up_the_allowed_attempts() -> None:
    change = after(fresh(deliveries=100), Deferred("busy"), Memory(window=WINDOW, max_attempts=1))

    assert state_of(change) == "retry"


@pytest.mark.parametrize(
    ("entry", "outcome", "state"),
    [
        (fresh(), Deferred("busy"), "failed"),
        (fresh(), Unknown("reset"), "uncertain"),
        (fresh(), InProgress(), "uncertain"),
        (in_doubt(), Deferred("busy"), "uncertain"),
        (in_doubt(), Unknown("reset"), "uncertain"),
    ],
    ids=["deferred", "unknown", "in progress", "deferred in doubt", "unknown in doubt"],
)
def test_past_its_age_an_entry_fails_if_never_sent_else_is_uncertain(
    entry: ClaimedEntry, outcome: Outcome, state: str
) -> None:
    just_inside = after(entry._replace(first_leased_at=NOW - KEYS.max_age + INSTANT), outcome, KEYS)
    at_the_limit = after(entry._replace(first_leased_at=NOW - KEYS.max_age), outcome, KEYS)

    assert state_of(just_inside) == "retry"
    assert state_of(at_the_limit) == state


def test_the_age_counts_from_the_first_due_time_not_from_the_queue() -> None:
    change = after(fresh(first_leased_at=NOW - KEYS.max_age, queued_at=NOW), Deferred("busy"))

    assert state_of(change) == "failed"


@EVERY_SERVICE
def test_the_first_attempt_is_always_allowed_however_old_the_entry(memory: Memory) -> None:
    """Dispatchers that were down for longer than `max_age` must not fail what they never tried."""
    entry = fresh(first_leased_at=NOW - 10 * memory.max_age)

    assert admit(entry, memory, NOW) is None


@EVERY_SERVICE_WITH_KEYS
def test_an_entry_that_two_senders_crashed_with_waits_for_its_own_time(memory: Memory) -> None:
    """It may be what ends them; those that were claimed with it are to come apart."""
    once, twice = in_doubt(deliveries=2), in_doubt(deliveries=3, attempts=2)

    assert admit(once, memory, NOW, 0.5) is None
    assert admit(twice, memory, NOW, 0.5) == Retry(
        2 * SECOND, "2 consecutive senders crashed while sending it", 2, True, twice.in_doubt_since
    )


@pytest.mark.parametrize(
    ("deliveries", "outcome"),
    [
        (9, read_outcome(write_outcome("busy", deliveries=8))),
        (9, read_outcome(write_outcome("busy", deliveries=7))),
        (9, read_outcome(write_outcome("written by an earlier release"))),
    ],
)
def test_a_sender_that_set_the_entry_to_wait_since_has_not_crashed(deliveries: int, outcome: StoredOutcome) -> None:
    assert admit(in_doubt(deliveries=deliveries, outcome=outcome), KEYS, NOW) is None


def test_what_senders_crash_with_is_ended_by_attempts_and_window_alone() -> None:
    old = in_doubt(deliveries=3, attempts=2, first_leased_at=NOW - 9 * KEYS.max_age)
    late = in_doubt(NOW - WINDOW, deliveries=3, attempts=2)

    assert state_of(admit(old, KEYS, NOW)) == "retry"
    assert state_of(admit(late, KEYS, NOW)) == "uncertain"
    assert state_of(admit(old._replace(attempts=KEYS.max_attempts), KEYS, NOW)) == "uncertain"


def test_a_success_counts_however_late_it_comes() -> None:
    change = after(in_doubt(NOW - 9 * WINDOW, attempts=99, first_leased_at=NOW - 9 * KEYS.max_age), Delivered())

    assert state_of(change) == "delivered"


def test_a_rejection_at_first_counts_however_late_it_comes() -> None:
    change = after(fresh(first_leased_at=NOW - 9 * KEYS.max_age, leased_at=NOW - 9 * WINDOW), Rejected("no"))

    assert state_of(change) == "failed"


def test_an_age_without_practical_limit_is_no_error() -> None:
    change = after(fresh(), Deferred("busy"), Memory(window=WINDOW, max_age=timedelta.max))

    assert state_of(change) == "retry"


def test_a_window_without_practical_limit_is_no_error() -> None:
    memory = Memory(window=timedelta.max)

    change = after(fresh(), Unknown("reset"), memory)

    assert state_of(change) == "retry"
    assert admit(in_doubt(), memory, NOW) is None


# --- cancelled, and a restore


@pytest.mark.parametrize(("cancelled_at", "in_doubt_now"), [(NOW - 2 * HOUR, False), (NOW - HOUR / 2, True)])
def test_a_cancellation_since_the_lost_records_is_in_doubt(cancelled_at: datetime, in_doubt_now: bool) -> None:
    """The operator cancelled what seemed never sent. `outbox resume --after-restore` has doubted it since before that.

    A process that does not serve the entry leaves it for one that does.
    """
    known = Known(state="cancelled", reason="changed their mind", decided_at=cancelled_at)
    entry = in_doubt(since=NOW - HOUR, outcome=StoredOutcome(known=known))

    assert isinstance(conclude(entry, known, KEYS), MarkUncertain if in_doubt_now else Settle)
    assert isinstance(leave(entry, "no adapter serves it"), Release if in_doubt_now else Settle)


# --- admit: which claimed entry is sent, and which is ended instead, by its window, its attempts and its doubt.


@EVERY_SERVICE
def test_what_was_never_possibly_sent_is_sent(memory: Memory) -> None:
    assert admit(fresh(), memory, NOW) is None


@EVERY_SERVICE_WITH_KEYS
def test_what_may_have_been_sent_is_sent_again_inside_the_window(memory: Memory) -> None:
    assert admit(in_doubt(), memory, NOW) is None


@pytest.mark.parametrize(
    ("since", "sent"),
    [
        (NOW - (WINDOW - TIMEOUT - MARGIN) + INSTANT, True),
        (NOW - (WINDOW - TIMEOUT - MARGIN), False),
        (NOW - WINDOW, False),
        (NOW - 99 * WINDOW, False),
    ],
    ids=["just inside", "at its end", "the window itself", "long past"],
)
def test_the_window_ends_a_timeout_and_a_margin_early(since: datetime, sent: bool) -> None:
    change = admit(in_doubt(since), KEYS, NOW)

    assert (change is None) == sent
    if change is not None:
        assert isinstance(change, MarkUncertain)
        assert (change.attempts, change.maybe_sent, change.in_doubt_since) == (1, True, since)


def test_a_window_of_forever_never_passes() -> None:
    assert admit(in_doubt(datetime(1970, 1, 1, tzinfo=UTC)), FOREVER_KEYS, NOW) is None


def test_without_doubt_there_is_no_window() -> None:
    assert admit(fresh(first_leased_at=NOW - 99 * WINDOW, leased_at=NOW - 99 * WINDOW), KEYS, NOW) is None


def test_a_crashed_sender_leaves_an_entry_without_keys_uncertain() -> None:
    change = admit(in_doubt(), NO_KEYS, NOW)

    assert isinstance(change, MarkUncertain)
    assert change == MarkUncertain(change.reason, attempts=1, maybe_sent=True, in_doubt_since=NOW - MINUTE)
    assert change.reason == "its sender crashed, and the service keeps no keys"


def test_a_crashed_sender_is_followed_by_another_under_at_least_once() -> None:
    assert admit(in_doubt(NOW - 99 * DAY), NO_KEYS_AT_LEAST_ONCE, NOW) is None


@EVERY_SERVICE
def test_expired_leases_use_up_the_allowed_attempts(memory: Memory) -> None:
    """A payload that kills its process ends too: each lease that ran out counted as an attempt."""
    change = admit(in_doubt(attempts=memory.max_attempts), memory, NOW)

    assert isinstance(change, MarkUncertain)
    assert change.attempts == memory.max_attempts


def test_sent_too_often_without_doubt_is_failed() -> None:
    """When `max_attempts` was lowered: nothing of it can have happened."""
    change = admit(fresh(attempts=3), Memory(window=WINDOW, max_attempts=3), NOW)

    assert change == Settle("failed", attempts=3, reason="no answer in 3 attempts")


# --- the window by itself


def test_the_window_allows_for_the_time_of_a_send_and_for_the_clocks() -> None:
    assert last_safe_send(NOW, KEYS) == NOW + WINDOW - TIMEOUT - MARGIN
    assert last_safe_send(NOW, FOREVER_KEYS) is None
    assert last_safe_send(NOW, NO_KEYS) is None
    assert last_safe_send(None, KEYS) is None


def test_an_answer_may_come_a_timeout_after_the_last_safe_send() -> None:
    assert remembered(NOW - (WINDOW - MARGIN) + INSTANT, KEYS, NOW)
    assert not remembered(NOW - (WINDOW - MARGIN), KEYS, NOW)
    assert remembered(datetime(1970, 1, 1, tzinfo=UTC), FOREVER_KEYS, NOW)
