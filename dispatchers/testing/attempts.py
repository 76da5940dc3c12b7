"""Makes one attempt at a remote service, like the dispatcher, and records what can be observed from outside."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock, Thread
from typing import Any, Protocol, SupportsBytes, TypeVar

from dispatchers.delivery import Adapter, Delivery, Unknown
from dispatchers.pipeline.routing import finder_of
from dispatchers.pipeline.workers import ABANDON_SECONDS
from dispatchers.threads import SEND_THREAD, as_async

T = TypeVar("T")

QUIET_SECONDS = 0.25  # how long the remote service then waits for a request that must not come
SHOWN_LEVEL = logging.INFO  # at DEBUG, clients log their requests and answers


class RemoteService(Protocol):
    """The object that replaces the service: a `FaultyHttp`, or your own object with these members.

    requests: the received requests, in order. Items are only added.
    """

    @property
    def requests(self) -> Sequence[SupportsBytes]: ...

    def behave(self, behaviour: Any) -> None:
        """Treat requests in this way from now on. Open requests are cut off."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observations of one attempt.

    outcome: the adapter's answer, unchecked; None if the adapter raised an exception or did not return in time.
    raised: the exception of the adapter. late: the adapter did not return in time, although it was cancelled at its deadline.
    requests: those that reached the remote service before the outcome. afterwards: how many came after it.
    left: the tasks that still ran in the event loop after `aclose`. shown: the adapter's repr, and what this thread and the
    threads of the send logged, with traces.
    """

    outcome: Any
    raised: BaseException | None
    late: bool
    requests: Sequence[SupportsBytes]
    afterwards: int = 0
    left: Sequence[str] = ()
    shown: str = ""


class NeverBack(Exception):
    """The event loop hung: an adapter blocked it, or would not be cancelled."""


def in_a_loop(main: Callable[[], Coroutine[Any, Any, T]], within: timedelta) -> T:
    """What `main` returns, in an event loop of its own.

    On a daemon thread, so that an adapter which blocks the loop, or will not be cancelled, is abandoned there.
    Raises what `main` raises, and `NeverBack`.
    """
    answer: Future[T] = Future()

    async def answered() -> None:
        try:
            answer.set_result(await main())
        except BaseException as error:
            answer.set_exception(error)

    def work() -> None:
        with suppress(BaseException):  # what the loop's end brings up is no part of the answer
            asyncio.run(answered())

    thread = Thread(target=work, name="conformance", daemon=True)
    thread.start()
    if not wait([answer], timeout=within.total_seconds()).done:
        raise NeverBack(f"no answer within {within}: it blocks the event loop, or hangs")
    thread.join(ABANDON_SECONDS)
    return answer.result()


async def sent(adapter: Adapter, delivery: Delivery) -> Any:
    """What the adapter answers to `delivery`, which is due at its timeout."""
    return await as_async(adapter.send, SEND_THREAD)(due_in_time(adapter, delivery))


async def look_up(adapter: Adapter, delivery: Delivery) -> Any:
    """What the adapter finds of `delivery`."""
    find: Any = finder_of(adapter)
    return await as_async(find, SEND_THREAD)(due_in_time(adapter, delivery))


def due_in_time(adapter: Adapter, delivery: Delivery) -> Delivery:
    """The delivery with the deadline that the dispatcher would give it now."""
    return delivery._replace(deadline=asyncio.get_running_loop().time() + adapter.timeout.total_seconds())


async def attempt(
    adapter: Adapter,
    delivery: Delivery,
    remote: RemoteService,
    healthy: Any = None,
    ask: Callable[[Adapter, Delivery], Coroutine[Any, Any, Any]] = sent,
) -> Observation:
    """Send `delivery`, with the adapter's timeout as its deadline, and see what happens.

    healthy: a behaviour with which the remote service then waits a moment for requests that must not come any more.
    ask: `look_up` for a status lookup instead.
    """
    loop = asyncio.get_running_loop()
    before = len(remote.requests)
    latest = loop.time() + adapter.timeout.total_seconds() + ABANDON_SECONDS
    with logged() as lines:
        sending = loop.create_task(ask(adapter, delivery))
        done, _ = await asyncio.wait({sending}, timeout=adapter.timeout.total_seconds())
        if not done:
            sending.cancel()
            done, _ = await asyncio.wait({sending}, timeout=ABANDON_SECONDS)
        ended = _ended(sending, in_time=loop.time() <= latest)
        requests = remote.requests[before:]
        if healthy is not None:
            remote.behave(healthy)
            await asyncio.sleep(QUIET_SECONDS)
        await close(adapter)
        return Observation(
            **ended,
            requests=requests,
            afterwards=len(remote.requests) - before - len(requests),
            left=await _left_behind(sending),
            shown="\n".join([repr(adapter), str(adapter), *lines]),
        )


async def close(adapter: Adapter) -> None:
    """Call the adapter's `aclose`, if it has one."""
    aclose = getattr(adapter, "aclose", None)
    if aclose is not None:
        await aclose()


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the block logs at INFO and above, formatted, with traces.

    Several blocks may be open at the same time, in any threads. A line belongs to the block in whose context it was logged; a
    line of a thread without such a context belongs to all open blocks.
    """
    lines: list[str] = []
    token = _own_lines.set(lines)
    _handler.open(lines)
    try:
        yield lines
    finally:
        _handler.close_for(lines)
        _own_lines.reset(token)


_own_lines: ContextVar[list[str] | None] = ContextVar("own_lines", default=None)


class _SharedHandler(logging.Handler):
    """One handler for all open blocks: the first block lowers the root logger's level, and the last one restores it."""

    def __init__(self) -> None:
        super().__init__(SHOWN_LEVEL)
        self._blocks: list[list[str]] = []
        self._blocks_lock = Lock()
        self._root_level = logging.NOTSET

    def open(self, lines: list[str]) -> None:
        root = logging.getLogger()
        with self._blocks_lock:
            if not self._blocks:
                self._root_level = root.level
                root.setLevel(min(root.level, SHOWN_LEVEL))
                root.addHandler(self)
            self._blocks.append(lines)

    def close_for(self, lines: list[str]) -> None:
        root = logging.getLogger()
        with self._blocks_lock:
            self._blocks = [each for each in self._blocks if each is not lines]
            if not self._blocks:
                root.removeHandler(self)
                root.setLevel(self._root_level)

    def emit(self, record: logging.LogRecord) -> None:
        text, own = self.format(record), _own_lines.get()
        with self._blocks_lock:
            for lines in self._blocks if own is None else (own,):
                lines.append(text)


_handler = _SharedHandler()


def _ended(sending: asyncio.Task[Any], *, in_time: bool) -> dict[str, Any]:
    """How it came back: the dispatcher's own part in that is the Unknown of a send that it cancelled."""
    ended: dict[str, Any] = {"outcome": None, "raised": None, "late": not (sending.done() and in_time)}
    if ended["late"]:
        return ended
    if sending.cancelled():
        if sending.cancelling():
            return ended | {"outcome": Unknown("no answer within its timeout")}
        return ended | {"raised": asyncio.CancelledError()}
    error = sending.exception()
    return ended | ({"outcome": sending.result()} if error is None else {"raised": error})


async def _left_behind(sending: asyncio.Task[Any]) -> list[str]:
    """The tasks that still run although the attempt is over and the adapter closed."""
    others = asyncio.all_tasks() - {asyncio.current_task(), sending}
    if others:
        _, others = await asyncio.wait(others, timeout=ABANDON_SECONDS)
    return sorted(repr(task.get_coro()) for task in others)
