"""One of the tasks that send entries, and whether its deadline or the process has cancelled it."""

import asyncio
import math
from dataclasses import dataclass
from typing import Final

from dispatchers.delivery import Outcome
from dispatchers.pipeline.routing import Route
from dispatchers.transitions import ClaimedEntry

IDLE: Final = math.inf


@dataclass(slots=True, eq=False)
class Worker:
    """A task that runs one send, or one batch, after another. deadline: of the present one, on the event loop's clock.

    overdue: the present one was cancelled at its deadline. outcome: the adapter's answer to the present send.
    wake: the future that it awaits while it has nothing to send. doing: the entry that it sends, or the first of a batch.
    """

    deadline: float = IDLE
    overdue: bool = False
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None
    wake: asyncio.Future[None] | None = None
    doing: ClaimedEntry | None = None

    @property
    def is_only_overdue(self) -> bool:
        """Whether nothing but the deadline has cancelled the task."""
        return (self.task.cancelling() if self.task is not None else 0) <= self.overdue

    def no_answer(self, route: Route) -> str:
        """Why there is no outcome after a cancellation that is not the process's."""
        return f"no answer within {route.timeout_seconds:g} s" if self.overdue else "the adapter cancelled itself"
