"""An attempt: one send or one status lookup of a claimed entry, from its key to the transition that its answer leads to."""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import get_ident
from typing import Any, Final, TypeAlias

from dispatchers.decide import decide, decide_lookup, too_late, wait_for_reader
from dispatchers.delivery import Answered, CannotTell, Deferred, Delivered, Delivery, Finding, Outcome, Unknown
from dispatchers.pipeline.activity_log import ActivityLog, result_of
from dispatchers.pipeline.routing import Route, UnservedLog
from dispatchers.pipeline.unstarted import BLOCKED, Unstarted
from dispatchers.sanitize import storable, storable_finding
from dispatchers.store.protocol import Store
from dispatchers.telemetry.log_ids import work_on
from dispatchers.telemetry.tracing import End
from dispatchers.time_limits import Memory
from dispatchers.transitions import ClaimedEntry, Lookup, Release, Send, Transition
from outbox.configuration import EFFECT_VERSION
from outbox.errors import InvalidPayload
from outbox.keys import Keyring, Tag, derive_tag

log = logging.getLogger("outbox.dispatcher")

IDLE: Final = math.inf
SendBatch: TypeAlias = Callable[[Sequence[Delivery], Answered], Awaitable[None]]
OF_THE_PROCESS = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""Exceptions that may come from outside an adapter. The adapter raises all others, also gevent's Timeout, a BaseException."""

NO_DELIVERY = Deferred("no delivery can be made from its row; the log shows why")


@dataclass(slots=True, eq=False)
class Deadline:
    """The time by which a task must end its present send, on the event loop's clock. Then the task is cancelled.

    has_passed: whether the task was cancelled because of it.
    """

    at: float = IDLE
    has_passed: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def alone_cancelled(self) -> bool:
        """Whether nothing but the deadline has cancelled the task."""
        return (self.task.cancelling() if self.task is not None else 0) <= self.has_passed

    def enforce(self, now: float) -> None:
        """Cancel the task once if the deadline has passed."""
        if now >= self.at and not self.has_passed and self.task is not None:
            self.has_passed = True
            self.task.cancel()

    def forgive(self) -> None:
        """Undo the deadline's cancellation, so that the task continues with other sends."""
        self.has_passed = False
        if self.task is not None:
            self.task.uncancel()

    def no_answer(self, route: Route) -> Unknown:
        """The outcome after a cancellation, by the deadline or inside the adapter."""
        if self.has_passed:
            return Unknown(f"no answer within {route.timeout_seconds:g} s")
        return Unknown("the adapter cancelled itself")


class AttemptContext:
    """What all attempts of a dispatcher use.

    keyring: called only for a later key epoch. usable: the part of a lease in which an answer may arrive.
    memory: the service's memory, with the time in which the destination was paused.
    unstarted: the entries whose send has not begun; another thread may take them.
    """

    def __init__(
        self,
        *,
        store: Store,
        keyring: Callable[[], Keyring],
        usable: timedelta,
        clock: Callable[[], float],
        rng: random.Random,
        memory: Callable[[ClaimedEntry, Memory], Memory],
        activity: ActivityLog,
        unstarted: Unstarted,
    ) -> None:
        self.store = store
        self.keyring = keyring
        self.usable_seconds = usable.total_seconds()
        self.clock = clock
        self.rng = rng
        self.memory = memory
        self.activity = activity
        self.unstarted = unstarted
        self.skipped = UnservedLog(clock)


