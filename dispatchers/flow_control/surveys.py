"""The pauses and cooldowns that a process has read in each of its databases: a pause in one database holds for all. No I/O."""

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from dispatchers.flow_control.shared import SharedLimits
from dispatchers.flow_control.state import UNTHROTTLED, FlowState, FlowStates


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
        self._refresh: dict[str, Callable[[], None]] = {}

    def join(self, database: str, refresh: Callable[[], None]) -> None:
        """refresh: called if an operator has changed a pause in another database."""
        self._refresh[database] = refresh

    def forget(self, database: str) -> None:
        self._of.pop(database, None)
        self._refresh.pop(database, None)

    def learn(self, database: str, survey: Survey) -> None:
        """Note a survey. A change of its pauses is applied to the other databases at once."""
        before, self._of[database] = self._of.get(database), survey
        if _paused(before) != _paused(survey):
            for other in self._refresh.keys() - {database}:
                self._refresh[other]()

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
    """The part of one database's dispatcher in the limits that several databases share. lease: of the dispatcher."""

    def __init__(self, database: str, limits: SharedLimits, surveys: Surveys, lease: timedelta) -> None:
        self.database = database
        self.limits = limits
        self.surveys = surveys
        self._lease = lease

    def end_claim(self, name: str, permits: int, tokens: Collection[UUID]) -> None:
        """End the reservation of `permits`. tokens: the lease tokens of the claimed entries."""
        self.limits.end_claim(self.database, name, permits, tokens, self._lease)

    def detach(self) -> None:
        """Leave the limits to the other databases. A pause that an operator has recorded here still holds for them."""
        self.limits.forget(self.database)

    def forget(self) -> None:
        """Forget the database, and its pauses."""
        self.surveys.forget(self.database)
