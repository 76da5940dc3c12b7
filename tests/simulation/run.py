"""One run: a few entries, services, processes and people, drawn from a seed; then the faults stop, and everything must end."""

import asyncio
import gc
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any
from uuid import UUID

import sqlalchemy as sa

import outbox
from dispatchers import Breaker, Dispatcher, Limits, Operations
from dispatchers.callbacks import Settlement
from dispatchers.delivery import FOREVER, NATIVE
from outbox.keys import Tag, derive_tag
from outbox.schema import SCHEMA_VERSION
from simulation.database import ENV, START, AppSession, Database, RemoteStore, fields_of
from simulation.promises import LEASE, MARGIN, BrokenPromise, Declared, Promises
from simulation.reference import Entry, Refused
from simulation.services import FREEZES, Service, SimulatedAdapter
from simulation.world import Process, World

FAULTS_SECONDS = 40.0
QUIET_SECONDS = 1.0  # as long as a process may take to begin what it has in hand
END_SECONDS = 4000.0  # nobody waits longer than this once the faults have stopped
EPOCHS = 8
WINDOW = timedelta(seconds=20)

KEYRING = outbox.Keyring({"k1": bytes(range(32))}, current="k1")
OUTBOX = outbox.Outbox(KEYRING, env=ENV)


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a seed. trace: a digest of every step. ends: how many entries ended how."""

    seed: int
    trace: str
    ends: dict[str, int]
    log: list[str]


class Defect(AssertionError):
    """No promise was broken, but an exception came out of the dispatcher's own code."""


class BrokenRun(AssertionError):
    """A promise was broken, or something else is; the text says which, by which seed, and what led to it."""

    def __init__(self, seed: int, problem: BaseException, log: list[str]) -> None:
        told = "\n".join(log[-60:])
        super().__init__(
            f"seed {seed}: {problem}\n{told}\nto see it again: python3 dev.py simulate --from {seed} --seeds 1"
        )
        self.seed = seed
        self.problem = problem


def simulate(seed: int) -> Run:
    """Play one seed to its end. Raises `BrokenRun`."""
    scene = Scene(seed)
    with _quiet(scene), _uncollected():
        try:
            scene.play()
        except Exception as problem:
            raise BrokenRun(seed, problem, scene.promises.log) from problem
        finally:
            scene.world.close()
    log = scene.promises.log
    trace = hashlib.sha256("\n".join([*log, str(scene.world.steps)]).encode()).hexdigest()
    return Run(seed, trace, scene.ends(), log)


@contextmanager
def _quiet(scene: "Scene") -> Iterator[None]:
    """Hear of our own defects, and of nothing else, in the dispatcher's log."""
    log = logging.getLogger("outbox.dispatcher")
    handler, level, propagates = _Defects(scene), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which takes a fifth of a run and finds little in it before its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Defects(logging.Handler):
    def __init__(self, scene: "Scene") -> None:
        super().__init__()
        self._scene = scene

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        is_ours = "nothing could be decided" in record.msg or "cannot be made into a delivery" in record.msg
        if is_ours and not isinstance(problem, sa.exc.OperationalError):
            self._scene.defects.append(f"{record.getMessage()}: {problem!r}")