class Attempt:
    """One send or status lookup of a claimed entry.

    claimed_at: the process's clock before the claim. outcome: the adapter's answer to the send, if there was one.
    change: the transition of the entry; None while there is none. An attempt that ends without one must let the lease expire.
    """

    __slots__ = ("_began", "_context", "_end_span", "change", "claimed_at", "entry", "outcome", "route", "step")

    def __init__(
        self, entry: ClaimedEntry, route: Route, step: Send | Lookup, claimed_at: float, context: AttemptContext
    ) -> None:
        self.entry = entry
        self.route = route
        self.step = step
        self.claimed_at = claimed_at
        self.outcome: Outcome | None = None
        self.change: Transition | None = None
        self._context = context
        self._began = 0.0  # when the adapter was called, by the process's clock
        self._end_span: End | None = None

    @property
    def may_join(self) -> bool:
        """Whether the entry may be sent in a batch. A lookup is no send, and a later key may need a query."""
        return isinstance(self.step, Send) and not self.entry.key_epoch

    async def run(self, deadline: Deadline) -> None:
        """Send the entry or look it up, and decide what comes next for it."""
        try:
            # Get the tag first, because this may query the database: no time may pass between the checks and the send.
            tag = Tag(self.entry.tag) if self.entry.key_epoch == 0 else await self._tag_of_epoch(deadline)
            delivery = self.prepare(tag, deadline)
            if delivery is not None:
                self.answered(await self._answer(delivery, deadline))
        except Exception as error:
            self.fail(error)

    # --- before the adapter is called

    async def _tag_of_epoch(self, deadline: Deadline) -> Tag | None:
        """The tag of a later key epoch. Only the first epoch's tag is stored, so this one is derived; None if that fails."""
        entry, context = self.entry, self._context
        try:
            return derive_tag(context.keyring(), entry.kid, await context.store.key_fields(entry.id), entry.key_epoch)
        except asyncio.CancelledError:
            if not deadline.alone_cancelled:
                raise
            log.warning("entry %s (%s): deriving its key did not end before the deadline", entry.id, entry.operation)
        except Exception as error:
            log.exception("entry %s (%s) cannot be sent: deriving its key failed", entry.id, entry.operation)
            context.activity.errors.report("dispatcher", error, entry)
        return None

    def prepare(self, tag: Tag | None, deadline: Deadline) -> Delivery | None:
        """The delivery for the adapter, which must be called next; None if `change` says what to do instead."""
        try:
            delivery = None if tag is None else delivery_of(self.entry, self.route, tag, deadline.at)
        except InvalidPayload as error:
            self.change = self._unread(str(error))
            return None
        self.change = self.refusal()
        if self.change is None and delivery is None:
            self.change = self._undeliverable()
        return delivery if self.change is None else None

    def _unread(self, reason: str) -> Transition:
        memory = self._context.memory(self.entry, self.route.memory)
        change = wait_for_reader(self.entry, memory, self._database_now(), reason)
        if isinstance(change, Release):
            self._context.skipped.log_skipped(self.entry, reason)
        return change

    def _undeliverable(self) -> Transition:
        if isinstance(self.step, Lookup):
            return self._after_lookup(self.step, CannotTell(NO_DELIVERY.reason))
        return self._after_send(NO_DELIVERY)

    def refusal(self) -> Transition | None:
        """Why nothing may be sent or looked up now: the window is over, the lease could end before the answer, or another
        thread has taken the entry.

        After None the entry counts as begun.
        """
        before = self.step.before if isinstance(self.step, Send) else None
        if before is not None and (now := self._database_now()) >= before:
            return too_late(self.entry, self.route.memory, now)
        context = self._context
        self._began = context.clock()
        if self._began - self.claimed_at > context.usable_seconds - self.route.timeout_seconds:
            return Release("its lease was nearly over when it could be sent")
        return None if context.unstarted.begin(self.entry) else Release(BLOCKED)

    # --- the call

    async def _answer(self, delivery: Delivery, deadline: Deadline) -> Any:
        """The adapter's answer; `Unknown` after an exception, which proves nothing about the remote service."""
        ask, is_lookup = self.route.send, isinstance(self.step, Lookup)
        if is_lookup:
            age = self._database_now() - self.entry.created_at
            ask, delivery = self.route.find, delivery._replace(attempt=self.entry.attempts, age=age)
        trace = self._context.activity.trace
        if trace is not None:
            delivery, self._end_span = trace.attempt(delivery, self.entry, is_lookup=is_lookup)
        try:
            answer = await ask(delivery)
        except OF_THE_PROCESS as error:
            if not (isinstance(error, asyncio.CancelledError) and deadline.alone_cancelled):
                self._finish_span(None)
                raise
            answer = deadline.no_answer(self.route)
        except BaseException as error:
            text = "the adapter of %r raised for entry %s: this counts as no answer"
            log.exception(text, self.route.name, self.entry.id)
            self._context.activity.errors.report("adapter", error, self.entry)
            answer = Unknown(f"the adapter raised {type(error).__name__}")
        return answer

    # --- in a batch

    def join(self, deadline: Deadline) -> Delivery | None:
        """As `prepare`, for a call that sends several entries. Their spans end in any order, so each has its own context."""
        try:
            delivery = self.prepare(Tag(self.entry.tag), deadline)
        except Exception as error:
            self.fail(error)
            return None
        trace = self._context.activity.trace
        if trace is not None and delivery is not None:
            own = copy_context()
            delivery, end_span = own.run(trace.attempt, delivery, self.entry, is_lookup=False)
            self._end_span = lambda result: own.run(end_span, result)
        return delivery

    def abandon(self) -> None:
        """Leave the entry in doubt: its lease expires."""
        self._finish_span(None)

    def _finish_span(self, result: str | None) -> None:
        if self._end_span is not None:
            self._end_span(result)

    # --- after the answer

    def answered(self, answer: Any) -> None:
        """Count the attempt, and decide what comes next for the entry. answer: of the adapter."""
        try:
            if self._end_span is not None:
                self._finish_span(result_of(answer))
            if isinstance(self.step, Lookup):
                finding = CannotTell(answer.reason) if isinstance(answer, Unknown) else storable_finding(answer)
                self._note(finding)
                self.change = self._after_lookup(self.step, finding)
            else:
                self.outcome = storable(answer)
                self._note(self.outcome)
                self.change = self._after_send(self.outcome)
        except Exception as error:
            self.fail(error)

    def _note(self, answer: Outcome | Finding) -> None:
        context, began = self._context, self._began
        seconds, waited = context.clock() - began, began - self.claimed_at
        context.activity.note_attempt(self.entry, answer, seconds=seconds, waited=waited)

    def _after_send(self, outcome: Outcome) -> Transition:
        entry, context = self.entry, self._context
        if isinstance(outcome, Delivered):  # neither the time nor the jitter matters
            return decide(entry, outcome, self.route.memory, entry.leased_at, 0.0)
        memory = context.memory(entry, self.route.memory)
        return decide(entry, outcome, memory, self._database_now(), context.rng.random())

    def _after_lookup(self, step: Lookup, finding: Finding) -> Transition:
        memory = self._context.memory(self.entry, self.route.memory)
        return decide_lookup(self.entry, step.state, finding, memory, self._database_now(), self._context.rng.random())

    def fail(self, error: Exception) -> None:
        """Log a bug in this library. The entry's lease must expire, and its outcome counts as unknown."""
        self.change = None
        log.exception(
            "entry %s (%s): internal error; its lease will expire, and a dispatcher will claim it again",
            self.entry.id,
            self.entry.operation,
        )
        self._context.activity.errors.report("dispatcher", error, self.entry)

    def _database_now(self) -> datetime:
        """The database's time, never too early: its clock at the lease's start, plus the time since before the claim."""
        return self.entry.leased_at + timedelta(seconds=self._context.clock() - self.claimed_at)


