"""Asks the database on a thread, and gives up after a bound: a server that hangs cancels no statement by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from dispatchers.dashboard.failures import Failure

T = TypeVar("T")


async def on_thread(seconds: float, unknown: str, function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns. unknown: what is then unknown. The thread ends when the database answers, or the connection.

    So many threads wait at most as the engine has connections: the pool refuses more.
    """
    with anyio.move_on_after(seconds):
        return await to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)
    raise Failure(503, "database_hangs", f"the database has not answered for {seconds:.0f} s: {unknown}")
