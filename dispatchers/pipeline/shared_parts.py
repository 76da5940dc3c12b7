"""The parts of a dispatcher that shares the limits of its destinations with the dispatchers of other databases."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from dispatchers.delivery import Outcome
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.shared import SharedLimits
from dispatchers.flow_control.state import FlowState, FlowStates, Limits
from dispatchers.pipeline.attempt import Attempt
from dispatchers.pipeline.flow_monitor import UNTHROTTLED, FlowMonitor, news_of
from dispatchers.pipeline.parts import Parts
from dispatchers.pipeline.scheduler import Scheduler, max_callbacks, max_entries
from dispatchers.pipeline.send_queue import SendQueue
from dispatchers.transitions import ClaimedEntry


class Survey(NamedTuple):
    """The flow states that a sweep of one database has read. read_at: when, by the process's clock."""

    flow_states: FlowStates
    read_at: float

    def at(self, now: float) -> FlowStates:
        """These states, with the time that the database's clock shows at `now` by the process's clock."""
        return self.flow_states._replace(at=self.flow_states.at + timedelta(seconds=now - self.read_at))


class Surveys:
    """The last survey of each database: an operator's pause in one database holds for all."""

    def __init__(self) -> None:
        self._of: dict[str, Survey] = {}
        self._flows: dict[str, SharedFlowMonitor] = {}

    def join(self, database: str, flow: "SharedFlowMonitor") -> None:
        self._flows[database] = flow

    def forget(self, database: str) -> None:
        self._of.pop(database, None)
        self._flows.pop(database, None)

    def learn(self, database: str, survey: Survey) -> None:
        """Note a survey. A change of its pauses is applied to the other databases at once."""
        before, self._of[database] = self._of.get(database), survey
        if _paused(before) != _paused(survey):
            for other in self._flows.keys() - {database}:
                self._flows[other].refresh_again()

    def of(self, database: str) -> Survey | None:
        return self._of.get(database)

    def with_all(self, flow_states: FlowStates) -> FlowStates:
        """The states of one database, with the destinations that only others have."""
        missing = {name for each in self._of.values() for name in each.flow_states.of} - flow_states.of.keys()
        return FlowStates(flow_states.at, {**dict.fromkeys(sorted(missing), UNTHROTTLED), **flow_states.of})

    def over_all(self, database: str, name: str, state: FlowState, at: datetime, now: float) -> FlowState:
        """The state of a destination in one database, with the pauses and cooldowns of the other databases.

        at: the time now by this database's clock. now: by the process's clock.
        """
        for other, survey in self._of.items():
            if other != database and name in survey.flow_states.of:
                theirs = survey.flow_states.of[name]
                ahead = at - survey.at(now).at  # each database has a clock of its own
                state = replace(
                    state,
                    paused=state.paused or theirs.paused,
                    cooldown_until=_later(state.cooldown_until, theirs.cooldown_until, ahead),
                    resumed_at=_later(state.resumed_at, theirs.resumed_at, ahead),
                )
        return state


def _later(ours: datetime | None, theirs: datetime | None, ahead: timedelta) -> datetime | None:
    """The later of two instants by our database's clock. ahead: how far it is ahead of the other database's clock."""
    return max(filter(None, (ours, None if theirs is None else theirs + ahead)), default=None)


def _paused(survey: Survey | None) -> set[str]:
    return set() if survey is None else {name for name, state in survey.flow_states.of.items() if state.paused}


class Share:
    """What one database's dispatcher has of the shared limits."""

    def __init__(self, database: str, shared: SharedLimits, surveys: Surveys) -> None:
        self.database = database
        self.shared = shared
        self.surveys = surveys

    def parts(self, lease: timedelta) -> Parts:
        """lease: of the dispatcher."""
        return Parts(
            flow=partial(SharedFlowMonitor, self),
            scheduler=partial(SharingScheduler, self, lease),
            queue=partial(SharingQueue, self),
        )

    def leave(self) -> None:
        """Leave the limits to the other databases. A pause that an operator has recorded here still holds for them."""
        self.shared.forget(self.database)

    def forget(self) -> None:
        """Forget the database, and its pauses."""
        self.surveys.forget(self.database)