class Batch:
    """Attempts that an adapter sends with one call. Each ends once, with its own outcome.

    ended: called with each attempt when it has ended, also if it was not sent.
    No span is the current one in the adapter, because its call sends all entries.
    """

    def __init__(
        self, attempts: Sequence[Attempt], send: SendBatch, context: AttemptContext, ended: Callable[[Attempt], None]
    ) -> None:
        self._attempts = attempts
        self._send = send
        self._context = context
        self._ended = ended
        self._unanswered: dict[int, Attempt] = {}
        self._thread = get_ident()
        self.deliveries: Sequence[Delivery] = ()

    async def run(self, deadline: Deadline) -> None:
        """Send the entries with one call of the adapter. Each ends as soon as its outcome arrives."""
        route = self._attempts[0].route
        work_on(None)
        self.fill(deadline)
        if not self.deliveries:
            return
        try:
            await self._send(self.deliveries, self.answered)
            self.end_with(Unknown("the adapter returned without its outcome"))
        except OF_THE_PROCESS as error:
            if not (isinstance(error, asyncio.CancelledError) and deadline.alone_cancelled):
                raise
            self.end_with(deadline.no_answer(route))
        except BaseException as error:
            text = "the adapter of %r raised for a batch of %d entries: those without an outcome count as not answered"
            log.exception(text, route.name, len(self.deliveries))
            self._context.activity.errors.report("adapter", error)
            self.end_with(Unknown(f"the adapter raised {type(error).__name__}"))
        finally:
            self._abandon()  # no effect if each entry has ended

    def fill(self, deadline: Deadline) -> None:
        """Make the deliveries. End the attempts of entries that may not be sent any more, or whose delivery cannot be made."""
        deliveries = list[Delivery]()
        for attempt in self._attempts:
            delivery = attempt.join(deadline)
            if delivery is None:
                self._ended(attempt)
            else:
                self._unanswered[len(deliveries)] = attempt
                deliveries.append(delivery)
        self.deliveries = tuple(deliveries)  # a tuple: `answered` finds an attempt by its place

    def answered(self, number: int, outcome: Outcome) -> None:
        """End the attempt of this delivery. A second outcome changes nothing.

        Raises TypeError or IndexError if there is no such delivery, and RuntimeError in another thread.
        """
        if type(number) is not int:
            raise TypeError(f"the number of a delivery must be an int, not {number!r}")
        if not 0 <= number < len(self.deliveries):
            raise IndexError(f"there is no delivery {number}: this batch has {len(self.deliveries)}")
        if get_ident() != self._thread:
            raise RuntimeError("an outcome must be reported in the thread that called send_batch")
        self._end_one(number, outcome)

    def _end_one(self, number: int, outcome: Outcome) -> None:
        attempt = self._unanswered.pop(number, None)
        if attempt is not None:
            try:
                attempt.answered(outcome)
            finally:
                self._ended(attempt)

    def end_with(self, outcome: Outcome) -> None:
        """Give this outcome to all attempts that have none."""
        for number in list(self._unanswered):
            self._end_one(number, outcome)

    def _abandon(self) -> None:
        """Leave the entries without an outcome in doubt: their leases expire."""
        unanswered, self._unanswered = self._unanswered, {}
        for attempt in unanswered.values():
            attempt.abandon()
            self._ended(attempt)


def delivery_of(entry: ClaimedEntry, route: Route, tag: Tag, deadline: float) -> Delivery | None:
    """The delivery for the adapter; None if it cannot be made, for a reason that is logged.

    Raises `InvalidPayload` if this process cannot read its payload.
    """
    try:
        value = route.read_payload(entry)
        return Delivery(
            entry.id,
            entry.operation,
            entry.payload,
            route.encode_key(tag),
            entry.attempts + 1,
            _own_options(entry) if entry.options else entry.options,
            entry.headers,
            deadline,
            entry.due_at,
            entry.leased_at - entry.created_at,
            entry.ordering_key,
            value,
        )
    except InvalidPayload:
        raise
    except Exception:
        log.exception(
            "entry %s (%s): cannot be sent, because no delivery can be made from its row; the traceback follows",
            entry.id,
            entry.operation,
        )
        return None


def _own_options(entry: ClaimedEntry) -> Mapping[str, Any]:
    """The options that the app gave."""
    return {name: value for name, value in entry.options.items() if name != EFFECT_VERSION}
