"""The rules of `decide` and `moves` as mutants, each without one guard: a search for broken invariants must find each of them."""

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from dispatchers import decide as rules
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.store.queue import queue_update
from dispatchers.stored_outcome import Known
from dispatchers.time_limits import FOREVER, Memory
from dispatchers.transitions import ClaimedEntry, Retry, RetryCallback, SendAgain, Settle, Transition

admit, decide, plan = rules.admit, rules.decide, rules.plan
NO_DOUBT = {"maybe_sent": False, "in_doubt_since": None}


def rule(**changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A way to replace functions of `dispatchers.decide`, in each module that has them."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith("dispatchers.")]
        for name, replacement in changed.items():
            original = getattr(rules, name)
            for module in modules:
                if vars(module).get(name) is original:
                    monkeypatch.setattr(module, name, replacement)

    return patch


def deciding(
    of: type[Outcome],
    *,
    entry: dict[str, Any] | None = None,
    outcome: Callable[[Any], Outcome] = lambda outcome: outcome,
    change: Callable[[Transition], Transition] = lambda change: change,
) -> Callable[[pytest.MonkeyPatch], None]:
    """`decide` as it is, but for outcomes of one kind with another entry, outcome or conclusion."""

    def mutant(given: ClaimedEntry, answer: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
        if not isinstance(answer, of):
            return decide(given, answer, memory, now, jitter)
        return change(decide(given._replace(**(entry or {})), outcome(answer), memory, now, jitter))

    return rule(decide=mutant)


def with_memory(**changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Both rules as they are, but believing something else of the service."""
    return rule(
        admit=lambda entry, memory, now, jitter=1.0: admit(entry, replace(memory, **changed), now, jitter),
        decide=lambda entry, outcome, memory, now, jitter: decide(
            entry, outcome, replace(memory, **changed), now, jitter
        ),
    )


def keyless_is_retried(
    entry: ClaimedEntry, outcome: Outcome, memory: Memory, now: datetime, jitter: float
) -> Transition:
    return decide(entry, outcome, replace(memory, at_least_once=True), now, jitter)


def forgotten(change: Transition) -> Transition:
    return replace(change, maybe_sent=False, in_doubt_since=None) if isinstance(change, Retry) else change


def waiting_as_asked(entry: ClaimedEntry, outcome: Outcome, memory: Memory, now: datetime, jitter: float) -> Transition:
    change = decide(entry, outcome, memory, now, jitter)
    asked = getattr(outcome, "after", None)
    return replace(change, delay=asked) if isinstance(change, Retry) and asked else change


def moving(of: type[Transition], **changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The row's new values as they are, but for transitions of one kind with others."""
    original = queue_update.queue_update

    def mutant(entry: ClaimedEntry, change: Any) -> queue_update.QueueUpdate:
        values = original(entry, change)
        return values._replace(**changed) if isinstance(change, of) else values

    return lambda monkeypatch: monkeypatch.setattr(queue_update, "queue_update", mutant)


def sending_again_without_doubt(entry: ClaimedEntry, known: Known, memory: Memory) -> SendAgain:
    return SendAgain(entry.key_epoch, None, memory.fencing_delay, "sent again")


RULE_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the window is not heeded": rule(last_safe_send=lambda since, memory: None),
    "the window makes no allowance for the send and the clocks": rule(
        last_safe_send=lambda since, memory: (
            since + memory.window if since and isinstance(memory.window, timedelta) else None
        )
    ),
    "the window is heeded before waiting but not before sending": rule(
        plan=lambda entry, memory, *rest, **settings: plan(
            entry, replace(memory, window=memory.window and FOREVER), *rest, **settings
        )
    ),
    "the window counts from the last attempt in doubt": rule(_doubt_began=lambda entry: entry.leased_at),
    "unknown leaves no doubt": deciding(Unknown, change=forgotten),
    "in progress leaves no doubt": deciding(InProgress, change=forgotten),
    "deferred clears doubt": deciding(Deferred, entry=NO_DOUBT),
    "a rejection clears doubt": deciding(Rejected, entry=NO_DOUBT),
    "a conclusive rejection clears doubt past the window": rule(remembered=lambda since, memory, now: True),
    "every rejection is taken for conclusive": deciding(
        Rejected, outcome=lambda outcome: replace(outcome, conclusive=True)
    ),
    "in progress is taken for success": deciding(InProgress, outcome=lambda outcome: Delivered()),
    "a key conflict is taken for failure": deciding(
        KeyConflict, entry=NO_DOUBT, outcome=lambda outcome: Rejected(outcome.reason)
    ),
    "unknown is taken for failure": deciding(Unknown, entry=NO_DOUBT, outcome=lambda outcome: Rejected(outcome.reason)),
    "unknown is taken for deferred": deciding(Unknown, outcome=lambda outcome: Deferred(outcome.reason)),
    "unknown is retried without keys": rule(
        decide=keyless_is_retried, admit=lambda entry, memory, now, jitter=1.0: None
    ),
    "without keys an expired lease leads to another send": rule(
        admit=lambda entry, memory, now, jitter=1.0: admit(entry, replace(memory, at_least_once=True), now, jitter)
    ),
    "a limit in doubt is a failure": rule(_end=lambda entry, attempts, reason: Settle("failed", attempts)),
    "attempts have no limit": with_memory(max_attempts=10**6),
    "age has no limit": with_memory(max_age=timedelta(days=10**5)),
    "a retry-after is honoured beyond the age": rule(decide=waiting_as_asked),
    "a conclusive rejection speaks for earlier keys": deciding(Rejected, entry={"key_epoch": 0}),
    "send again clears doubt": moving(SendAgain, maybe_sent=False),
    "send again forgets when the key was first sent": rule(_send_again=sending_again_without_doubt),
    "uncertain with a callback due forgets since when": moving(RetryCallback, in_doubt_since=None),
    "what is known is not put on record when a callback fails": moving(RetryCallback, outcome=None),
}
