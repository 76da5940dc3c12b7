"""The pauses and cooldowns that a process has read in each of its databases: a pause in one database holds for all. No I/O."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from dispatchers.flow_control.shared import SharedLimits
from dispatchers.flow_control.state import UNTHROTTLED, FlowState, FlowStates

_NO_FACTS: Mapping[str, "Fact"] = MappingProxyType({})


class Survey(NamedTuple):
    """The flow states that a sweep of one database has read. read_at: when, by the process's clock."""

    flow_states: FlowStates
    read_at: float

    def at(self, now: float) -> FlowStates:
        """These states, with the time that the database's clock shows at `now` by the process's clock."""
        return self.flow_states._replace(at=self.flow_states.at + timedelta(seconds=now - self.read_at))

    def fact(self, state: FlowState) -> "Fact":
        """What one of its states says for all databases: each database has a clock of its own."""
        start = self.flow_states.at - timedelta(seconds=self.read_at)
        return Fact(
            state.paused,
            None if state.cooldown_until is None else state.cooldown_until - start,
            None if state.resumed_at is None else state.resumed_at - start,
        )


class Fact(NamedTuple):
    """What one database's row says of a destination for all databases. The instants are those of the process's clock."""

    paused: bool
    cooldown_until: timedelta | None
    resumed_at: timedelta | None


class Surveys:
    """The last survey of each database: an operator's pause in one database holds for all."""

    def __init__(self) -> None:
        self._of: dict[str, Survey] = {}
        self._facts: dict[str, dict[str, Fact]] = {}  # by destination and database
        self._refresh: dict[str, Callable[[Collection[str]], None]] = {}

    def join(self, database: str, refresh: Callable[[Collection[str]], None]) -> None:
        """refresh: called with the destinations for which an operator has changed a pause in another database."""
        self._refresh[database] = refresh

    def forget(self, database: str) -> None:
        self._remember(database, self._of.pop(database, None), None)
        self._refresh.pop(database, None)

    def learn(self, database: str, survey: Survey) -> None:
        """Note a survey. A change of its pauses is applied to the other databases at once."""
        before, self._of[database] = self._of.get(database), survey
        self._remember(database, before, survey)
        changed = {name for name in _paused(before) ^ _paused(survey) if not self._is_paused_elsewhere(database, name)}
        if changed:
            for refresh in [refresh for other, refresh in self._refresh.items() if other != database]:
                refresh(changed)

    def _is_paused_elsewhere(self, database: str, name: str) -> bool:
        return any(fact.paused for other, fact in self._facts.get(name, _NO_FACTS).items() if other != database)

    def _remember(self, database: str, before: Survey | None, survey: Survey | None) -> None:
        for name in () if before is None else before.flow_states.of:
            of_name = self._facts.get(name, {})
            of_name.pop(database, None)
            if not of_name:
                self._facts.pop(name, None)
        if survey is not None:
            for name, state in survey.flow_states.of.items():
                if state.paused or state.cooldown_until is not None or state.resumed_at is not None:
                    self._facts.setdefault(name, {})[database] = survey.fact(state)

    def of(self, database: str) -> Survey | None:
        return self._of.get(database)

    def with_all(self, flow_states: FlowStates) -> FlowStates:
        """The states of one database, with the destinations about which only others have a fact."""
        missing = self._facts.keys() - flow_states.of.keys()
        return FlowStates(flow_states.at, {**dict.fromkeys(sorted(missing), UNTHROTTLED), **flow_states.of})

    def over_all(self, database: str, name: str, state: FlowState, at: datetime, now: float) -> FlowState:
        """The state of a destination in one database, with the pauses and cooldowns of the other databases.

        at: the time now by this database's clock. now: by the process's clock.
        """
        theirs = [fact for other, fact in self._facts.get(name, _NO_FACTS).items() if other != database]
        if not theirs:
            return state
        start = at - timedelta(seconds=now)  # of the process's clock, by this database's clock
        return replace(
            state,
            paused=state.paused or any(fact.paused for fact in theirs),
            cooldown_until=_latest(state.cooldown_until, start, (fact.cooldown_until for fact in theirs)),
            resumed_at=_latest(state.resumed_at, start, (fact.resumed_at for fact in theirs)),
        )


def _latest(ours: datetime | None, start: datetime, theirs: Iterable[timedelta | None]) -> datetime | None:
    """The latest of these instants by our database's clock."""
    latest = max((each for each in theirs if each is not None), default=None)
    return max(filter(None, (ours, None if latest is None else start + latest)), default=None)


def _paused(survey: Survey | None) -> set[str]:
    return set() if survey is None else {name for name, state in survey.flow_states.of.items() if state.paused}


class Share:
    """The part of one database's dispatcher in the limits that several databases share. lease: of the dispatcher."""

    def __init__(self, database: str, limits: SharedLimits, surveys: Surveys, lease: timedelta) -> None:
        self.database = database
        self.limits = limits
        self.surveys = surveys
        self._lease = lease

    def end_claim(self, name: str, permits: int, tokens: Collection[UUID]) -> None:
        """End the reservation of `permits`. tokens: the lease tokens of the claimed entries."""
        self.limits.end_claim(self.database, name, permits, tokens, self._lease)

    @property
    def waiting(self) -> list[str]:
        """The destinations of which this database may claim less than it wants."""
        return self.limits.waiting(self.database)

    def detach(self) -> None:
        """Leave the limits to the other databases. A pause that an operator has recorded here still holds for them."""
        self.limits.forget(self.database)

    def forget(self) -> None:
        """Forget the database, and its pauses."""
        self.surveys.forget(self.database)
