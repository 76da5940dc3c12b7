"""How this dispatcher's destinations are throttled, as far as it knows, and what it must report to the others. No I/O.

The database's rows decide; what is kept here spares it questions whose answer is known.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dispatchers.delivery import Deferred, Delivered, Memory, Outcome, Unknown
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import (
    COOLDOWN_DEFAULT,
    NONE_LEFT,
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
from dispatchers.time_limits import without_pause
from dispatchers.transitions import ClaimedEntry
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

BUSY_SECONDS = 0.05  # a row that another dispatcher is deciding about is asked for again then
UNTHROTTLED = FlowState()


def news_of(outcome: Outcome, destination: str) -> News:
    """What an outcome says about its destination as a whole."""
    match outcome:
        case Deferred(account=str() as account) if destination != f"{service_of(destination)}:{account}":
            return News(answered=True)  # it is running: only one of the accounts that share it is refused
        case Unknown(final=True):
            return News(answered=True)  # it repeats what it has stored
        case Deferred(cooldown=True, after=timedelta() as after) | Unknown(cooldown=True, after=timedelta() as after):
            return News(cooldown=after)  # it is well, and busy
        case Deferred(cooldown=cooldown) | Unknown(cooldown=cooldown):
            return News(failures=1, cooldown=COOLDOWN_DEFAULT if cooldown else None)
        case _:
            return News(answered=True)


class FlowMonitor:
    """Combines the outcomes of this dispatcher's sends with the flow state in the database.

    limits: by destination. clock: ours, by which `shut_until` counts. rng: spreads those that ask again.
    """

    def __init__(self, limits: Mapping[str, Limits], *, clock: Callable[[], float], rng: random.Random) -> None:
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._seen: dict[str, FlowState] = {}
        self._news: dict[str, News] = {}
        self._reporting: Counter[str] = Counter()  # bad news on its way to the database
        self._reported: dict[str, str] = {}
        self._probes: dict[str, UUID] = {}
        self._under_way: dict[tuple[str, UUID], int] = {}  # sends that take a permit that is shared, by their claim
        self._full: set[str] = set()  # shut for want of a permit, and for nothing else
        self.shut_until: dict[str, float] = {}

    # --- what the sends bring

    def hear(self, entry: ClaimedEntry, outcome: Outcome) -> None:
        """No state to update where the destination is unthrottled and the send succeeded."""
        name = entry.destination
        if name not in self._seen and name not in self._news and isinstance(outcome, Delivered):
            return
        news = news_of(outcome, name)
        if self._probes.get(name) == entry.lease_token:
            news = news._replace(probe=self._probes.pop(name), passed=not news.failures)
        self._record(name, news)

    def end(self, entry: ClaimedEntry) -> None:
        """Its send has ended. A probe of which nothing was heard leaves its place to another."""
        if self._probes and self._probes.get(entry.destination) == entry.lease_token:
            self._record(entry.destination, News(probe=self._probes.pop(entry.destination)))
        if self._under_way and (entry.destination, entry.lease_token) in self._under_way:
            self._free_permit(entry.destination, entry.lease_token)

    def _free_permit(self, name: str, token: UUID) -> None:
        """Its report may come with a claim at once, which uses our own free permit."""
        left = self._under_way.pop((name, token)) - 1
        if left:
            self._under_way[name, token] = left
        self._record(name, News(left={token: left}))
        if name in self._full:
            self._full.discard(name)
            self.shut_until.pop(name, None)

    def _record(self, name: str, news: News) -> None:
        has_news = news.failures or news.cooldown is not None or news.probe is not None or news.left
        troubled = name in self._news or self._seen.get(name, UNTHROTTLED).breaker_failures
        if has_news or troubled:
            before = self._news.get(name)
            self._news[name] = news if before is None else before.then(news)

    # --- the exchange with the database

    @property
    def has_news(self) -> bool:
        """Whether there is something to know, even with nothing to settle or to claim."""
        return bool(self._news)

    @property
    def has_unreported_permits(self) -> bool:
        """Whether there are permits that no send of ours needs any more, and the others do not know."""
        return any(news.left for news in self._news.values())

    def take(self, quotas: Sequence[Quota]) -> FlowUpdate | None:
        """What the next exchange is to know and to decide; None for nothing, as nearly always."""
        decided = [quota.destination for quota in quotas if self._is_decided(quota.destination)]
        if not (self._news or decided):
            return None
        news, self._news = self._news, {}
        self._reporting.update(name for name, each in news.items() if _is_bad(each))
        return FlowUpdate(news=news, decided=frozenset(decided), limits=self._limits)

    def _is_decided(self, name: str) -> bool:
        return limits_of(self._limits, name).are_shared or (name in self._seen and self._seen[name].breaker != "closed")

    def learn(self, flow_update: FlowUpdate, flow_states: FlowStates | None, token: UUID) -> bool:
        """What came of an exchange; returns whether a destination was opened that was shut.

        News that were not taken, because another held the row, are reported again. token: of the claim.
        """
        found = flow_states.of if flow_states is not None else {}
        shut = self.shut_until.keys() & found.keys()
        self._reporting -= Counter(name for name, each in flow_update.news.items() if _is_bad(each))
        for name, news in flow_update.news.items():
            if name not in found:
                later = self._news.get(name)
                self._news[name] = news if later is None else news.then(later)
        urgent = flow_update.decided.union(name for name, news in flow_update.news.items() if news.left)
        for name in sorted(urgent.difference(found)):  # a seed's run repeats only if theirs is an order
            self._full.discard(name)
            self.shut_until[name] = self._clock() + BUSY_SECONDS * (0.5 + self._rng.random())
        if flow_states is not None:
            for name, state in flow_states.of.items():
                if state.breaker_token == token:
                    self._probes[name] = token
                ours = sum(each.permits for each in state.permits_taken if each.token == token)
                if ours:
                    self._under_way[name, token] = ours
                self._see(name, state, flow_states)
        return not shut <= self.shut_until.keys()

    def refresh(self, flow_states: FlowStates) -> None:
        """What a sweep found: of every destination that is not reported of, nothing throttles it any more."""
        for name in self._seen.keys() - flow_states.of.keys():
            del self._seen[name]
            self._full.discard(name)
            self.shut_until.pop(name, None)
            self._report(name, None)
        for name, state in flow_states.of.items():
            self._see(name, state, flow_states)

    def _see(self, name: str, state: FlowState, flow_states: FlowStates) -> None:
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

    # --- what the dispatcher asks

    @property
    def throttled(self) -> Mapping[str, str]:
        """Why nothing is claimed for a destination: `paused`, `breaker` or `cooldown`."""
        return dict(self._reported)

    def opens_in(self, now: float, *, since: float) -> float:
        """Seconds until the next of those that were shut at `since` may be asked; infinity if none was."""
        return min((max(0.0, until - now) for until in self.shut_until.values() if until > since), default=math.inf)

    def is_shut(self, name: str) -> bool:
        """Whether nothing may be sent to this destination for longer than a dispatcher waits for another one's decision."""
        return self.is_paused(name) or self.shut_until.get(name, 0.0) > self._clock() + 2 * BUSY_SECONDS

    def is_paused(self, name: str) -> bool:
        """Whether an operator has paused its service: a pause of `stripe` pauses its accounts."""
        return self.shut_until.get(service_of(name)) == math.inf

    def is_in_question(self, name: str) -> bool:
        """Whether the database has not yet decided what follows from a failure: whether it shuts the destination."""
        news = self._news.get(name)
        busy = self.shut_until.get(name, 0.0) > self._clock()
        return busy or name in self._reporting or (news is not None and _is_bad(news))

    def memory(self, entry: ClaimedEntry, memory: Memory) -> Memory:
        """What the policy must know of the service: an entry does not age while its destination is paused."""
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
