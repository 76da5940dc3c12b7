"""Named points at which a test kills the process, or calls a function.

    with failpoint("settle.before_commit"):      # by default: SIGKILL, the first time that the process reaches the point
        asyncio.run(dispatcher.run_once())

Unused failpoints cost nothing, because the code of the library does not contain them. Each point is before or after the call
of a function.
"""

import functools
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import outbox.sessions.session
from dispatchers.admin.decide import decisions
from dispatchers.maintenance import jobs as maintenance_jobs
from dispatchers.pipeline import attempt, triage
from dispatchers.store import database as store_database
from dispatchers.store.app_code import callback_transactions
from dispatchers.store.queue import claims_postgresql, claims_rows
from dispatchers.transitions import Send
from outbox.errors import InvalidValue


class Seam(NamedTuple):
    """A function by its owners and name. when: whether a call counts, by its arguments and, after it, its answer."""

    owners: tuple[Any, ...]
    name: str
    side: Literal["before", "after"]
    when: Callable[[tuple[Any, ...], Any], bool] = lambda arguments, answer: True


_STORES = (claims_postgresql, claims_rows)

POINTS: Mapping[str, Seam] = {
    # the app's transaction
    "enqueue.before_flush": Seam((outbox.sessions.session,), "insert_entries", "before"),
    "enqueue.after_flush": Seam((outbox.sessions.session,), "insert_entries", "after"),
    # claim, send, settle
    "claim.before_commit": Seam(_STORES, "claim", "after", lambda arguments, claimed: bool(claimed)),
    "claim.after_commit": Seam(
        (store_database.DatabaseStore,), "exchange", "after", lambda arguments, exchange: bool(exchange.claimed)
    ),
    "send.before": Seam((attempt.Attempt,), "_answer", "before", lambda arguments, _: _sends(*arguments)),
    "send.after": Seam((attempt.Attempt,), "_answer", "after", lambda arguments, _: _sends(*arguments)),
    "settle.before": Seam(
        (store_database.DatabaseStore,), "exchange", "before", lambda arguments, _: bool(arguments[1])
    ),
    "settle.before_commit": Seam(_STORES, "settle", "after", lambda arguments, settled: bool(settled)),
    "settle.after_commit": Seam(
        (store_database.DatabaseStore,), "exchange", "after", lambda arguments, exchange: bool(exchange.settled)
    ),
    # a callback, in the transaction that settles its entry
    "callback.before": Seam((callback_transactions,), "call_at_once", "before"),
    "callback.before_commit": Seam((callback_transactions,), "call_at_once", "after"),
    "callback.after_commit": Seam(
        (store_database.DatabaseStore,), "settle_with", "after", lambda arguments, settled: bool(settled)
    ),
    # an operator's decision, and the dispatcher that carries it out
    "decision.before_commit": Seam((decisions,), "log_decision", "after"),
    "decision.before_it_is_carried_out": Seam(
        (triage,), "plan", "before", lambda arguments, _: arguments[0].outcome.known is not None
    ),
    # retention
    "maintenance.before_commit": Seam((maintenance_jobs,), "_delete_next", "after"),
}
"""Every point, by name."""

_IN_BATCHES: Mapping[str, Seam] = {
    "send.before": Seam((attempt.Batch,), "fill", "after", lambda arguments, _: bool(arguments[0].deliveries)),
    "send.after": Seam((attempt.Batch,), "answered", "before"),
}
"""Where a point is for an entry that is sent with `send_batch`."""


def _sends(attempted: attempt.Attempt, *_: Any) -> bool:
    """Whether it is no status lookup."""
    return isinstance(attempted.step, Send)


def die() -> None:
    """Kill the process: no `finally`, no rollback."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def failpoint(name: str, act: Callable[[], object] = die) -> Iterator[None]:
    """Call `act()` the first time that the process reaches the point `name` within the block.

    An exception of `act` is raised from the function at that point. Not for concurrent threads.
    Raises `InvalidValue` for a name that is not in `POINTS`.
    """
    if name not in POINTS:
        raise InvalidValue("failpoint", name, f"must be one of {sorted(POINTS)}")
    left = [act]
    with ExitStack() as stack:
        for seam in (POINTS[name], _IN_BATCHES.get(name)):
            if seam is not None:
                stack.enter_context(_replaced(seam, left))
        yield


@contextmanager
def _replaced(seam: Seam, left: list[Callable[[], object]]) -> Iterator[None]:
    def reach(arguments: tuple[Any, ...], answer: Any) -> None:
        if left and seam.when(arguments, answer):
            left.pop()()

    originals = [getattr(owner, seam.name) for owner in seam.owners]
    for owner, original in zip(seam.owners, originals, strict=True):
        setattr(owner, seam.name, _around(original, seam.side, reach))
    try:
        yield
    finally:
        for owner, original in zip(seam.owners, originals, strict=True):
            setattr(owner, seam.name, original)


def _around(original: Any, side: str, reach: Callable[[tuple[Any, ...], Any], None]) -> Any:
    @functools.wraps(original)
    def around(*arguments: Any, **named: Any) -> Any:
        if side == "before":
            reach(arguments, None)
        answer = original(*arguments, **named)
        if side == "after":
            reach(arguments, answer)
        return answer

    @functools.wraps(original)
    async def around_async(*arguments: Any, **named: Any) -> Any:
        if side == "before":
            reach(arguments, None)
        answer = await original(*arguments, **named)
        if side == "after":
            reach(arguments, answer)
        return answer

    return around_async if inspect.iscoroutinefunction(original) else around
