"""Stores how this dispatcher's destinations are throttled, and what to report to the other dispatchers. No I/O.

The database's rows decide. This copy avoids queries with known answers.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dispatchers.delivery import Deferred, Delivered, Outcome, Unknown
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import (
    COOLDOWN_DEFAULT,
    NONE_LEFT,
    NONE_UNSENT,
    FlowState,
    FlowStates,
    FlowUpdate,
    Limits,
    News,
    limits_of,
    opens_at,
    service_of,
    still_taken,
)
from dispatchers.time_limits import Memory, without_pause
from dispatchers.transitions import ClaimedEntry
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

BUSY_SECONDS = 0.05  # until the next try, if another dispatcher has locked the destination's row
UNTHROTTLED = FlowState()


def news_of(outcome: Outcome, destination: str) -> News:
    """The news in an outcome about the state of its destination."""
    match outcome:
        case Deferred(account=str() as account) if destination != f"{service_of(destination)}:{account}":
            return News(answered=True)  # the service works: it refuses only one account
        case Unknown(final=True):
            return News(answered=True)  # a repeated answer proves only that the service works
        case Deferred(cooldown=True, after=timedelta() as after) | Unknown(cooldown=True, after=timedelta() as after):
            return News(cooldown=after)  # the service works, but is busy
        case Deferred(cooldown=cooldown) | Unknown(cooldown=cooldown):
            return News(failures=1, cooldown=COOLDOWN_DEFAULT if cooldown else None)
        case _:
            return News(answered=True)


class FlowMonitor:
    """Combines the outcomes of this dispatcher's sends with the flow state in the database.

    limits: by destination. clock: the process's clock, also for `shut_until`. rng: spreads the retries of several processes.
    """

    def __init__(self, limits: Mapping[str, Limits], *, clock: Callable[[], float], rng: random.Random) -> None:
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._seen: dict[str, FlowState] = {}
        self._news: dict[str, News] = {}
        self._reporting: Counter[str] = Counter()  # failures that an exchange is reporting now
        self._reported: dict[str, str] = {}
        self._probes: dict[str, UUID] = {}
        self._under_way: dict[tuple[str, UUID], int] = {}  # sends with a shared permit, by destination and lease token
        self._full: set[str] = set()  # destinations that are shut only because no permit is free
        self.shut_until: dict[str, float] = {}

    # --- called by the sends

    def hear(self, entry: ClaimedEntry, outcome: Outcome) -> None:
        """Note an outcome. A success for a destination that is not throttled changes nothing."""
        name = entry.destination
        if name not in self._seen and name not in self._news and isinstance(outcome, Delivered):
            return
        news = news_of(outcome, name)
        if self._probes.get(name) == entry.lease_token:
            news = news._replace(probe=self._probes.pop(name), passed=not news.failures)
        self._record(name, news)

    def end(self, entry: ClaimedEntry, *, was_released: bool) -> None:
        """Note that the entry's send has ended. A probe without an outcome is reported: another entry can be the probe.

        was_released: without a send. Then its part of the rate is free again: else a dispatcher that may not send an entry could
        use the rate up again and again, and another one that may send it would never claim it. An entry whose end was known
        before its claim has used nothing.
        """
        if entry.is_known:
            return
        if was_released and limits_of(self._limits, entry.destination).rate is not None:
            self._record(entry.destination, News(unsent={entry.leased_at: 1}))
        if self._probes and self._probes.get(entry.destination) == entry.lease_token:
            self._record(entry.destination, News(probe=self._probes.pop(entry.destination)))
        if self._under_way and (entry.destination, entry.lease_token) in self._under_way:
            self._free_permit(entry.destination, entry.lease_token)

    def _free_permit(self, name: str, token: UUID) -> None:
        """Release a shared permit. The same exchange may report it and use it for a claim, so the destination opens at once."""
        left = self._under_way.pop((name, token)) - 1
        if left:
            self._under_way[name, token] = left
        self._record(name, News(left={token: left}))
        if name in self._full:
            self._full.discard(name)
            self.shut_until.pop(name, None)

    def _record(self, name: str, news: News) -> None:
        has_news = news.failures or news.cooldown is not None or news.probe is not None or news.left or news.unsent
        troubled = name in self._news or self._seen.get(name, UNTHROTTLED).breaker_failures
        if has_news or troubled:
            before = self._news.get(name)
            self._news[name] = news if before is None else before.then(news)

    # --- the exchange with the database

    @property
    def has_news(self) -> bool:
        """Whether an exchange is needed for news only."""
        return bool(self._news)

    @property
    def has_unreported_permits(self) -> bool:
        """Whether free permits are not reported to the other dispatchers yet."""
        return any(news.left for news in self._news.values())

    def take(self, quotas: Sequence[Quota]) -> FlowUpdate | None:
        """The flow update of the next exchange; None in most cases."""
        sending = [quota.destination for quota in quotas if not quota.known]
        decided = [name for name in sending if self._is_decided(name)]
        if not (self._news or decided):
            return None
        news, self._news = self._news, {}
        self._reporting.update(name for name, each in news.items() if _is_bad(each))
        return FlowUpdate(news=news, decided=frozenset(decided), limits=self._limits)

    def _is_decided(self, name: str) -> bool:
        return limits_of(self._limits, name).are_shared or (name in self._seen and self._seen[name].breaker != "closed")

    def learn(self, flow_update: FlowUpdate, flow_states: FlowStates | None, token: UUID) -> bool:
        """Note the result of an exchange; returns whether a shut destination has opened.

        News that was not stored, because another dispatcher had locked the row, is reported again; but not what is unsent, which
        counted twice would exceed the rate. token: of the claim.
        """
        found = flow_states.of if flow_states is not None else {}
        shut = self.shut_until.keys() & found.keys()
        self._reporting -= Counter(name for name, each in flow_update.news.items() if _is_bad(each))
        for name, news in flow_update.news.items():
            if name not in found:
                again, later = news._replace(unsent=NONE_UNSENT), self._news.get(name)
                self._news[name] = again if later is None else again.then(later)
        urgent = flow_update.decided.union(name for name, news in flow_update.news.items() if news.left)
        for name in sorted(
            urgent.difference(found)
        ):  # sorted, so that a simulation with one seed always runs in the same way
            self._full.discard(name)
            self.shut_until[name] = self._clock() + BUSY_SECONDS * (0.5 + self._rng.random())
        if flow_states is not None:
            for name, state in flow_states.of.items():
                if state.breaker_token == token:
                    self._probes[name] = token
                ours = sum(each.permits for each in state.permits_taken if each.token == token)
                if ours:
                    self._under_way[name, token] = ours
                self.see(name, state, flow_states)
        return not shut <= self.shut_until.keys()

    def refresh(self, flow_states: FlowStates) -> None:
        """Store the states that a sweep has read. Destinations without a state are not throttled any more."""
        for name in self._seen.keys() - flow_states.of.keys():
            del self._seen[name]
            self._full.discard(name)
            self.shut_until.pop(name, None)
            self._report(name, None)
        for name, state in flow_states.of.items():
            self.see(name, state, flow_states)

    def see(self, name: str, state: FlowState, flow_states: FlowStates) -> None:
        """Store the state of one destination."""
        self._seen[name] = state
        limits, left = limits_of(self._limits, name), self._news[name].left if name in self._news else NONE_LEFT
        state = replace(state, permits_taken=still_taken(state.permits_taken, flow_states.at, left))
        until = opens_at(state, limits, flow_states.at)
        self._full.discard(name)
        if until is not None and opens_at(replace(state, permits_taken=()), limits, flow_states.at) is None:
            self._full.add(name)
        if until is None:
            self.shut_until.pop(name, None)
        else:
            after = math.inf if until == NEVER else (until - flow_states.at).total_seconds()
            self.shut_until[name] = self._clock() + after
        self._report(name, _throttle(state, flow_states.at))

    def _report(self, name: str, throttle: tuple[str, str] | None) -> None:
        reason, text = throttle or (None, "")
        if reason == self._reported.get(name):
            return
        if reason is None:
            del self._reported[name]
            log.info("destination %r resumed", name)
        else:
            self._reported[name] = reason
            log.warning("destination %r %s", name, text)

    # --- read by the dispatcher

    @property
    def throttled(self) -> Mapping[str, str]:
        """Why nothing is claimed for a destination: `paused`, `breaker` or `cooldown`."""
        return dict(self._reported)

    def opens_in(self, now: float, *, since: float) -> float:
        """Seconds until the first destination that was shut at `since` may be asked; infinity if none was shut."""
        return min((max(0.0, until - now) for until in self.shut_until.values() if until > since), default=math.inf)

    def is_shut(self, name: str) -> bool:
        """Whether this destination is shut for longer than the short wait for another dispatcher's lock."""
        return self.is_paused(name) or self.shut_until.get(name, 0.0) > self._clock() + 2 * BUSY_SECONDS

    def is_paused(self, name: str) -> bool:
        """Whether an operator has paused the destination's service: a pause of `stripe` pauses its accounts."""
        return self.shut_until.get(service_of(name)) == math.inf

    def is_in_question(self, name: str) -> bool:
        """Whether the database has not yet decided if a failure shuts the destination."""
        news = self._news.get(name)
        busy = self.shut_until.get(name, 0.0) > self._clock()
        return busy or name in self._reporting or (news is not None and _is_bad(news))

    def memory(self, entry: ClaimedEntry, memory: Memory) -> Memory:
        """The service's memory for the policy: an entry does not age while its destination is paused."""
        if not self._seen:
            return memory
        names = (entry.destination, service_of(entry.destination))
        resumed = [at for name in names if (at := self._seen.get(name, UNTHROTTLED).resumed_at) is not None]
        return without_pause(memory, entry.first_leased_at, max(resumed, default=None))


def _is_bad(news: News) -> bool:
    return bool(news.failures) or news.cooldown is not None


def _throttle(state: FlowState, now: datetime) -> tuple[str, str] | None:
    """Why nothing is claimed for a destination, and the text for the log; None if entries may be claimed."""
    if state.paused:
        return "paused", "paused by an operator, until `outbox resume`"
    if state.breaker != "closed":
        return "breaker", "paused: circuit breaker open after repeated failures; one entry will be sent as a probe"
    if state.cooldown_until is not None and state.cooldown_until > now:
        return "cooldown", f"paused until {state.cooldown_until.astimezone(UTC):%H:%M:%SZ}: Retry-After cooldown"
    return None
