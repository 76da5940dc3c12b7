"""Random histories of one entry: crashes, pauses, lost answers, a service that forgets. No promise is broken in any.

A history is simulated on a virtual clock. Hidden from `decide`, the simulation knows the truth: what was really executed,
when, and which requests are still under way. With any one guard of `decide` removed, the same search finds a broken promise.

What the simulation grants, because the promises do: the window is configured truthfully, a request arrives within its
timeout and the margin of leaving, and the service answers honestly. A process may freeze between its last check and the
call until the service has forgotten the key. That one request is beyond what anyone here can prevent: it may repeat the
effect, or bring it about after `failed`. What is concluded from its answer must be true even so.

Callbacks may fail, and people decide about uncertain entries. What a person says is true: "did not happen" only once nothing
is under way any more. "Send again" may repeat the effect where the key changes, once for each key, and nowhere else.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verification.mutations_decide import PLANTED_RULES

from dispatchers import decide as rules
from dispatchers.delivery import (
    FOREVER,
    Deferred,
    Delivered,
    InProgress,
    KeyConflict,
    Memory,
    Outcome,
    Rejected,
    Unknown,
    Window,
)
from dispatchers.store import queue_update
from dispatchers.transitions import (
    SEND_AGAIN,
    ClaimedEntry,
    Known,
    MarkUncertain,
    Release,
    RetryCallback,
    SendAgain,
    Settle,
    Transition,
    known_of,
    outcome_on_record,
)

SECOND = timedelta(seconds=1)
INSTANT = timedelta(microseconds=1)
START = datetime(2026, 1, 31, tzinfo=UTC)
NEVER = datetime.max.replace(tzinfo=UTC)

LEASE, TIMEOUT, MARGIN, WINDOW = 60, 10, 5, 200  # seconds; check_adapter would take them
TRANSIT_MAX = TIMEOUT + MARGIN
QUIESCENCE = (LEASE + MARGIN) * SECOND

BLANK = ClaimedEntry(**dict.fromkeys(ClaimedEntry._fields))  # type: ignore[arg-type]


class BrokenPromise(AssertionError):
    """What must never be seen."""


# --- one history: what chance decides

Kind = Literal[
    "does it",
    "declines",  # having looked at the key: with keys, a stored answer
    "refuses unseen",  # before looking at the key: 400, 401, 404
    "is busy",  # 429
    "is down",  # refused at the door: nothing was executed, and nobody can tell
    "breaks before",  # a 500 from the middle of the work, stored under the key
    "breaks after",
    "finds another request",  # the key is known, but not with these parameters
]
OperatorDecision = Literal["the truth", "send again"]
Fate = Literal["answers", "vanishes before sending", "vanishes after sending", "cannot connect", "request is lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One claim, and what becomes of it. All durations in seconds.

    late: claimed so long after it could have been. queued: between the claim and the last check. frozen: between that
    check and the call. transit: until the request arrives. working: until the service is done. back: the answer's way.
    callback_fails: what is known at the end of this turn cannot settle yet.
    """

    late: int = 0
    fate: Fate = "answers"
    service: Kind = "does it"
    queued: int = 0
    frozen: int = 0
    transit: int = 0
    working: int = 0
    back: int = 0
    retry_after: int | None = None
    jitter: float = 0.0
    callback_fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """words: what people say whenever it is uncertain, each so many seconds later."""

    window: Window
    at_least_once: bool
    attempts_max: int
    age_max: int
    turns: tuple[Turn, ...]
    words: tuple[tuple[OperatorDecision, int], ...] = ()

    @property
    def memory(self) -> Memory:
        return Memory(
            window=self.window,
            timeout=TIMEOUT * SECOND,
            margin=MARGIN * SECOND,
            at_least_once=self.at_least_once,
            attempts_max=self.attempts_max,
            age_max=self.age_max * SECOND,
        )


