"""Blocking calls off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any


async def on_own_thread(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work` on a thread of its own: one that hangs keeps no other from beginning, nor the process from ending.

    A SystemExit is not this process's: it comes back as a RuntimeError of that name.
    """
    answer: Future[Any] = Future()
    Thread(target=_answer, args=(answer, work, arguments), name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)


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
