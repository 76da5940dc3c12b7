"""Hints between the app and the dispatchers, in some crowded runs: they are lost, late, or doubled, and connections are lost.

Their draws are their own, so that the other runs stay as they are.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from dispatchers.pipeline import wakeup
from outbox.sql.postgresql.hint_messages import Due, Hint, decode, encode
from simulation.invariants import Invariants
from simulation.reference_rows import Entry
from simulation.world import Process, World

Ask = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(eq=False, slots=True)
class Connection:
    """One process listens. lost: what ends it."""

    process: Process
    hear: Callable[[Hint], None]
    lost: "asyncio.Future[None]"


class Hints:
    """The draws of one seed, and the server's side of NOTIFY. is_here: whether there are hints at all."""

    def __init__(self, seed: int, *, is_crowded: bool) -> None:
        self._rng = Random(f"hints {seed}")
        self.is_here = is_crowded and self._rng.random() < 0.5
        self._lost = self._rng.choice([0.0, 0.3, 0.9])  # the chance that a hint is
        self._late = self._rng.choice([0.0, 0.3])
        self._doubled = self._rng.choice([0.0, 0.3])
        self._lost_tests = self._rng.choice(
            [0.0, 0.0, 0.3]
        )  # those by which a dispatcher finds out whether it hears hints
        self._connections: list[Connection] = []
        self._heard_here: dict[Process, tuple[str, Callable[[Due], None]]] = {}

    def begin(self, world: World, invariants: Invariants) -> None:
        self._world, self._invariants = world, invariants
        for _ in range(self._rng.choice([0, 0, 1, 3]) if self.is_here else 0):
            world.at(self._rng.random() * 30, self._break_a_connection)

    def _break_a_connection(self) -> None:
        if self._connections:
            self._end(self._rng.choice(self._connections))

    def _end(self, connection: Connection) -> None:
        self._connections.remove(connection)
        if connection.process.alive:
            connection.process.call_soon(_lose, connection.lost)

    # --- what has been committed

    def committed(self, entries: Iterable[Entry], by: Process | None) -> None:
        """by: the process in which a callback has enqueued them, and which needs no notification."""
        if not self.is_here:
            return
        due = frozenset((entry.destination, entry.operation) for entry in entries)
        token, hear = self._heard_here.get(by, (None, None)) if by is not None else (None, None)
        if by is not None and hear is not None:
            by.call_soon(hear, due)
        self._world.at(self._rng.choice([0.001, 0.02]), self._notify, Hint(due, woken=token))

    def decided(self) -> None:
        """An operator's decision may make any entry due."""
        if self.is_here:
            self._notify(Hint())

    def _notify(self, hint: Hint) -> None:
        for connection in self._connections:
            count = 1 + (self._rng.random() < self._doubled)
            for _ in range(count):
                is_lost = self._rng.random() < (self._lost if hint.probe is None else self._lost_tests)
                if not is_lost:
                    is_late = self._rng.random() < self._late
                    takes = self._rng.choice([0.05, 1.0, 4.0]) if is_late else 0.001 + 0.004 * self._rng.random()
                    self._world.at(takes, self._arrive, connection, decode(encode(hint)))

    def _arrive(self, connection: Connection, hint: Hint) -> None:
        if connection in self._connections:
            connection.process.call_soon(self._hear, connection, hint)

    def _hear(self, connection: Connection, hint: Hint) -> None:
        connection.hear(hint)
        if hint.probe is None:
            self._invariants.hints.heard(connection.process, hint.due)

    # --- what a process listens with

    def listener(self, process: Process, ask: Ask) -> "SimulatedListener | None":
        return SimulatedListener(self, process, ask) if self.is_here else None

    def listen(self, connection: Connection) -> None:
        self._connections.append(connection)
        connection.process.at_death.append(lambda: self.leave(connection))

    def leave(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def ask_oneself(self, token: str) -> None:
        self._notify(Hint(probe=token))

    @contextmanager
    def heard_here(self, process: Process, hear: Callable[[Due], None]) -> Iterator[str]:
        self._heard_here[process] = process.name, hear
        try:
            yield process.name
        finally:
            del self._heard_here[process]

    @contextmanager
    def around(self) -> Iterator[None]:
        """A dispatcher's tests of its connection come as often as its lease is short."""
        with ExitStack() as patches:
            if self.is_here:
                patches.enter_context(patch.object(wakeup, "PROBE_SECONDS", 5.0))
                patches.enter_context(patch.object(wakeup, "ECHO_SECONDS", 1.0))
                patches.enter_context(patch.object(wakeup, "RETRY_SECONDS", (0.5, 4.0)))
            yield


def _lose(lost: "asyncio.Future[None]") -> None:
    if not lost.done():
        lost.set_exception(ConnectionError("the connection has ended"))


class SimulatedListener:
    """As `Listener` of a store. ask: one round trip to the server."""

    can_listen = True

    def __init__(self, hints: Hints, process: Process, ask: Ask) -> None:
        self._hints, self._process, self._ask = hints, process, ask

    def heard_here(self, hear: Callable[[Due], None]) -> Any:
        return self._hints.heard_here(self._process, hear)

    async def probe(self, token: str) -> None:
        await self._ask(lambda: self._hints.ask_oneself(token))

    @asynccontextmanager
    async def listening(self, hear: Callable[[Hint], None]) -> AsyncIterator["asyncio.Future[None]"]:
        connection = Connection(self._process, hear, asyncio.get_running_loop().create_future())
        await self._ask(lambda: self._hints.listen(connection))
        try:
            yield connection.lost
        finally:
            self._hints.leave(connection)