class Scene:
    """Everything of one run."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.chance = self.world.chance
        self.promises = Promises(self.world, START)
        self.database = Database(self.world, self.promises)
        self.services = self._services()
        self.defects: list[str] = []
        self.poison: set[UUID] = set()
        self.faulty = True
        self.words_left = self.chance.choice([0, 0, 1, 2, 4])
        self.callbacks_fail = self.chance.choice([0.0, 0.2, 0.5])
        self.is_mixed = self.chance.random() < 0.15
        self.limits = self._limits()
        self._keys: dict[UUID, list[str]] = {}
        self._to_come = self.chance.choice([1, 2, 2, 3, 4])
        self._quiet_since: float | None = None

    def play(self) -> None:
        for number in range(self._to_come):
            self.world.at(self.chance.random() * 5, self._enqueue, number)
        self._misfortunes()
        for number in range(self.chance.choice([1, 2, 2, 3])):
            self._start(f"p{number}", number)
        self.world.run_until(self._nothing_is_left, latest=FAULTS_SECONDS)
        self._let_the_faults_stop()
        if not self.world.run_until(self._is_over, latest=FAULTS_SECONDS + END_SECONDS):
            raise BrokenPromise("the faults stopped, and not every entry ends")
        self._check()

    def _nothing_is_left(self) -> bool:
        """Whether no fault that may come can do anything any more, and has not for a while: it is not worth waiting for."""
        waiting = self.database.store.queue.keys() - self.promises.never
        if self._to_come or waiting or self._anything_under_way():
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = self.world.now
        return self.world.now - self._quiet_since > QUIET_SECONDS

    def _is_over(self) -> bool:
        return self.promises.all_ended() and not self._anything_under_way()

    def _anything_under_way(self) -> bool:
        """Whether a request is, or a process is frozen that may yet do something."""
        is_frozen = any(process.alive and self.world.now < process.frozen_until for process in self.world.processes)
        return is_frozen or any(self.promises.is_under_way(id) for id in self.promises.stories)

    def _check(self) -> None:
        self.promises.check_all(lambda operation: operation.startswith("pay"))
        problems = self.defects + [problem for process in self.world.processes for problem in _deaths(process)]
        if problems:
            raise Defect(problems[0])

    def ends(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for state in self.database.store.states():
            found[state] = found.get(state, 0) + 1
        return found

    # --- the app

    def _services(self) -> list[Service]:
        attempts_max, age_max = self.chance.choice([12, 6, 3]), timedelta(seconds=self.chance.choice([90, 60, 20]))

        shows = self.chance.random() < 0.4

        def service(name: str, window: Any, at_least_once: bool = False) -> Service:
            can_look = shows and name in ("pay", "mail")
            declared = Declared(name, window, at_least_once, attempts_max, age_max, can_look)
            return Service(self.world, self.promises, declared, self.chance.uniform(0.99, 1.01))

        return [
            service("pay", WINDOW),
            service("crm", FOREVER),
            service("mail", None),
            service("sms", None, at_least_once=True),
        ]

    def _limits(self) -> dict[str, Limits]:
        """In some runs a destination that fails twice is left alone for a while, by everybody."""
        breaker = Breaker(failures=2, wait=timedelta(seconds=1), wait_max=timedelta(seconds=8))
        given = Limits(breaker=breaker) if self.chance.random() < 0.3 else Limits()
        return {service.declared.name: given for service in self.services}

    def _enqueue(self, number: int) -> None:
        self._to_come -= 1
        operation = self.chance.choice(
            ["pay.charge"] * 4 + ["crm.upsert", "mail.send", "mail.send", "sms.send", "fax.send"]
        )
        entry = self._entry(operation, f"order:{number}")
        draw = self.chance.random()
        if draw < 0.04:
            self.poison.add(entry.id)
        self.database.store.enqueue(entry)
        if operation.startswith("fax") or entry.schema_version > SCHEMA_VERSION:
            self.promises.never.add(entry.id)
        if self.chance.random() < 0.25:
            self.world.at(self.chance.random() * 20, self._cancel, entry.id)

    def _entry(self, operation: str, parent: str) -> Entry:
        id = UUID(int=self.chance.getrandbits(128))
        version = SCHEMA_VERSION + (self.chance.random() < 0.03)
        return self._written(
            Entry(
                id=id,
                operation=operation,
                tag=b"",
                parent=parent,
                schema_version=version,
                created_at=self.database.now(),
            )
        )

    def _written(self, blank: Entry) -> Entry:
        return replace(blank, tag=derive_tag(KEYRING, "k1", fields_of(blank)))

    def keys(self, id: UUID) -> list[str]:
        """The keys that the entry may be sent under, by epoch."""
        if id not in self._keys:
            fields = fields_of(self.database.store.entries[id])
            self._keys[id] = [NATIVE.encode(Tag(derive_tag(KEYRING, "k1", fields, epoch))) for epoch in range(EPOCHS)]
        return self._keys[id]

    def _cancel(self, id: UUID) -> None:
        """By the app, or by a person through a dispatcher."""
        if id in self.database.store.locked or not self.faulty:
            return
        if self.chance.random() < 0.5:
            if self.database.store.cancel(id):
                self.promises.cancelled(id)
        else:
            _unless_refused(lambda: self.database.store.ask_to_cancel(id, "changed their mind"))

    def callbacks(self) -> Operations:
        """What a process registers: the end of each charge is told, and a charge that is delivered brings a receipt."""
        effects = Operations()

        async def ended(session: AppSession, settlement: Settlement) -> None:
            if self.chance.random() < 0.1 and self.faulty:
                await asyncio.sleep(self.chance.choice([0.1, 4.0, 12.0]))
            session.add(settlement.entry.id, settlement.state)
            if settlement.state == "delivered":
                session.enqueue(lambda parent: self._receipt(settlement.entry.id, parent))
            if self.faulty and self.chance.random() < self.callbacks_fail:
                raise RuntimeError("the callback broke")

        effects.on_settled("pay")(ended)
        effects.on_uncertain("pay")(ended)
        return effects

    def _receipt(self, caused_by: UUID, parent: str) -> Entry:
        id = UUID(int=(caused_by.int + 1) % 2**128)
        return self._written(
            Entry(id=id, operation="crm.receipt", tag=b"", parent=parent, created_at=self.database.now())
        )

    # --- processes

    def _start(self, name: str, number: int) -> None:
        process = Process(  # type: ignore[abstract]  # only what asyncio asks of it
            self.world, name, start=self.chance.uniform(0, 1e6), rate=self.chance.uniform(0.99, 1.01)
        )
        stopping = asyncio.Event()
        process.call_soon(lambda: process.create_task(self._live(process, number, stopping)))
        if self.faulty:
            self._draw_fate(process)
            if self.chance.random() < 0.2:
                self.world.at(self.chance.random() * 15, process.call_soon, stopping.set)
        process.at_death.append(
            lambda: self.world.at(self.chance.choice([0.1, 1.0, 5.0, 16.0]), self._start, name, number)
        )

    def _draw_fate(self, process: Process) -> None:
        fate = self.chance.random()
        if fate < 0.45:
            process.dies_after = self.chance.choice([10, 30, 60, 100, 200, 400]) + self.chance.randrange(40)
        elif fate < 0.7:
            process.freezes_after = self.chance.choice([10, 30, 60, 100, 200]) + self.chance.randrange(40)
            process.freezes_for = self.chance.choice(FREEZES)

    async def _live(self, process: Process, number: int, stopping: asyncio.Event) -> None:
        store = RemoteStore(self.database, process)
        dispatcher = Dispatcher(
            store=store,
            outbox=OUTBOX,
            include=[self.callbacks()],
            adapters={
                service.declared.name: SimulatedAdapter(service, self.keys, self.poison, pinned=self._pinned(number))
                for service in self._serves(number)
            },
            limits=self.limits,
            lease=LEASE,
            margin=MARGIN,
            poll=timedelta(seconds=2),
            grace=timedelta(seconds=3),
            clock=process.time,
            chance=Random(self.chance.getrandbits(64)),
        )
        process.call_soon(self._abandon_one_day, process, dispatcher, stopping)
        with suppress(sa.exc.OperationalError):  # the grace was over before the database was back
            await dispatcher.pump(stopping)
        process.die()

    def _abandon_one_day(self, process: Process, dispatcher: Dispatcher, stopping: asyncio.Event) -> None:
        """A second signal: what is in flight is left where it is."""

        async def abandon() -> None:
            stopping.set()
            await dispatcher.abandon()

        if self.faulty and self.chance.random() < 0.1:
            self.world.at(self.chance.random() * 15, process.call_soon, lambda: process.create_task(abandon()))

    def _serves(self, number: int) -> list[Service]:
        """In some runs the second process is of a deploy without some of the adapters."""
        return self.services[:-2] if self.is_mixed and number == 1 else self.services

    def _pinned(self, number: int) -> str:
        """In some runs the second process is of a deploy that sends in another form."""
        return "v2" if self.is_mixed and number == 1 else ""

    # --- faults

    def _misfortunes(self) -> None:
        chaos = self.chance.choice([0.0, 0.1, 0.3, 0.6])
        for service in self.services:
            service.chaos = chaos
        self.database.chaos = self.chance.choice([0.0, 0.01, 0.05])
        if self.chance.random() < 0.4:
            self.world.at(self.chance.random() * FAULTS_SECONDS, self._take_the_database_away)
        self.promises.on_uncertain = self._hear_of_doubt

    def _take_the_database_away(self) -> None:
        self.database.down_until = self.world.now + self.chance.choice([0.5, 3.0, 8.0])

    def _hear_of_doubt(self) -> None:
        if self.words_left:
            self.words_left -= 1
            self.world.at(self.chance.choice([0.0, 0.3, 2.0, 12.0]), self._decide)

    def _decide(self) -> None:
        """A person looks at the uncertain entries, if there are any, and says something of one."""
        store = self.database.store
        uncertain = [id for id, row in store.queue.items() if row.state == "uncertain" and id not in store.locked]
        if not uncertain or not self.faulty:
            return
        id = self.chance.choice(uncertain)
        if self.chance.random() < 0.6:
            _unless_refused(lambda: store.resolve(id, "send_again", "a customer waits"))
        elif not self.promises.is_under_way(id):
            happened = self.promises.story(id).effects.total() > 0
            _unless_refused(lambda: store.resolve(id, "happened" if happened else "did_not_happen", "looked at it"))

    def _let_the_faults_stop(self) -> None:
        self.faulty = False
        self.database.chaos = 0.0
        for service in self.services:
            service.chaos = 0.0
        for process in self.world.processes:
            process.dies_after = process.freezes_after = None


def _unless_refused(decide: Callable[[], None]) -> None:
    with suppress(Refused):
        decide()


def _deaths(process: Process) -> Iterator[str]:
    """Tasks of ours that died of an exception that nobody foresaw."""
    for task in process.tasks:
        if task.done() and not task.cancelled():
            error = task.exception()
            if error is not None:
                yield f"{task.get_coro().__qualname__}: {error!r}"  # type: ignore[union-attr]
