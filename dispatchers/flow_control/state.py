"""The flow control of one destination. Pure: the rules of cooldown, breaker, rate, permits and pause.

A `FlowState` is one row of the database, which all dispatchers share. A rule takes the present state and returns the new one,
while the row is locked; `now` is the database's time. A refused entry is not claimed, so a refusal does not count as an attempt.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from uuid import UUID

from outbox.errors import ConfigurationError
from outbox.times import NEVER

MAX_COOLDOWN = timedelta(days=1)
"""One answer stops the whole fleet for this long at most. The entry itself waits for the whole time that the service asks for."""

COOLDOWN_DEFAULT = timedelta(seconds=1)  # if the service gives no time
BLOCK_SECONDS = 0.1  # a claim takes the rate for this time in advance; else each entry would cost a claim of its own
PERMITS_WAIT = timedelta(seconds=0.25)  # between two checks whether another dispatcher has released a permit
ROUNDING_SECONDS = 1.5e-6  # three instants are each rounded to a microsecond: the schedule, the wait and the clock
MAX_DOUBLINGS = 20
UNLIMITED = 1_000_000  # more than any claim takes


# --- the settings of a dispatcher


def _require_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1: {value!r}")


def _is_rate(rate: Any) -> bool:
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    return is_number and 0.0001 <= rate <= 1_000_000  # false for nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """When to stop sending to a destination that fails, and how soon to test it with one entry.

    failures: the number of failed sends in a row that opens the breaker (no connection, a timeout, a 5xx).
    wait: the time until the first probe. It is doubled after each failed probe, up to `max_wait`.
    max_wait: the longest time between two probes.
    """

    failures: int = 10
    wait: timedelta = timedelta(seconds=10)
    max_wait: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        _require_whole("Breaker.failures", self.failures)
        for name, span in (("wait", self.wait), ("max_wait", self.max_wait)):
            if not isinstance(span, timedelta) or not timedelta(0) < span <= MAX_COOLDOWN:
                raise ConfigurationError(
                    f"Breaker.{name} must be a timedelta of more than 0 and at most a day: {span!r}"
                )
        if self.wait > self.max_wait:
            raise ConfigurationError(f"Breaker.wait, {self.wait}, must not be longer than max_wait, {self.max_wait}")

    def wait_after(self, failures: int) -> timedelta:
        """The time until the next probe. failures: those that opened the breaker, and one for each failed probe."""
        doublings = min(max(failures - self.failures, 0), MAX_DOUBLINGS)
        wait: timedelta = min(self.wait * 2**doublings, self.max_wait)
        return wait


DEFAULT_BREAKER = Breaker()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one destination.

    concurrency: sends at a time by one dispatcher; by default the dispatcher's own setting.
    total_concurrency: sends at a time by all dispatchers together.
    rate: sends per second by all dispatchers together.
    burst: how many sends may go out at one moment after a time without sends; by default the number of one second.
    breaker: the circuit breaker; None: no breaker.
    """

    concurrency: int | None = None
    total_concurrency: int | None = None
    rate: float | None = None
    burst: int | None = None
    breaker: Breaker | None = DEFAULT_BREAKER

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            _require_whole("Limits.concurrency", self.concurrency)
        if self.total_concurrency is not None:
            _require_whole("Limits.total_concurrency", self.total_concurrency)
        if self.rate is not None and not _is_rate(self.rate):
            raise ConfigurationError(
                f"Limits.rate must be a number of sends per second, 0.0001 to 1000000: {self.rate!r}"
            )
        if self.burst is not None:
            _require_whole("Limits.burst", self.burst)
            if self.rate is None:
                raise ConfigurationError(f"Limits.burst needs a rate: Limits(rate=..., burst={self.burst})")
        if self.breaker is not None and not isinstance(self.breaker, Breaker):
            raise ConfigurationError(
                f"Limits.breaker must be a Breaker, or None for no circuit breaker: {self.breaker!r}"
            )

    @property
    def are_shared(self) -> bool:
        """Whether these limits count the sends of all dispatchers together."""
        return self.rate is not None or self.total_concurrency is not None


def check_limits(limits: Mapping[str, Limits]) -> dict[str, Limits]:
    """A copy of the limits. Raises `ConfigurationError` unless they are `Limits` by destination."""
    if not isinstance(limits, Mapping):
        raise ConfigurationError(f"limits must be a mapping of destinations to Limits, not {limits!r}")
    for name, given in limits.items():
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 255:
            raise ConfigurationError(f"the keys of limits must be destinations, texts of 1 to 255 bytes: {name!r}")
        if not isinstance(given, Limits):
            raise ConfigurationError(f"the limits of {name!r} must be Limits(...), not {given!r}")
    return dict(limits)


NO_LIMITS = Limits()


def limits_of(limits: Mapping[str, Limits], destination: str) -> Limits:
    """The destination's own limits, or else the limits of its service, which apply to each of its destinations separately."""
    return limits.get(destination) or limits.get(service_of(destination), NO_LIMITS)


