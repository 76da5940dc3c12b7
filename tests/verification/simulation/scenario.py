"""Everything of one run: services, processes, the app, people, and what goes wrong."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import sqlalchemy as sa

from dispatchers import Breaker, Limits
from dispatchers.errors import Suspended
from dispatchers.process.dispatcher_work import DispatcherWork, Simulation
from dispatchers.time_limits import FOREVER
from simulation.app import CALLED_BACK, OUTBOX, WINDOW, App
from simulation.crowd import Crowd
from simulation.database import START, Database, RemoteStore
from simulation.hints import Hints
from simulation.invariants import Invariants
from simulation.operators import People
from simulation.services import FREEZES, BatchingAdapter, Service, SimulatedAdapter
from simulation.tenant_invariants import STARVED_SECONDS
from simulation.tenants import Hub, Tenants
from simulation.trace import LEASE, MARGIN, Declared, InvariantViolated
from simulation.verified import violations
from simulation.world import Process, World

FAULTS_SECONDS = 40.0
QUIET_SECONDS = 1.0  # as long as a process may take to begin what it has in hand
END_SECONDS = 4000.0  # nothing waits longer than this once the faults have stopped


class Defect(AssertionError):
    """No invariant was broken, but an exception came out of the dispatcher's own code."""


class Scenario:
    """Everything of one run."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.rng = self.world.rng
        self.invariants = Invariants(self.world, START)
        self.crowd = Crowd(seed)
        self.hints = Hints(seed, is_crowded=self.crowd.is_here)
        self.database = Database(self.world, self.invariants, self.crowd, self.hints)
        groups = self.rng.choice([0.0, 0.0, 0.7, 1.0])
        groups = 1.0 if self.crowd.is_ordered else groups
        self.services = self._services(shows=self.rng.random() < (0.7 if groups else 0.4))
        self.people = People(self.world, self.invariants, self.database)
        self.app = App(self.world, self.invariants, self.database, self.people, groups)
        self.defects: list[str] = []
        self.has_restore_due = not groups and self.rng.random() < 0.4
        self.is_mixed = not self.has_restore_due and self.rng.random() < 0.15
        self.is_of_two_deploys = self.rng.random() < 0.3  # in the second process a callback is missing, or all are
        self.limits = self.invariants.flow.limits = self._limits()
        sends_in_batches = (
            Random(f"batches {seed}").random() < 0.4
        )  # of its own, so that the other draws stay as they are
        self.tenants = Tenants(seed, is_crowded=self.crowd.is_here)
        self._others = [Service(self.world, self.invariants, declared, 1.0) for declared in self.crowd.declared()]
        self._others += [Hub(self.world, self.invariants, declared, self.tenants) for declared in self.tenants.declared]
        self._adapter = BatchingAdapter if sends_in_batches else SimulatedAdapter
        self._quiet_since: float | None = None

    def play(self) -> None:
        self.app.begin()
        self.people.begin([service.declared.name for service in self.services])
        self.invariants.declared |= {declared.name: declared for declared in self.tenants.declared}
        self.hints.begin(self.world, self.invariants)
        self.invariants.hints.has_budgets = self.crowd.has_budgets
        self.invariants.hints.called_back = [*CALLED_BACK, *self.tenants.called_back]
        self.tenants.begin(self.app, self.database, self.invariants)
        self._misfortunes()
        for number in range(self.rng.choice([1, 2, 2, 3])):
            comes_late = self.is_of_two_deploys and not self.has_restore_due and self.rng.random() < 0.5
            if number == 0 and comes_late:
                self.world.at(self.rng.random() * 5, self._start, "p0", 0)  # the newer deploy comes later
            else:
                self._start(f"p{number}", number)
        self.world.run_until(self._nothing_is_left, latest=FAULTS_SECONDS)
        self._let_the_faults_stop()
        if not self.world.run_until(self._is_over, latest=FAULTS_SECONDS + END_SECONDS):
            self._check_processes()
            raise InvariantViolated("the faults stopped, and not every entry ends")
        self._check()

    def _nothing_is_left(self) -> bool:
        """Whether no fault that may come can do anything any more, and has not for a while: it is not worth waiting for."""
        waiting = self.database.store.queue.keys() - self.invariants.never
        if self.app.to_come or self.tenants.to_come or waiting or self.has_restore_due or self._anything_under_way():
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = self.world.now
        return self.world.now - self._quiet_since > QUIET_SECONDS

    def _is_over(self) -> bool:
        return self.invariants.all_ended() and not self._anything_under_way()

    def _anything_under_way(self) -> bool:
        """Whether a request is, or a process is frozen that may yet do something."""
        is_frozen = any(process.alive and self.world.now < process.frozen_until for process in self.world.processes)
        return is_frozen or any(self.invariants.is_under_way(id) for id in self.invariants.traces)

    def _check(self) -> None:
        self.invariants.check_all([*CALLED_BACK, *self.tenants.called_back])
        self._check_processes()
        if found := violations(self.database.store):
            raise InvariantViolated(f"outbox verify: {found[0]}")

    def _check_processes(self) -> None:
        problems = self.defects + [problem for process in self.world.processes for problem in _deaths(process)]
        if problems:
            raise Defect(problems[0])

    def ends(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for state in self.database.store.states():
            found[state] = found.get(state, 0) + 1
        return found

    # --- the services

    def _services(self, *, shows: bool) -> list[Service]:
        max_attempts, max_age = self.rng.choice([12, 6, 3]), timedelta(seconds=self.rng.choice([90, 60, 20]))
        blocks = self.rng.random() < 0.4

        def service(name: str, window: Any, at_least_once: bool = False) -> Service:
            can_look_up = shows and name in ("pay", "mail")
            declared = Declared(name, window, at_least_once, max_attempts, max_age, can_look_up, blocks)
            self.invariants.declared[name] = declared
            return Service(self.world, self.invariants, declared, self.rng.uniform(0.99, 1.01))

        return [
            service("pay", WINDOW),
            service("crm", FOREVER),
            service("mail", None),
            service("sms", None, at_least_once=True),
        ]

    def _limits(self) -> dict[str, Limits]:
        """In some runs a destination that fails twice is left alone for a while, by everybody; in some it has a rate, or
        permits that all share.
        """
        breaker = Breaker(failures=2, wait=timedelta(seconds=1), max_wait=timedelta(seconds=8))
        given = Limits(breaker=breaker) if self.rng.random() < 0.3 else Limits()
        if self.rng.random() < 0.15:
            given = replace(given, rate=self.rng.choice([0.3, 1.0, 4.0]), burst=self.rng.choice([None, 1, 2]))
        if self.rng.random() < 0.15:
            given = replace(given, total_concurrency=self.rng.choice([1, 2, 3]))
        return {service.declared.name: given for service in self.services}

    # --- processes

    def _start(self, name: str, number: int) -> None:
        process = Process(  # type: ignore[abstract]  # only what asyncio asks of it
            self.world, name, start=self.rng.uniform(0, 1e6), rate=self.rng.uniform(0.99, 1.01)
        )
        stopping = asyncio.Event()
        process.call_soon(lambda: process.create_task(self._live(process, number, stopping)))
        if self.world.faulty:
            self._draw_fate(process)
            if self.rng.random() < 0.2:
                self.world.at(self.rng.random() * 15, process.call_soon, stopping.set)
        process.at_death.append(
            lambda: self.world.at(self.rng.choice([0.1, 1.0, 5.0, 16.0]), self._start, name, number)
        )

    def _draw_fate(self, process: Process) -> None:
        fate = self.rng.random()
        if fate < 0.45:
            process.dies_after = self.rng.choice([10, 30, 60, 100, 200, 400]) + self.rng.randrange(40)
        elif fate < 0.7:
            process.freezes_after = self.rng.choice([10, 30, 60, 100, 200]) + self.rng.randrange(40)
            process.freezes_for = self.rng.choice(FREEZES)

    async def _live(self, process: Process, number: int, stopping: asyncio.Event) -> None:
        store = RemoteStore(self.database, process)
        pinned = self._pinned(number)
        dispatcher = DispatcherWork(
            outbox=OUTBOX,
            include=[self.app.callbacks([*self._called_back(number), *self.crowd.idle, *self.tenants.called_back])],
            adapters={
                service.declared.name: self._adapter(service, self.app.keys, self.app.poison, pinned=pinned)
                for service in self._serves(number)
            },
            limits=self.limits | self.tenants.limits,
            lease=LEASE,
            margin=MARGIN,
            poll=timedelta(seconds=2),
            grace=timedelta(seconds=3),
            **self.crowd.settings,
            simulation=Simulation(store=store, clock=process.time, rng=Random(self.rng.getrandbits(64))),
        )
        self.invariants.hints.serves[process] = {service.declared.name for service in self._serves(number)}
        self.invariants.hints.is_stopping[process] = stopping.is_set
        process.call_soon(self._abandon_one_day, process, dispatcher, stopping)
        with suppress(sa.exc.OperationalError):  # the grace was over before the database was back
            if self.rng.random() < 0.15:
                await self._run_repeatedly(dispatcher, stopping)
            else:
                await dispatcher.pump(stopping)
        process.die()

    async def _run_repeatedly(self, dispatcher: DispatcherWork, stopping: asyncio.Event) -> None:
        """As from a schedule: `run_once`, again and again."""
        while not stopping.is_set():
            with suppress(sa.exc.OperationalError, Suspended):
                await dispatcher.run_once()
            await asyncio.sleep(self.rng.choice([0.3, 1.0, 3.0]))

    def _abandon_one_day(self, process: Process, dispatcher: DispatcherWork, stopping: asyncio.Event) -> None:
        """A second signal: what is in flight is left where it is."""

        async def abandon() -> None:
            stopping.set()
            await dispatcher.abandon()

        if self.world.faulty and self.rng.random() < 0.1:
            self.world.at(self.rng.random() * 15, process.call_soon, lambda: process.create_task(abandon()))

    def _called_back(self, number: int) -> Collection[str]:
        """In some runs the second process is of a deploy without some of the callbacks."""
        if self.is_of_two_deploys and number == 1:
            return CALLED_BACK[:1] if self.is_mixed else ()
        return CALLED_BACK

    def _serves(self, number: int) -> list[Service]:
        """In some runs the second process is of a deploy without some of the adapters."""
        return self._others + (self.services[:-2] if self.is_mixed and number == 1 else self.services)

    def _pinned(self, number: int) -> str:
        """In some runs the second process is of a deploy that sends in another form."""
        return "v2" if self.is_mixed and number == 1 else ""

    # --- faults

    def _misfortunes(self) -> None:
        chaos = self.rng.choice([0.3, 0.6] if self.app.groups else [0.0, 0.1, 0.3, 0.6])
        for service in self.services:
            service.chaos = chaos
        self.database.chaos = self.rng.choice([0.0, 0.01, 0.05])
        if self.rng.random() < 0.4:
            self.world.at(self.rng.random() * FAULTS_SECONDS, self._take_the_database_away)
        if self.has_restore_due:
            self.world.at(3 + self.rng.random() * 20, self._back_up)

    def _take_the_database_away(self) -> None:
        self.database.down_until = self.world.now + self.rng.choice([0.5, 3.0, 8.0])

    def _back_up(self) -> None:
        self.database.back_up()
        self.world.at(self.rng.choice([2.0, 6.0, 12.0]), self._set_the_database_back)

    def _set_the_database_back(self) -> None:
        self.has_restore_due = False
        if self.world.faulty:
            self.database.set_back()
            self.people.hear_of_restore()
            self.app.hear_of_restore()

    def _let_the_faults_stop(self) -> None:
        self.world.faulty = False
        self.people.go_home()
        self.database.chaos = 0.0
        for service in self.services:
            service.chaos = 0.0
        for process in self.world.processes:
            process.dies_after = process.freezes_after = None
        if self.tenants.is_here:
            refused = self.tenants.still_refused(self.world.now)
            self.world.at(STARVED_SECONDS, self.invariants.tenants.check_none_starves, refused)


def _deaths(process: Process) -> Iterator[str]:
    """Tasks of ours that died of an exception that was not expected; `run_once` raises what the database raises."""
    for task in process.tasks:
        if task.done() and not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, sa.exc.OperationalError):
                yield f"{task.get_coro().__qualname__}: {error!r}"  # type: ignore[union-attr]
