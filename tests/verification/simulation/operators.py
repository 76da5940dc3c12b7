"""What people do: they look at what is uncertain or blocked, and say something of it, or nothing."""

from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

from dispatchers.admin.decide.rules import Verdict
from simulation import reference_history
from simulation import reference_operators as reference_people
from simulation.database import ENV, START, Database
from simulation.invariants import Invariants
from simulation.reference_rows import Refused
from simulation.world import World

HESITATE = [0.0, 0.3, 2.0, 12.0, 20.0]  # seconds; after the last of them a window may have passed


class People:
    """Those who decide, as often as a run's seed lets them, and while its faults last."""

    def __init__(self, world: World, invariants: Invariants, database: Database) -> None:
        self.world = world
        self.rng = world.rng
        self.invariants = invariants
        self.database = database
        self._words_left = self.rng.choice([0, 1, 2, 4])
        self._releases_left = self.rng.choice([0, 4, 4])
        invariants.on_uncertain = self._hear_of_doubt
        invariants.groups.on_block = self._hear_of_block

    def begin(self, destinations: list[str]) -> None:
        """In some runs one destination is paused for a while."""
        if self.rng.random() < 0.4:
            self.world.at(self.rng.random() * 12, self._pause, self.rng.choice(destinations))

    def go_home(self) -> None:
        """Nothing is left that only they could resume."""
        self._resume_after_restore()
        for destination in [name for name, row in self.database.store.flow.items() if row.paused]:
            self._resume(destination)

    def cancel(self, id: UUID) -> None:
        _unless_refused(lambda: reference_people.cancel(self.database.store, id, "changed their mind"))
        self.database.hints.decided()

    # --- what is uncertain

    def _hear_of_doubt(self) -> None:
        if self._words_left:
            self._words_left -= 1
            self.world.at(self.rng.choice(HESITATE), self._resolve)

    def _resolve(self) -> None:
        """Say something of one of the uncertain entries, if there are any."""
        store = self.database.store
        uncertain = [id for id, row in store.queue.items() if row.state == "uncertain" and id not in store.locked]
        if not uncertain or not self.world.faulty:
            return
        id = self.rng.choice(uncertain)
        if self.rng.random() < 0.6:
            _unless_refused(lambda: reference_people.resolve(store, id, "send_again", "a customer waits"))
        elif not self.invariants.is_under_way(id):
            verdict: Verdict = "happened" if self.invariants.trace(id).effects.total() > 0 else "did_not_happen"
            _unless_refused(lambda: reference_people.resolve(store, id, verdict, "looked at it"))
        self.database.hints.decided()

    # --- groups

    def _hear_of_block(self, ordering_key: str) -> None:
        if self._releases_left:
            self._releases_left -= 1
            self.world.at(self.rng.choice(HESITATE[:3]), self._release, ordering_key)

    def _release(self, ordering_key: str) -> None:
        if self.world.faulty and ordering_key in self.database.store.blocked_group:
            reference_people.release_group(self.database.store, ordering_key, "informed the customer")
            self.invariants.groups.released(ordering_key)
            self.database.hints.decided()

    # --- a restore

    def hear_of_restore(self) -> None:
        self.world.at(self.rng.choice([1.0, 4.0, 12.0, 16.0]), self._resume_after_restore)

    def _resume_after_restore(self) -> None:
        store = self.database.store
        if reference_history.is_suspended(store):
            since = (
                START if store.meta.identity is None else None
            )  # a backup older than the first stored identity names no time
            reference_history.resume(store, ENV, "the disk was lost", since)
            self.invariants.restore.resumed()

    # --- destinations

    def _pause(self, destination: str) -> None:
        reference_people.pause(self.database.store, destination)
        self.invariants.flow.paused(destination)
        self.world.at(self.rng.choice([2.0, 12.0, 25.0]), self._resume, destination)

    def _resume(self, destination: str) -> None:
        with suppress(Refused):
            reference_people.resume(self.database.store, destination)
            self.invariants.flow.resumed(destination)
            self.database.hints.decided()


def _unless_refused(decide: Callable[[], None]) -> None:
    with suppress(Refused):
        decide()