def service_of(destination: str) -> str:
    """The part before the first colon: `stripe` of `stripe:acct_1`."""
    return destination.partition(":")[0]


# --- the permits that all dispatchers of a destination share
# The destination's row stores them by lease token. A claim takes permits while the row is locked. They are released one by one
# as the sends of the claim end, or all together when its lease ends: then its dispatcher may have crashed.

NONE_LEFT: Mapping[UUID, int] = MappingProxyType({})
NONE_UNSENT: Mapping[datetime, int] = MappingProxyType({})


class Taken(NamedTuple):
    """The permits of one claim. token: of its lease. permits: how many of its sends may be in flight. until: its lease's end."""

    token: UUID
    permits: int
    until: datetime


def still_taken(taken: Iterable[Taken], now: datetime, left: Mapping[UUID, int] = NONE_LEFT) -> tuple[Taken, ...]:
    """`taken` without the permits that were released. left: how many sends of a claim have not ended, if that is known.

    The permits of a claim only decrease, so a late or repeated report cannot take any.
    """
    lasting = (each for each in taken if each.until > now)
    kept = (each._replace(permits=min(each.permits, left.get(each.token, each.permits))) for each in lasting)
    return tuple(each for each in kept if each.permits)


def as_record(taken: Iterable[Taken]) -> str | None:
    """The text for the column `permits_taken`: [lease token, permits, until] of each claim."""
    rows = [[each.token.hex, each.permits, each.until.isoformat()] for each in taken]
    return json.dumps(rows) if rows else None


def on_record(text: str | None) -> tuple[Taken, ...]:
    rows = json.loads(text) if text else ()
    return tuple(Taken(UUID(token), permits, datetime.fromisoformat(until)) for token, permits, until in rows)


# --- the state that all dispatchers share


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """One destination's row.

    cooldown_until: the end of the cooldown that the service demanded. breaker: while it is `open`, nothing is sent before
    `breaker_until`; while it is `half_open`, only the probe with the lease token `breaker_token` is sent, until `breaker_until`
    at the latest. breaker_failures: the failures in a row. rate_at: the time up to which the rate is used up.
    permits_taken: the shared permits in use, of `max_permits`. resumed_at: when an operator last ended a pause.
    """

    paused: bool = False
    cooldown_until: datetime | None = None
    breaker: Literal["closed", "open", "half_open"] = "closed"
    breaker_until: datetime | None = None
    breaker_failures: int = 0
    breaker_token: UUID | None = None
    rate_at: datetime | None = None
    rate_per_second: float | None = None
    permits_taken: tuple[Taken, ...] = ()
    max_permits: int | None = None
    resumed_at: datetime | None = None


UNTHROTTLED = FlowState()


class FlowStates(NamedTuple):
    """The states of destinations at one time of the database's clock."""

    at: datetime
    of: Mapping[str, FlowState]


