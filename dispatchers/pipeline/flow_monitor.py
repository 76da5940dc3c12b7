"""Stores how this dispatcher's destinations are throttled, and what to report to the other dispatchers. No I/O.

The database's rows decide. This copy avoids queries with known answers.
"""

import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from dispatchers.delivery import Deferred, Delivered, Outcome, Unknown
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import (
    COOLDOWN_DEFAULT,
    NONE_LEFT,
    NONE_UNSENT,
    UNTHROTTLED,
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
from dispatchers.flow_control.surveys import Survey
from dispatchers.pipeline.destinations import OPEN, Destination, Destinations
from dispatchers.time_limits import Memory, without_pause
from dispatchers.transitions import ClaimedEntry
from outbox.times import NEVER

log = logging.getLogger("outbox.dispatcher")

BUSY_SECONDS = 0.05  # until the next try, if another dispatcher has locked the destination's row


def news_of(outcome: Outcome, destination: str) -> News:
    """The news in an outcome about the state of its destination."""
    match outcome:
        case Deferred(account=str() as account) if destination != f"{service_of(destination)}:{account}":
            return News(answered=True)  # the service works, and refuses only one account
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

    limits: by destination. destinations: their records store what is known. clock: the process's clock.
    rng: spreads the retries of several processes.
    """

    def __init__(
        self,
        limits: Mapping[str, Limits],
        destinations: Destinations,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._limits = limits
        self._destinations, self._of = destinations, destinations.of
        self._share = destinations.share
        self._clock = clock
        self._rng = rng
        self._news: dict[str, News] = {}  # the next report
        if self._share is not None:
            self._share.surveys.join(self._share.database, self.refresh_again)

    # --- called by the sends

    def hear(self, entry: ClaimedEntry, outcome: Outcome) -> None:
        """Note an outcome. A success for a destination that is not throttled changes nothing."""
        name, destination = entry.destination, self._of[entry.destination]
        if self._share is not None:
            self._share.limits.hear(name, news_of(outcome, name), entry.lease_token)
        if destination.flow_state is None and name not in self._news and isinstance(outcome, Delivered):
            destination.failure = None
            return
        news = news_of(outcome, name)
        destination.failure = outcome.reason if news.failures and isinstance(outcome, Deferred | Unknown) else None
        if destination.probe is not None and destination.probe == entry.lease_token:
            news = news._replace(probe=destination.probe, passed=not news.failures)
            destination.probe = None
        self._record(destination, news)

    def end(self, entry: ClaimedEntry, *, was_released: bool) -> None:
        """Note that the entry's send has ended. A probe without an outcome is reported: another entry can be the probe.

        was_released: without a send. Then its part of the rate is free again. Otherwise a dispatcher that may not send an entry
        could use up the rate again and again, and a dispatcher that may send it would never claim it. An entry whose end was
        known before its claim has used nothing.
        """
        if self._share is not None:
            self._share.limits.end_probe(entry.destination, entry.lease_token)
        if entry.is_known:
            return
        destination = self._of[entry.destination]
        if was_released and limits_of(self._limits, entry.destination).rate is not None:
            self._record(destination, News(unsent={entry.leased_at: 1}))
        if destination.probe is not None and destination.probe == entry.lease_token:
            destination.probe = None
            self._record(destination, News(probe=entry.lease_token))
        if destination.shared_sends and entry.lease_token in destination.shared_sends:
            self._free_permit(destination, entry.lease_token)

    def _free_permit(self, destination: Destination, token: UUID) -> None:
        """Release a shared permit. The same exchange may report it and use it for a claim, so the destination opens at once."""
        left = destination.shared_sends.pop(token) - 1
        if left:
            destination.shared_sends[token] = left
        self._record(destination, News(left={token: left}))
        if destination.is_full:
            destination.is_full, destination.shut_until = False, OPEN

    def _record(self, destination: Destination, news: News) -> None:
        name = destination.name
        has_news = news.failures or news.cooldown is not None or news.probe is not None or news.left or news.unsent
        if has_news or name in self._news or (destination.flow_state or UNTHROTTLED).breaker_failures:
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
        for name, each in news.items():
            self._of[name].reporting += _is_bad(each)
        return FlowUpdate(news=news, decided=frozenset(decided), limits=self._limits)

    def _is_decided(self, name: str) -> bool:
        state = self._of[name].flow_state
        return limits_of(self._limits, name).are_shared or (state is not None and state.breaker != "closed")

    def learn(self, flow_update: FlowUpdate, flow_states: FlowStates | None, token: UUID) -> bool:
        """Note the result of an exchange; returns whether a shut destination has opened.

        News that was not stored, because another dispatcher had locked the row, is reported again, except the unsent
        entries: if they were counted twice, the sends would exceed the rate. token: of the claim.
        """
        found = flow_states.of if flow_states is not None else {}
        shut = [self._of[name] for name in found if self._of[name].shut_until != OPEN]
        for name, news in flow_update.news.items():
            self._of[name].reporting -= _is_bad(news)
            if name not in found:
                again, later = news._replace(unsent=NONE_UNSENT), self._news.get(name)
                self._news[name] = again if later is None else again.then(later)
        urgent = flow_update.decided.union(name for name, news in flow_update.news.items() if news.left)
        for name in sorted(
            urgent.difference(found)
        ):  # sorted, so that a simulation with the same seed always runs in the same way
            destination = self._of[name]
            destination.is_full = False
            destination.shut_until = self._clock() + BUSY_SECONDS * (0.5 + self._rng.random())
        if flow_states is not None:
            for name, state in flow_states.of.items():
                if state.breaker_token == token:
                    self._of[name].probe = token
                ours = sum(each.permits for each in state.permits_taken if each.token == token)
                if ours:
                    self._of[name].shared_sends[token] = ours
                self.see(name, state, flow_states)
        return any(destination.shut_until == OPEN for destination in shut)

    def refresh(self, flow_states: FlowStates) -> None:
        """Store the states that a sweep has read. Destinations without a state are not throttled any more."""
        if self._share is not None:
            self._share.surveys.learn(self._share.database, Survey(flow_states, self._clock()))
            flow_states = self._share.surveys.with_all(flow_states)
        self._store(flow_states, flow_states.of.keys())

    def refresh_again(self, names: Collection[str]) -> None:
        """Store the states of these destinations from the last sweep, with the present pauses of the other databases."""
        share = self._share
        survey = None if share is None else share.surveys.of(share.database)
        if share is not None and survey is not None:
            self._store(share.surveys.with_all(survey.at(self._clock())), names)
            share.limits.wake(share.database)

    def _store(self, flow_states: FlowStates, names: Collection[str]) -> None:
        """names: whose states to store. Those without a state are not throttled any more."""
        for name, destination in self._of.items():
            if destination.flow_state is not None and name not in flow_states.of:
                destination.flow_state, destination.is_full, destination.shut_until = None, False, OPEN
                self._report(destination, None)
        for name in names:
            if name in flow_states.of:
                self.see(name, flow_states.of[name], flow_states)

    def see(self, name: str, state: FlowState, flow_states: FlowStates) -> None:
        """Store the state of one destination."""
        if self._share is not None:
            surveys, database = self._share.surveys, self._share.database
            state = surveys.over_all(database, name, state, flow_states.at, self._clock())
        destination, limits = self._of[name], limits_of(self._limits, name)
        destination.flow_state = state
        left = self._news[name].left if name in self._news else NONE_LEFT
        state = replace(state, permits_taken=still_taken(state.permits_taken, flow_states.at, left))
        until = opens_at(state, limits, flow_states.at)
        destination.is_full, destination.shut_until = False, OPEN
        if until is not None:
            after = math.inf if until == NEVER else (until - flow_states.at).total_seconds()
            destination.shut_until = self._clock() + after
            destination.is_full = opens_at(replace(state, permits_taken=()), limits, flow_states.at) is None
        self._report(destination, _throttle(state, flow_states.at, destination.failure))

    def _report(self, destination: Destination, throttle: tuple[str, str] | None) -> None:
        reason, text = throttle or (None, "")
        if reason == destination.throttled:
            return
        destination.throttled = reason
        if reason is None:
            log.info("destination %r resumed", destination.name)
        else:
            log.warning("destination %r %s", destination.name, text)

    # --- read by the dispatcher

    @property
    def throttled(self) -> Mapping[str, str]:
        """Why nothing is claimed for a destination: `paused`, `breaker` or `cooldown`."""
        return {name: each.throttled for name, each in self._of.items() if each.throttled is not None}

    def opens_in(self, now: float, *, since: float) -> float:
        """Seconds until the first destination that was shut at `since` may be asked; infinity if none was shut."""
        untils = (destination.shut_until for destination in self._of.values())
        return min((max(0.0, until - now) for until in untils if until > since), default=math.inf)

    def is_shut(self, name: str) -> bool:
        """Whether this destination is shut for longer than the short wait for another dispatcher's lock."""
        destination = self._of[name]
        return self._destinations.is_paused(destination) or destination.shut_until > self._clock() + 2 * BUSY_SECONDS

    def is_in_question(self, name: str) -> bool:
        """Whether the database has not yet decided if a failure shuts the destination."""
        news, destination = self._news.get(name), self._of[name]
        is_reported = news is not None and _is_bad(news)
        return destination.shut_until > self._clock() or destination.reporting > 0 or is_reported

    def memory(self, entry: ClaimedEntry, memory: Memory) -> Memory:
        """The service's memory for the policy: an entry does not age while its destination is paused."""
        records = (self._of.get(name) for name in (entry.destination, service_of(entry.destination)))
        states = [each.flow_state for each in records if each is not None and each.flow_state is not None]
        resumed = [state.resumed_at for state in states if state.resumed_at is not None]
        return without_pause(memory, entry.first_leased_at, max(resumed, default=None))


def _is_bad(news: News) -> bool:
    return bool(news.failures) or news.cooldown is not None


def _throttle(state: FlowState, now: datetime, failure: str | None) -> tuple[str, str] | None:
    """Why nothing is claimed for a destination, and the text for the log; None if entries may be claimed.

    failure: the reason of this process's last failure; None if another process reported the failures.
    """
    if state.paused:
        return "paused", "paused by an operator, until `outbox resume`"
    if state.breaker != "closed":
        last = "reported by another process" if failure is None else f"the last is {failure!r}"
        text = f"paused: circuit breaker open after repeated failures, {last}; one entry will be sent as a probe"
        return "breaker", text
    if state.cooldown_until is not None and state.cooldown_until > now:
        return "cooldown", f"paused until {state.cooldown_until.astimezone(UTC):%H:%M:%SZ}: Retry-After cooldown"
    return None
