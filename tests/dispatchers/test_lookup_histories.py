"""The random histories of `test_decide_histories`, of entries that can be looked for: no end is false, and nothing happens twice.

The simulated service shows what was executed under the present key, and nothing of what is still under way: so a request that
its frozen sender lets go after every deadline, or at which the service works for longer than that, is not seen. A history in
which it is executed after all is no broken promise; one in which any other request outlasts the wait for quiet is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from test_decide_histories import (
    DONE_AND_LOST,
    LOST,
    QUIESCENCE,
    REFUSED,
    SECOND,
    WINDOW,
    BrokenPromise,
    History,
    Send,
    Turn,
    World,
    goes_on,
    histories,
    search,
)
from verification.mutations_decide import moving, rule

from dispatchers import decide, decide_lookup
from dispatchers.delivery import Absent, CannotTell, Finding, Found, Outcome
from dispatchers.transitions import AwaitLookup, ClaimedEntry, LookupState, SendAgain, Settle, Transition, lookup_of

CLAIMS_MAX = 200  # with these limits no history needs as many


class LookedWorld(World):
    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.memory = replace(self.memory, can_look_up=True, fencing_delay=QUIESCENCE)
        self.ends_of: dict[int, Any] = {}  # when a send has been executed, if it ever is
        self.turns_of: dict[int, Turn] = {}
        self.unseen: set[int] = set()  # sends still under way at the last look
        self.outlasting: set[int] = set()  # those of them by which absence was proved
        self.proved: set[int] = set()  # sends of which absence was proved
        self.sent_again_by_a_person = False

    def _try(self, entry: ClaimedEntry, turn: Turn) -> None:
        looks = lookup_of(entry.outcome)
        if looks is None:
            super()._try(entry, turn)
            return
        refused = decide_lookup.admit_lookup(entry, looks, self.memory, entry.leased_at, "")
        if refused is not None:
            self.settle(entry, refused, turn)
        elif turn.fate not in ("vanishes before sending", "vanishes after sending"):
            finding = self._finding(entry, turn)
            self.after(turn.back * SECOND, partial(self._found, entry, looks, finding, turn))

    def _finding(self, entry: ClaimedEntry, turn: Turn) -> Finding:
        if turn.fate in ("cannot connect", "request is lost") or turn.service in ("is down", "is busy"):
            return CannotTell("out of reach")
        self.unseen = {id(send) for send in self.sends if self.ends_of.get(id(send), self.now) > self.now}
        return Found() if self.effects_of[entry.key_epoch] else Absent()

    def _found(self, entry: ClaimedEntry, looks: LookupState, finding: Finding, turn: Turn) -> None:
        self.settle(entry, decide_lookup.judge(entry, looks, finding, self.memory, self.now, turn.jitter), turn)

    def settle(self, entry: ClaimedEntry, change: Transition, turn: Turn) -> None:
        by_absence = (isinstance(change, SendAgain) and change.absent) or (
            isinstance(change, Settle) and change.looked and change.state == "failed"
        )
        if by_absence and self._is_held_by(entry):
            self._absence_is_proved()
        if isinstance(change, SendAgain) and not change.absent:
            self.sent_again_by_a_person = True
        super().settle(entry, change, turn)

    def _absence_is_proved(self) -> None:
        for send in self.sends:
            self.proved.add(id(send))
            if id(send) in self.unseen:
                turn = self.turns_of[id(send)]
                if (turn.frozen + turn.working) * SECOND <= QUIESCENCE:
                    raise BrokenPromise("absence was taken for proved while a sender was at work")
                self.outlasting.add(id(send))

    def _send(self, entry: ClaimedEntry, turn: Turn) -> None:
        super()._send(entry, turn)
        send = self.sends[-1]
        self.turns_of[id(send)] = turn
        if turn.fate != "request is lost":
            self.ends_of[id(send)] = self.now + (turn.frozen + turn.transit + turn.working) * SECOND

    def _execute(self, kind: Any, found: Any, send: Send, reply: Callable[[Outcome], None]) -> None:
        send.too_late = send.too_late or id(send) in self.outlasting
        super()._execute(kind, found, send, reply)

    def _check_that_it_is_true(self, change: Transition, entry: ClaimedEntry) -> None:
        if not self.outlasting:
            super()._check_that_it_is_true(change, entry)

    def _check_that_sending_is_safe(self, entry: ClaimedEntry) -> None:
        if lookup_of(entry.outcome) is not None:
            raise BrokenPromise("sent without the look that was due")
        if sum(not send.harmless for send in self.sends[self.sends_before :]) >= self.memory.attempts_max:
            raise BrokenPromise("sent more often than allowed")
        before = [send.harmless for send in self.sends]
        for send in self.sends:
            send.harmless = send.harmless or id(send) in self.proved
        super()._check_that_sending_is_safe(entry)
        for send, harmless in zip(self.sends, before, strict=True):
            send.harmless = harmless

    def _promises_one_effect(self, epoch: int) -> bool:
        return not any(send.too_late or id(send) in self.outlasting for send in self.sends if send.epoch == epoch)

    def check_the_end(self) -> None:
        super().check_the_end()
        excused = self.sent_again_by_a_person or any(send.too_late for send in self.sends) or self.outlasting
        if self.effects > 1 and not excused:
            raise BrokenPromise(f"it happened {self.effects} times")


def live_through(history: History) -> LookedWorld:
    """Play `history`, then let the faults stop, and check every promise. Raises `BrokenPromise`."""
    world = LookedWorld(history)
    words = iter(history.words)
    for turn in history.turns:
        world.wait_until_claimable()
        if not goes_on(world, words):
            break
        world.run_until(world.now + turn.late * SECOND)
        world.wait_until_claimable()
        if not world.ended:
            world.claim(turn)
    for _ in range(CLAIMS_MAX):
        world.wait_until_claimable()
        if not goes_on(world, words):
            break
        world.wait_until_claimable()
        if not world.ended:
            world.claim(Turn())
    else:
        raise BrokenPromise("the faults stopped, and it does not end")
    world.run_out()
    world.check_the_end()
    return world


def breaks_a_promise(history: History) -> bool:
    try:
        live_through(history)
    except BrokenPromise:
        return True
    return False


@settings(max_examples=300, deadline=None)
@given(histories())
def test_no_history_with_looks_breaks_a_promise(history: History) -> None:
    live_through(history)


def test_no_history_of_a_long_search_breaks_a_promise() -> None:
    assert search(breaks_a_promise, seed=4, histories_max=15_000) is None


def end_of(*turns: Turn, **declared: Any) -> tuple[str, int, int]:
    defaults: dict[str, Any] = {"window": WINDOW * SECOND, "at_least_once": False, "attempts_max": 5, "age_max": 3000}
    world = live_through(History(turns=turns, **{**defaults, **declared}))
    return world.state, world.effects, world.key_epoch


AWAY = Turn(fate="cannot connect")
KEYLESS: dict[str, Any] = {"window": None}


@pytest.mark.parametrize(
    ("turns", "declared", "end"),
    [
        ([DONE_AND_LOST, Turn(late=WINDOW)], {}, ("delivered", 1, 0)),
        ([LOST, Turn(late=WINDOW)], {}, ("delivered", 1, 1)),
        ([LOST], KEYLESS, ("delivered", 1, 0)),
        ([DONE_AND_LOST], KEYLESS, ("delivered", 1, 0)),
        ([DONE_AND_LOST], {**KEYLESS, "at_least_once": True}, ("delivered", 1, 0)),
        ([LOST, *[AWAY] * 4], KEYLESS, ("delivered", 1, 0)),
        ([LOST, AWAY, Turn(late=4000), Turn(service="is down", late=4000)], KEYLESS, ("failed", 0, 0)),
        ([DONE_AND_LOST, REFUSED], {}, ("delivered", 1, 0)),
        ([LOST, REFUSED, Turn(), REFUSED], {}, ("failed", 0, 0)),
        ([Turn(service="breaks before")], {}, ("delivered", 1, 1)),
        ([Turn(service="breaks before")], {"attempts_max": 1}, ("failed", 0, 0)),
        ([Turn(service="breaks after")], {}, ("delivered", 1, 0)),
        ([LOST, Turn(fate="vanishes before sending"), Turn()], KEYLESS, ("delivered", 1, 0)),
    ],
)
def test_the_simulation_can_tell_what_really_happened(
    turns: list[Turn], declared: dict[str, Any], end: tuple[str, int, int]
) -> None:
    assert end_of(*turns, **declared) == end


# --- without a guard, a promise breaks: the search above can fail

judge = decide_lookup.judge


def judging(**changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, replacement in changed.items():
            monkeypatch.setattr(decide_lookup, name, replacement)

    return patch


def hasty(entry: ClaimedEntry, looks: LookupState, finding: Finding, *rest: Any) -> Transition:
    return judge(entry, looks._replace(quiet_at=entry.leased_at), finding, *rest)


def optimistic(entry: ClaimedEntry, looks: LookupState, finding: Finding, *rest: Any) -> Transition:
    return judge(entry, looks, Absent() if isinstance(finding, CannotTell) else finding, *rest)


def pessimistic(entry: ClaimedEntry, looks: LookupState, finding: Finding, *rest: Any) -> Transition:
    return judge(entry, looks, Absent() if isinstance(finding, Found) else finding, *rest)


def believing_every_key(entry: ClaimedEntry, *rest: Any) -> Transition:
    return judge(entry._replace(key_epoch=0), *rest)


def looking_at_once(entry: ClaimedEntry, change: Transition, memory: Any, now: Any) -> Transition:
    """No time is left for the senders that may still be at work."""
    sought = look_first(entry, change, memory, now)
    return (
        replace(sought, delay=0 * SECOND, looks=sought.looks._replace(quiet_at=now))
        if isinstance(sought, AwaitLookup)
        else sought
    )


look_first = decide._look_first

GUARDS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a look counts at once": rule(_look_first=looking_at_once),
    "who cannot tell is taken for absence": judging(judge=optimistic),
    "what is found is taken for absence": judging(judge=pessimistic),
    "absence under the present key is taken for absence under all": judging(judge=believing_every_key),
    "absence has no limit": judging(_limit=lambda entry, attempts, memory, now: None),
    "at least once sends again without a look": rule(
        _is_for_one_attempt=lambda memory: memory.window is None and not memory.at_least_once
    ),
    "that a look is due is not put on record": moving(AwaitLookup, outcome=None),
    "proof of absence is not put on record": moving(SendAgain, outcome=None),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_the_same_search_finds_a_broken_promise(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    GUARDS[guard](monkeypatch)

    assert search(breaks_a_promise, histories_max=20_000) is not None