class News(NamedTuple):
    """What one dispatcher has learned about a destination since its last report.

    answered: the service executed a request, or refused it because of its content. failures: failed sends since that answer.
    cooldown: the time that the service demanded. probe: the lease token of a probe that has ended. passed: whether the probe
    succeeded; None if it was never sent. left: how many sends of a claim have not ended, by lease token. unsent: how many
    claimed entries were released without a send, by the time of their claim.
    """

    answered: bool = False
    failures: int = 0
    cooldown: timedelta | None = None
    probe: UUID | None = None
    passed: bool | None = None
    left: Mapping[UUID, int] = NONE_LEFT
    unsent: Mapping[datetime, int] = NONE_UNSENT

    def then(self, later: "News") -> "News":
        """This news, followed by `later`, as one."""
        cooldown = [cooldown for cooldown in (self.cooldown, later.cooldown) if cooldown is not None]
        probe, passed = (self.probe, self.passed) if later.probe is None else (later.probe, later.passed)
        return News(
            self.answered or later.answered,
            later.failures if later.answered else self.failures + later.failures,
            max(cooldown, default=None),
            probe,
            passed,
            {**self.left, **later.left},
            Counter(self.unsent) + Counter(later.unsent),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowUpdate:
    """The work of an exchange for flow control.

    news: by destination. decided: the destinations whose rows must be locked while their claim is decided.
    """

    news: Mapping[str, News]
    decided: frozenset[str]
    limits: Mapping[str, Limits]


# --- the rules


def heard(state: FlowState, news: News, limits: Limits, now: datetime) -> FlowState:
    """The state after `news`.

    While the breaker is not closed, only the probe changes it: all other answers belong to earlier sends.
    """
    if news.left:
        state = replace(state, permits_taken=still_taken(state.permits_taken, now, news.left))
    if news.unsent and limits.rate is not None and state.rate_at is not None:  # they have not used the rate
        state = replace(state, rate_at=state.rate_at - _not_used(news.unsent, limits.rate, now))
    if news.cooldown is not None:
        cooldown_until = now + min(max(news.cooldown, timedelta(0)), MAX_COOLDOWN)
        state = replace(state, cooldown_until=max(cooldown_until, state.cooldown_until or cooldown_until))
    if state.breaker == "half_open" and news.probe is not None and news.probe == state.breaker_token:
        return _tried(state, news.passed, limits.breaker or DEFAULT_BREAKER, now)
    if state.breaker != "closed" or limits.breaker is None:
        return state
    failures = news.failures + (0 if news.answered else state.breaker_failures)
    if failures < limits.breaker.failures:
        return replace(state, breaker_failures=failures)
    return _opened(state, limits.breaker.failures, now + limits.breaker.wait_after(limits.breaker.failures))


def _tried(state: FlowState, passed: bool | None, breaker: Breaker, now: datetime) -> FlowState:
    if passed is None:
        return _opened(state, state.breaker_failures, now)
    if passed:
        return replace(state, breaker="closed", breaker_until=None, breaker_failures=0, breaker_token=None)
    failures = max(state.breaker_failures, breaker.failures) + 1
    return _opened(state, failures, now + breaker.wait_after(failures))


def _opened(state: FlowState, failures: int, until: datetime) -> FlowState:
    return replace(state, breaker="open", breaker_until=until, breaker_failures=failures, breaker_token=None)


def admitted(state: FlowState, limits: Limits, now: datetime, wanted: int) -> int:
    """How many of the wanted entries may be claimed now: none, one as a probe, or as many as rate and permits allow."""
    if closed_until(state, now) is not None:
        return 0
    most = wanted if state.breaker == "closed" else 1
    return min(most, _left_of_rate(state, limits, now), _left_of_permits(state, limits, now))


def claimed(state: FlowState, limits: Limits, now: datetime, entries: int, token: UUID, lease: timedelta) -> FlowState:
    """The state after a claim of `entries` entries with this lease token."""
    if not entries:
        return state
    if state.breaker != "closed":
        state = replace(state, breaker="half_open", breaker_until=now + lease, breaker_token=token)
    if limits.rate is not None:
        used = timedelta(seconds=entries / limits.rate)
        state = replace(state, rate_at=_used_up(state, now) + used, rate_per_second=float(limits.rate))
    if limits.total_concurrency is not None:
        taken = *still_taken(state.permits_taken, now), Taken(token, entries, now + lease)
        state = replace(state, permits_taken=taken, max_permits=limits.total_concurrency)
    return state


def closed_until(state: FlowState, now: datetime) -> datetime | None:
    """When sending may begin again, apart from rate and permits: NEVER during a pause; None if it may begin now."""
    if state.paused:
        return NEVER
    untils = [state.cooldown_until] if state.breaker == "closed" else [state.cooldown_until, state.breaker_until]
    return max((until for until in untils if until is not None and until > now), default=None)


def opens_at(state: FlowState, limits: Limits, now: datetime) -> datetime | None:
    """When to try the next claim; None for now. With a rate, wait until a whole portion is free."""
    until = closed_until(state, now)
    if until is not None:
        return until
    if limits.rate is None or _left_of_rate(state, limits, now):
        return None if _left_of_permits(state, limits, now) else now + PERMITS_WAIT
    burst = _burst(limits)
    portion = min(burst, max(1.0, limits.rate * BLOCK_SECONDS))
    return _used_up(state, now) - timedelta(seconds=(burst - portion) / limits.rate)


# The rate is limited by the generic cell rate algorithm as a virtual schedule (ITU-T I.371, Annex A). `rate_at` is the
# theoretical arrival time. A claim of n entries adds n / rate to it. It may be at most burst / rate after now.


def _left_of_rate(state: FlowState, limits: Limits, now: datetime) -> int:
    if limits.rate is None:
        return UNLIMITED
    ahead = (_used_up(state, now) - now).total_seconds()
    rounding = ROUNDING_SECONDS * limits.rate + 1e-9  # rounding must not add or lose an entry
    return max(0, math.floor(_burst(limits) - ahead * limits.rate + rounding))


def _not_used(unsent: Mapping[datetime, int], rate: float, now: datetime) -> timedelta:
    """The part of the rate that is free again. What has come back since a claim counts: else late releases would add up to more
    than a burst.
    """
    free = (timedelta(seconds=entries / rate) - max(now - at, timedelta(0)) for at, entries in unsent.items())
    return sum((max(each, timedelta(0)) for each in free), timedelta(0))


def _used_up(state: FlowState, now: datetime) -> datetime:
    return now if state.rate_at is None else max(state.rate_at, now)


def _burst(limits: Limits) -> int:
    return limits.burst or max(1, math.floor(limits.rate or 0))


def _left_of_permits(state: FlowState, limits: Limits, now: datetime) -> int:
    if limits.total_concurrency is None:
        return UNLIMITED
    return max(0, limits.total_concurrency - sum(each.permits for each in still_taken(state.permits_taken, now)))