class SharedFlowMonitor(FlowMonitor):
    """Also reports each outcome to the shared limits, and takes over pauses and cooldowns of the other databases."""

    def __init__(
        self, share: Share, limits: Mapping[str, Limits], *, clock: Callable[[], float], rng: random.Random
    ) -> None:
        super().__init__(limits, clock=clock, rng=rng)
        self._share = share
        share.surveys.join(share.database, self)

    def hear(self, entry: ClaimedEntry, outcome: Outcome) -> None:
        super().hear(entry, outcome)
        news = news_of(outcome, entry.destination)
        self._share.shared.hear(entry.destination, news, entry.lease_token)

    def end(self, entry: ClaimedEntry, *, was_released: bool) -> None:
        super().end(entry, was_released=was_released)
        self._share.shared.end_probe(entry.destination, entry.lease_token)

    def refresh(self, flow_states: FlowStates) -> None:
        self._share.surveys.learn(self._share.database, Survey(flow_states, self._clock()))
        super().refresh(self._share.surveys.with_all(flow_states))

    def refresh_again(self) -> None:
        """Store the states of the last survey, with the present pauses of the other databases."""
        survey = self._share.surveys.of(self._share.database)
        if survey is not None:
            super().refresh(self._share.surveys.with_all(survey.at(self._clock())))
            self._share.shared.wake(self._share.database)

    def see(self, name: str, state: FlowState, flow_states: FlowStates) -> None:
        at, now = flow_states.at, self._clock()
        state = self._share.surveys.over_all(self._share.database, name, state, at, now)
        super().see(name, state, flow_states)


class SharingScheduler(Scheduler):
    """Claims only what the shared limits leave to this database."""

    def __init__(
        self, share: Share, lease: timedelta, *arguments: Any, shut_until: dict[str, float], **settings: Any
    ) -> None:
        super().__init__(*arguments, shut_until=shut_until, **settings)
        self._share = share
        self._lease = lease
        self._shut = shut_until

    def take(self, now: float) -> list[Quota]:
        asked = super().take(now)
        left, called_left = max_entries(asked), max_callbacks(asked)
        quotas: list[Quota] = []
        for quota in asked:
            shared = self._shared(quota, left, called_left, now)
            left -= shared.reserved
            called_left -= shared.called_back or 0
            if shared.permits:
                quotas.append(shared)
        return quotas

    def _shared(self, quota: Quota, left: int, called_left: int, now: float) -> Quota:
        """What the shared limits leave of a quota. left, called_left: of the claim's totals, for this quota and the next ones."""
        if quota.known:  # nothing is sent
            return quota
        name = quota.destination
        ahead = self.ahead.entries(name, now) if self.claims_ahead and quota.called_back is None else 0
        permits, again_in = self._share.shared.take(self._share.database, name, quota.permits, now, ahead=ahead)
        if again_in is not None:
            self._shut[name] = max(self._shut.get(name, 0.0), now + again_in)
        elif not permits and self._share.shared.is_crowded(self._share.database):
            self._turns.owe([name])
        reserved = min(left, permits)
        self._free(name, quota.permits - permits, quota.reserved - reserved)
        if quota.called_back is None:
            return quota._replace(permits=permits, reserved=reserved)
        called = min(called_left, permits)
        self._pace.give_back(name, quota.permits - permits, in_all=quota.called_back - called)
        return quota._replace(permits=permits, reserved=reserved, called_back=called)

    def found(self, quotas: Sequence[Quota], claimed: Sequence[ClaimedEntry], **noted: Any) -> bool:
        self._end_claim(quotas, claimed)
        return super().found(quotas, claimed, **noted)

    def give_all_back(self, quotas: Sequence[Quota]) -> None:
        self._end_claim(quotas, ())
        super().give_all_back(quotas)

    def _end_claim(self, quotas: Sequence[Quota], claimed: Sequence[ClaimedEntry]) -> None:
        tokens: dict[str, list[UUID]] = {}
        for entry in claimed:
            if not entry.is_known:
                tokens.setdefault(entry.destination, []).append(entry.lease_token)
        for quota in [quota for quota in quotas if not quota.known]:
            name = quota.destination
            self._share.shared.end_claim(self._share.database, name, quota.permits, tokens.get(name, ()), self._lease)


class SharingQueue(SendQueue):
    """Also counts the sends of all databases to a destination. An entry whose claim came late waits for a permit."""

    def __init__(self, share: Share, permits_of: Callable[[str], int], clock: Callable[[], float]) -> None:
        super().__init__(permits_of, clock)
        self._share = share

    def is_free(self, name: str) -> bool:
        return super().is_free(name) and self._share.shared.is_free(name)

    def begin(self, attempt: Attempt) -> bool:
        entry, shared = attempt.entry, self._share.shared
        if shared.may_begin(entry.destination, entry.lease_token):
            begins = super().begin(attempt)
        else:  # it was claimed before another database's failure opened the breaker
            self.hold(attempt)
            begins = False
        (shared.begin if begins else shared.wait)(self._share.database, entry.destination)
        return begins

    def end(self, name: str) -> None:
        super().end(name)
        self._share.shared.end(self._share.database, name)

    def next(self, name: str) -> Attempt | None:
        shared, database = self._share.shared, self._share.database
        attempt = super().next(name) if shared.may_follow(database, name) else None
        if attempt is not None:
            shared.begin(database, name)
        elif name in self.destinations:
            shared.wait(database, name)
        return attempt
