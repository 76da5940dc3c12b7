"""Virtual time, and processes that share it: each an event loop of its own, with its own clock, that may freeze or die.

Nothing here knows of outboxes. Everything happens on one thread, in an order that the seed decides.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from heapq import heappop, heappush
from random import Random
from typing import Any

MAX_STEPS = 400_000  # a run has some thousands


class Stuck(AssertionError):
    """Nothing is left to happen, or it never ends."""


class Handle:
    """A call that is due, as asyncio knows it. process: whose it is; None for the world's own."""

    __slots__ = ("_cancelled", "_when", "arguments", "call", "context", "process")

    def __init__(
        self,
        process: "Process | None",
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        self.process = process
        self.call = call
        self.arguments = arguments
        self.context = context
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


class World:
    """What is to happen, in the order of time; at one time, in the order in which it was asked for.

    faulty: whether anything may still go wrong.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.faulty = True
        self.processes: list[Process] = []
        self.broken: Exception | None = (
            None  # ends the run: the finder may be inside of a handler that catches everything
        )
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._scheduled = 0

    def at(self, delay: float, call: Callable[..., object], *arguments: Any) -> Handle:
        """Have something of the world's own happen: a server's work, a message's arrival."""
        handle = Handle(None, call, arguments, None)
        self.schedule(self.now + delay, handle)
        return handle

    def schedule(self, when: float, handle: Handle) -> None:
        self._scheduled += 1
        heappush(self._timers, (when, self._scheduled, handle))

    def soon(self, handle: Handle) -> None:
        self._ready.append(handle)

    def run_until(self, is_over: Callable[[], bool], *, latest: float) -> bool:
        """Let time pass until `is_over()`, which is asked whenever it has; False if it is not by `latest`."""
        while True:
            while self._ready and self.broken is None:
                self._step(self._ready.popleft())
            if self.broken is not None:
                raise self.broken
            if is_over():
                return True
            if not self._timers or self._timers[0][0] > latest:
                return False
            self.now, _, handle = heappop(self._timers)
            if not handle._cancelled:
                self._step(handle)

    def _step(self, handle: Handle) -> None:
        if handle._cancelled:
            return
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Stuck(f"{MAX_STEPS} steps, and no end")
        if handle.process is None:
            handle.call(*handle.arguments)
        else:
            handle.process.step(handle)

    def close(self) -> None:
        for process in self.processes:
            process.close()


class Process(asyncio.AbstractEventLoop):
    """A process, as far as it can be seen from inside: an event loop and a steady clock.

    rate: how fast its clock goes. start: what its clock shows at the world's beginning.
    dies_after, freezes_after: so many steps from now, each at an await; None for never.
    """

    def __init__(self, world: World, name: str, *, start: float = 0.0, rate: float = 1.0) -> None:
        self.world = world
        self.name = name
        self._start = start
        self._rate = rate
        self.alive = True
        self.dies_after: int | None = None
        self.freezes_after: int | None = None
        self.freezes_for = 0.0
        self.frozen_until = 0.0
        self.frozen: list[tuple[float, float]] = []  # from, until: by the world's clock
        self.at_death: list[Callable[[], object]] = []
        self._waiting: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        world.processes.append(self)

    # --- its life

    def step(self, handle: Handle) -> None:
        """Do one thing, unless it is dead or frozen."""
        if not self.alive:
            return
        if self.world.now < self.frozen_until:
            self._waiting.append(handle)
            return
        asyncio._set_running_loop(self)
        try:
            if handle.context is None:
                handle.call(*handle.arguments)
            else:
                handle.context.run(handle.call, *handle.arguments)
        finally:
            asyncio._set_running_loop(None)
        self._suffer()

    def _suffer(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after <= 0:
                self.die()
        if self.freezes_after is not None:
            self.freezes_after -= 1
            if self.freezes_after <= 0:
                self.freezes_after = None
                self.freeze(self.freezes_for)

    def die(self) -> None:
        """As by SIGKILL: nothing of it happens any more, no `finally`, no answer."""
        if self.alive:
            self.alive = False
            for call in self.at_death:
                call()

    def freeze(self, seconds: float) -> None:
        """As by SIGSTOP: time passes for every other process, and its own clock advances too."""
        self.frozen_until = self.world.now + seconds
        self.frozen.append((self.world.now, self.frozen_until))
        self.world.at(seconds, self._thaw)

    def _thaw(self) -> None:
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self.world.soon(handle)

    def frozen_seconds(self, since: float) -> float:
        """How long it has been frozen since then."""
        return sum(max(0.0, min(until, self.world.now) - max(began, since)) for began, until in self.frozen)

    def close(self) -> None:
        """Take apart what is left, so that nothing of it runs when it is collected."""
        self.alive = False
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with suppress(BaseException):
                        task.get_coro().close()
        finally:
            asyncio._set_running_loop(None)

    # --- what asyncio asks of an event loop

    def time(self) -> float:
        return self._start + self.world.now * self._rate

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        handle = Handle(self, callback, args, context)
        self.world.soon(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        handle = Handle(self, callback, args, context, when)
        self.world.schedule(max(self.world.now, (when - self._start) / self._rate), handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self.time() + max(delay, 0.0), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **settings: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **settings)
        self.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Unhandled exceptions of tasks are searched for at the end of a run instead."""

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass
