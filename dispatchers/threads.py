"""Blocking calls off the event loop."""

import asyncio
import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

SEND_THREAD = "outbox-send"

Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


async def on_own_thread(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work` on a thread of its own: one that hangs keeps no other from beginning, nor the process from ending.

    A SystemExit is not this process's: it comes back as a RuntimeError of that name.
    """
    answer: Future[Any] = Future()
    context = copy_context()  # so that an adapter's spans belong to that of its send
    Thread(target=context.run, args=(_answer, answer, work, arguments), name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)


def is_async(function: Any) -> bool:
    """Whether it is an `async def`, or an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_async(function: Callable[..., Any], thread: str) -> Callable[..., Any]:
    """`function` itself if it is async, else its call on a thread of that name, so that it may block."""
    if is_async(function):
        return function

    async def threaded(*arguments: Any) -> Any:
        answer = await on_own_thread(thread, function, *arguments)
        return await answer if inspect.isawaitable(answer) else answer  # a plain wrapper around an async function

    return threaded


class Threads:
    """A few threads that do one piece of work after the other. One that hangs does not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._started = 0
        self._replaced = Replaced()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        self._queue.put((answer, work, arguments))
        if self._started < self._count:
            self._started += 1
            self._start()
        return answer

    def give_up(self, answer: "Future[Any]") -> None:
        """Nothing waits for this answer any more. Work that has not begun never begins. One that hangs keeps its thread, which
        ends with it, and another thread takes its place.
        """
        if not answer.cancel() and self._replaced.add(answer):
            self._start()

    def _start(self) -> None:
        Thread(target=_work, args=(self._queue, self._replaced), name=self._name, daemon=True).start()

    def close(self) -> None:
        """End them when their work is done."""
        self._end()
        self._begin()


class Replaced:
    """The answers of work that hangs, and whose threads have been replaced."""

    def __init__(self) -> None:
        self._answers: set[Future[Any]] = set()
        self._lock = Lock()

    def add(self, answer: "Future[Any]") -> bool:
        """Whether the work still hangs."""
        with self._lock:
            hangs = not answer.done()
            if hangs:
                self._answers.add(answer)
            return hangs

    def take(self, answer: "Future[Any]") -> bool:
        """Whether the thread of this work, which has ended, was replaced."""
        with self._lock:
            is_replaced = answer in self._answers
            self._answers.discard(answer)
            return is_replaced


def _work(queue: "SimpleQueue[Work | None]", replaced: Replaced) -> None:
    while (given := queue.get()) is not None:
        _answer(*given)
        if replaced.take(given[0]):
            return
        del given  # nothing is kept while it waits
    queue.put(None)  # for the next one of them


def _answer(answer: Future[Any], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        outcome = work(*arguments)
    except Exception as error:
        answer.set_exception(error)
    except BaseException as error:
        answer.set_exception(RuntimeError(type(error).__name__))
    else:
        answer.set_result(outcome)