FATES: list[Fate] = [
    "answers",
    "answers",
    "answers",
    "answers",
    "vanishes before sending",
    "vanishes after sending",
    "vanishes after sending",
    "cannot connect",
    "request is lost",
]
KINDS: list[Kind] = [
    "does it",
    "does it",
    "does it",
    "declines",
    "declines",
    "refuses unseen",
    "refuses unseen",
    "is busy",
    "is down",
    "breaks before",
    "breaks after",
    "finds another request",
]
DELAYS: list[dict[str, int]] = [
    {},
    {},
    {},
    {"queued": 20},
    {"queued": LEASE - 1},
    {"frozen": TIMEOUT},
    {"frozen": 2 * LEASE},
    {"frozen": 2 * WINDOW},
    {"frozen": 2 * WINDOW, "transit": 2},
    {"transit": 5},
    {"transit": TRANSIT_MAX},
    {"working": TIMEOUT + 5},
    {"working": 2 * LEASE, "transit": 3},
    {"working": 2 * WINDOW},
    {"back": 5},
    {"back": TIMEOUT + 5},
]
LATE = [1, LEASE, WINDOW // 2, WINDOW - TRANSIT_MAX - TIMEOUT, WINDOW - TRANSIT_MAX - 1, WINDOW - MARGIN, WINDOW + 9]


Choose = Callable[[Sequence[Any]], Any]


def some_turn(choose: Choose) -> Turn:
    return Turn(
        late=choose([0, 0, 0, 0, 0, *LATE]),
        fate=choose(FATES),
        service=choose(KINDS),
        retry_after=choose([None, None, None, -5, 0, 7, 90, WINDOW, 10**8]),
        jitter=choose([0.0, 0.5, 0.999]),
        callback_fails=choose([False, False, False, False, True]),
        **choose(DELAYS),
    )


def some_word(choose: Choose) -> tuple[OperatorDecision, int]:
    return choose(["the truth", "send again", "send again"]), choose([0, 0, *LATE])


def some_history(choose: Choose) -> History:
    return History(
        window=choose([WINDOW * SECOND, WINDOW * SECOND, WINDOW * SECOND, FOREVER, None]),
        at_least_once=choose([False, True]),
        attempts_max=choose([6, 5, 4, 3, 2, 1]),
        age_max=choose([3000, 400, 20]),
        turns=tuple(some_turn(choose) for _ in range(choose([1, 2, 3, 4, 5, 6]))),
        words=tuple(some_word(choose) for _ in range(choose([0, 0, 1, 2, 3]))),
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """For hypothesis, which makes the shortest of a history that breaks a promise."""
    return some_history(lambda options: draw(st.sampled_from(options)))


def search(condition: Callable[[History], bool], seed: int = 1, histories_max: int = 40_000) -> History | None:
    """The first of many histories that fulfils `condition`; the same ones each time. Quicker than hypothesis by far."""
    choose = Random(seed).choice
    histories = (some_history(choose) for _ in range(histories_max))
    return next(filter(condition, histories), None)


# --- the world: a clock, a service, one row of the queue


@dataclass(slots=True)
class Remembered:
    """What the service has under the entry's key. answer: None while it works."""

    arrived_at: datetime
    answer: Outcome | None = None


@dataclass(slots=True)
class Send:
    """A request that left, under the key of `epoch`. harmless: we learnt that it was certainly not executed.

    too_late: its process froze, and it arrived when the service may have forgotten the key.
    """

    leased_at: datetime
    epoch: int
    harmless: bool = False
    too_late: bool = False
    answered: bool = False


class World:
    def __init__(self, history: History) -> None:
        self.history = history
        self.memory = history.memory
        self.now = START
        self._events: list[tuple[datetime, int, Callable[[], None]]] = []
        self._scheduled = 0
        # The row.
        self.state = "pending"
        self.due_at = START
        self.lease: tuple[datetime, datetime, UUID] | None = None  # leased_at, lease_until, token
        self.deliveries = 0
        self.attempts = 0
        self.maybe_sent = False
        self.in_doubt_since: datetime | None = None
        self.first_leased_at: datetime | None = None
        self.key_epoch = 0
        self.outcome: str | None = None
        # The truth.
        self.effects_of: Counter[int] = Counter()  # by key epoch
        self.remembered: dict[int, Remembered] = {}
        self.sends: list[Send] = []
        self.sends_before = 0  # somebody said "send again"
        self.is_said_to_have_failed = False

    @property
    def effects(self) -> int:
        return self.effects_of.total()

    @property
    def ended(self) -> bool:
        """Whether it waits for nothing but a person's word, if for that."""
        return self.state in ("delivered", "failed") or (self.state == "uncertain" and self.due_at == NEVER)

    # --- time

    def after(self, delay: timedelta, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heappush(self._events, (self.now + delay, self._scheduled, action))

    def run_until(self, instant: datetime) -> None:
        while self._events and self._events[0][0] <= instant:
            self._step()
        self.now = max(self.now, instant)

    def wait_until_claimable(self) -> None:
        while not self.ended:
            claimable = max(self.due_at, self.lease[1] + INSTANT) if self.lease else self.due_at
            if claimable <= self.now:
                return
            if self._events and self._events[0][0] <= claimable:
                self._step()
            else:
                self.now = claimable

    def run_out(self) -> None:
        while self._events:
            self._step()

    @property
    def last_event_at(self) -> datetime:
        return max((instant for instant, *_ in self._events), default=self.now)

    def _step(self) -> None:
        instant, _, action = heappop(self._events)
        self.now = max(self.now, instant)
        action()

    # --- the dispatcher: claim, admit, send, settle

    def claim(self, turn: Turn) -> None:
        """As the store does: a lease that ran out leaves doubt, since that lease's start."""
        if self.lease is not None:
            self.attempts += 1
            self.maybe_sent = True
            self.in_doubt_since = self.in_doubt_since or self.lease[0]
        self.deliveries += 1
        self.state = "sending"
        self.first_leased_at = self.first_leased_at or self.now
        token = UUID(int=self._scheduled << 32 | self.deliveries)
        self.lease = (self.now, self.now + LEASE * SECOND, token)
        entry = BLANK._replace(
            first_leased_at=self.first_leased_at,
            queued_at=self.due_at,
            key_epoch=self.key_epoch,
            outcome=self.outcome,
            deliveries=self.deliveries,
            attempts=self.attempts,
            maybe_sent=self.maybe_sent,
            in_doubt_since=self.in_doubt_since,
            leased_at=self.now,
            lease_token=token,
        )
        known = known_of(entry.outcome)
        if known is not None:
            self._conclude(entry, known, turn)
        elif turn.queued:
            self.after(turn.queued * SECOND, partial(self._try, entry, turn))
        else:
            self._try(entry, turn)

    def _conclude(self, entry: ClaimedEntry, known: Known, turn: Turn) -> None:
        """As the dispatcher does with what is on record; nothing is sent."""
        if turn.fate != "vanishes before sending":
            self.settle(entry, rules.conclude(entry, known, self.memory, QUIESCENCE), turn)

    def _try(self, entry: ClaimedEntry, turn: Turn) -> None:
        if turn.fate == "vanishes before sending":
            return
        change = rules.admit(entry, self.memory, self.now)
        if change is None and self.now > entry.leased_at + (LEASE - MARGIN - TIMEOUT) * SECOND:
            change = Release("its lease was too short when its turn came")
        if change is not None:
            self.settle(entry, change, turn)
        elif turn.fate == "cannot connect":
            self._answered(entry, Deferred("connection refused", _seconds(turn.retry_after)), turn)
        else:
            self._send(entry, turn)

    def _send(self, entry: ClaimedEntry, turn: Turn) -> None:
        self._check_that_sending_is_safe(entry)
        send = Send(entry.leased_at, entry.key_epoch)
        self.sends.append(send)
        leaves = turn.frozen * SECOND
        if turn.fate != "request is lost":
            self.after(leaves + turn.transit * SECOND, partial(self._arrive, entry, turn, send))
        if turn.fate != "vanishes after sending":
            self.after(leaves + TIMEOUT * SECOND, partial(self._answer, entry, turn, send, Unknown("no answer")))

    def _answer(self, entry: ClaimedEntry, turn: Turn, send: Send, outcome: Outcome) -> None:
        """An answer, or the end of the timeout, whichever is first."""
        if not send.answered:
            send.answered = True
            send.harmless = isinstance(outcome, Deferred | Rejected)
            self._answered(entry, outcome, turn)

    def _answered(self, entry: ClaimedEntry, outcome: Outcome, turn: Turn) -> None:
        self.settle(entry, rules.decide(entry, outcome, self.memory, self.now, turn.jitter), turn)

    def settle(self, entry: ClaimedEntry, change: Transition, turn: Turn) -> None:
        """As the store does: under the token, except for late proof of success."""
        if turn.callback_fails and isinstance(change, Settle | MarkUncertain):
            change = rules.keep(entry, change, "its callback failed", turn.jitter)
        if not (self._is_held_by(entry) or self._is_late_proof(entry, change)):
            return
        self._check_that_it_is_true(change, entry)
        self.lease = None
        if isinstance(change, Settle):
            self.state, self.attempts = change.state, change.attempts
            return
        row = queue_update.queue_update(entry, change)
        self.state, self.attempts = row.state, row.attempts
        self.maybe_sent, self.in_doubt_since, self.key_epoch = row.maybe_sent, row.in_doubt_since, row.key_epoch
        self.deliveries -= row.uncounted
        self.outcome = row.outcome or self.outcome
        self.due_at = self.now + row.delay if row.delay is not None else NEVER
        if row.anew:
            self.first_leased_at = None
        if isinstance(change, SendAgain) and not change.absent:
            self.sends_before = len(self.sends)

    def _is_held_by(self, entry: ClaimedEntry) -> bool:
        return self.lease is not None and self.lease[2] == entry.lease_token

    def _is_late_proof(self, entry: ClaimedEntry, change: Transition) -> bool:
        end = change.end if isinstance(change, RetryCallback) else change
        is_proof = isinstance(end, Settle) and end.state == "delivered"
        return is_proof and entry.key_epoch == self.key_epoch and self.state in ("sending", "retry", "uncertain")

    def _check_that_it_is_true(self, change: Transition, entry: ClaimedEntry) -> None:
        end = change.end if isinstance(change, RetryCallback) else change
        if known_of(entry.outcome) is not None or not isinstance(end, Settle):
            return  # what is on record was true when it was put there
        if end.state == "delivered" and self.effects == 0:
            raise BrokenPromise("delivered, and nothing happened")
        if end.state == "failed" and self.effects > 0:
            raise BrokenPromise("failed, and it happened")
        self.is_said_to_have_failed = end.state == "failed"

    # --- a person

    def hear(self, word: OperatorDecision) -> None:
        """As `decisions.resolve` does. Who tells the truth has waited until nothing is under way."""
        state: Any = SEND_AGAIN
        if word == "the truth":
            self.run_out()
            state = "delivered" if self.effects else "failed"
        if not self.ended or self.state != "uncertain":
            return  # late proof was first
        stored = json.loads(self.outcome or "{}").get("stored", False)
        known = Known(state=state, reason="looked at it")
        self.outcome = outcome_on_record("looked at it", stored=stored, known=known)
        self.due_at = self.now
        self.is_said_to_have_failed = state == "failed"

    # --- the service

    def _arrive(self, entry: ClaimedEntry, turn: Turn, send: Send) -> None:
        window, epoch = self.memory.window, send.epoch
        if isinstance(window, timedelta):
            send.too_late = self.now >= self._first_in_doubt(epoch) + window
            if epoch in self.remembered and self.now >= self.remembered[epoch].arrived_at + window:
                del self.remembered[epoch]
        reply = partial(self._reply, entry, turn, send)
        after = _seconds(turn.retry_after)
        match turn.service:
            case "refuses unseen":
                reply(Rejected("400"))
            case "is busy":
                reply(Deferred("429", after))
            case "is down":
                reply(Unknown("503", after))
            case "finds another request" if epoch in self.remembered:
                reply(KeyConflict("other parameters"))
            case _ if epoch in self.remembered:
                reply(_replayed(self.remembered[epoch].answer, after))
            case kind:
                found = Remembered(self.now)
                if window is not None:
                    self.remembered[epoch] = found
                if turn.working:
                    self.after(turn.working * SECOND, partial(self._execute, kind, found, send, reply))
                else:
                    self._execute(kind, found, send, reply)

    def _execute(self, kind: Kind, found: Remembered, send: Send, reply: Callable[[Outcome], None]) -> None:
        if kind not in ("declines", "breaks before"):
            self.effects_of[send.epoch] += 1
            if self.is_said_to_have_failed and not send.too_late:
                raise BrokenPromise("failed, and it happened later")
        keeps_keys = self.memory.window is not None
        if kind == "declines":
            found.answer = Rejected("declined", conclusive=keeps_keys)
        elif kind in ("breaks before", "breaks after"):
            found.answer = Unknown("500")
        else:
            found.answer = Delivered()
        reply(found.answer)

    def _reply(self, entry: ClaimedEntry, turn: Turn, send: Send, outcome: Outcome) -> None:
        if turn.fate != "vanishes after sending":
            self.after(turn.back * SECOND, partial(self._answer, entry, turn, send, outcome))

    # --- what must hold

    def _first_in_doubt(self, epoch: int) -> datetime:
        """The start of the first lease under which something may have happened, by what is known of the sends."""
        return min(send.leased_at for send in self._maybe_executed(epoch))

    def _maybe_executed(self, epoch: int) -> Iterator[Send]:
        return (send for send in self.sends if send.epoch == epoch and not send.harmless)

    def _check_that_sending_is_safe(self, entry: ClaimedEntry) -> None:
        if known_of(entry.outcome) is not None:
            raise BrokenPromise("sent though its fate is on record")
        if sum(not send.harmless for send in self.sends[self.sends_before :]) >= self.memory.attempts_max:
            raise BrokenPromise("sent more often than allowed")
        earlier = [send.leased_at for send in self._maybe_executed(entry.key_epoch)]
        if not earlier:
            return
        if self.memory.window is None and not self.memory.at_least_once:
            raise BrokenPromise("sent again to a service that keeps no keys")
        if isinstance(self.memory.window, timedelta):
            arrives = self.now + TRANSIT_MAX * SECOND
            if arrives >= min(earlier) + self.memory.window:
                raise BrokenPromise("sent again when the service may have forgotten the key")

    def check_the_end(self) -> None:
        for epoch, effects in self.effects_of.items():
            if effects > 1 and self._promises_one_effect(epoch):
                raise BrokenPromise(f"it happened {effects} times under one key")
        if self.state == "uncertain" and not (self.maybe_sent and (self.in_doubt_since or self.key_epoch)):
            raise BrokenPromise("uncertain without a doubt")

    def _promises_one_effect(self, epoch: int) -> bool:
        if self.memory.window is None:
            return not self.memory.at_least_once
        return not any(send.too_late for send in self.sends if send.epoch == epoch)


def _seconds(seconds: int | None) -> timedelta | None:
    return None if seconds is None else seconds * SECOND


def _replayed(answer: Outcome | None, after: timedelta | None) -> Outcome:
    match answer:
        case None:
            return InProgress(after)
        case Delivered():
            return replace(answer, replayed=True)
        case Unknown():
            return replace(answer, final=True)  # a stored 500: asking again tells nothing new
        case _:
            return answer


def live_through(history: History) -> World:
    """Play `history`, then let the faults stop, and check every promise. Raises `BrokenPromise`."""
    world = World(history)
    words = iter(history.words)
    for turn in history.turns:
        world.wait_until_claimable()
        if not goes_on(world, words):
            break
        world.run_until(world.now + turn.late * SECOND)
        world.wait_until_claimable()
        if not world.ended:
            world.claim(turn)

    while goes_on(world, words):
        let_the_faults_stop(world)
    world.run_out()  # whatever is still under way arrives
    world.check_the_end()
    return world


def goes_on(world: World, words: Iterator[tuple[OperatorDecision, int]]) -> bool:
    """Whether it has not ended, for which a person may have to say something first."""
    while world.ended and world.state == "uncertain":
        word, late = next(words, (None, 0))
        if word is None:
            return False
        world.run_until(world.now + late * SECOND)
        world.hear(word)
    return not world.ended


def let_the_faults_stop(world: World) -> None:
    """From now on nothing goes wrong: the entry comes to an end, in time."""
    history = world.history
    lease_end = world.lease[1] if world.lease else world.now
    began = world.first_leased_at or max(world.now, world.due_at)
    by_then = max(world.last_event_at, lease_end, began + history.age_max * SECOND) + (LEASE + TIMEOUT) * SECOND
    if known_of(world.outcome) is not None:  # its age begins anew once that is carried out
        by_then += QUIESCENCE + history.age_max * SECOND
    for _ in range(history.attempts_max + 4):
        world.wait_until_claimable()
        if world.ended:
            break
        world.claim(Turn())
    if not world.ended:
        raise BrokenPromise("the faults stopped, and it does not end")
    if world.now > by_then:
        raise BrokenPromise(f"the faults stopped, and it ends {world.now - by_then} too late")


def breaks_a_promise(history: History) -> bool:
    try:
        live_through(history)
    except BrokenPromise:
        return True
    return False


# --- the promises


@settings(max_examples=1500, deadline=None)
@given(histories())
def test_no_history_breaks_a_promise(history: History) -> None:
    live_through(history)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_history_of_a_long_search_breaks_a_promise(seed: int) -> None:
    assert search(breaks_a_promise, seed) is None


def end_of(*turns: Turn, **declared: Any) -> tuple[str, int]:
    defaults: dict[str, Any] = {
        "window": WINDOW * SECOND,
        "at_least_once": False,
        "attempts_max": 5,
        "age_max": 3000,
    }
    world = live_through(History(turns=turns, **{**defaults, **declared}))
    return world.state, world.effects


LOST = Turn(fate="request is lost")
DONE_AND_LOST = Turn(fate="vanishes after sending")
REFUSED = Turn(service="refuses unseen")


@pytest.mark.parametrize(
    ("turns", "declared", "end"),
    [
        ([], {}, ("delivered", 1)),
        ([LOST], {}, ("delivered", 1)),
        ([DONE_AND_LOST], {}, ("delivered", 1)),
        ([DONE_AND_LOST, Turn(late=WINDOW)], {}, ("uncertain", 1)),
        ([DONE_AND_LOST, Turn(service="refuses unseen")], {}, ("uncertain", 1)),
        ([LOST, Turn(service="declines")], {}, ("failed", 0)),
        ([LOST, Turn(service="declines")], {"window": None}, ("uncertain", 0)),
        ([LOST], {"window": None}, ("uncertain", 0)),
        ([DONE_AND_LOST], {"window": None, "at_least_once": True}, ("delivered", 2)),
        ([Turn(frozen=90), Turn()], {}, ("delivered", 1)),
        ([Turn(frozen=90), Turn()], {"window": None}, ("delivered", 1)),  # late proof, from the frozen process
        ([Turn(fate="vanishes after sending", frozen=90), Turn()], {"window": None}, ("uncertain", 1)),
        ([Turn(service="breaks after")], {}, ("uncertain", 1)),
        ([Turn(fate="cannot connect", late=5)] * 7, {"age_max": 20}, ("failed", 0)),
        ([Turn(callback_fails=True)] * 3, {}, ("delivered", 1)),
        ([Turn(service="breaks after")], {"words": (("the truth", 0),)}, ("delivered", 1)),
        ([Turn(service="breaks before")], {"words": (("the truth", 0),)}, ("failed", 0)),
        ([Turn(service="breaks after")], {"words": (("send again", 0),)}, ("delivered", 2)),  # the answer was stored
        ([DONE_AND_LOST, REFUSED], {"words": (("send again", 0),)}, ("delivered", 1)),
        ([DONE_AND_LOST, REFUSED], {"words": (("send again", WINDOW),)}, ("delivered", 2)),
        ([LOST, REFUSED, Turn(), Turn(service="declines")], {"words": (("send again", WINDOW),)}, ("uncertain", 0)),
        ([LOST, REFUSED, Turn(), Turn(service="declines")], {"words": (("send again", 0),)}, ("failed", 0)),
    ],
)
def test_the_simulation_can_tell_what_really_happened(
    turns: list[Turn], declared: dict[str, Any], end: tuple[str, int]
) -> None:
    assert end_of(*turns, **declared) == end


@pytest.mark.parametrize(
    ("state", "effects"), [("delivered", 1), ("delivered", 2), ("failed", 0), ("uncertain", 0), ("uncertain", 1)]
)
def test_the_search_reaches_every_end_that_may_be_true(state: str, effects: int) -> None:
    def ends_so(history: History) -> bool:
        world = live_through(history)
        return (world.state, world.effects) == (state, effects)

    assert search(ends_so) is not None


# --- without a guard, a promise breaks: the search above can fail


@pytest.mark.parametrize("guard", PLANTED_RULES)
def test_without_a_guard_the_same_search_finds_a_broken_promise(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED_RULES[guard](monkeypatch)

    assert search(breaks_a_promise) is not None
