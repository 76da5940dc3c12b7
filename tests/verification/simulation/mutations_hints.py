"""The guards of hints, each removed by itself."""

import math
from functools import partialmethod
from typing import Any

from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.pipeline.wakeup import Wakeup
from simulation.mutants import Patch, around, without


def believed(wakeup: Wakeup, original: Any, jitter: float, *, is_first: bool) -> float:
    return math.inf if wakeup.is_listening else original(wakeup, jitter, is_first=is_first)


def followed_if_calm(original: Any, wakeup: Wakeup, due: Any) -> None:
    if wakeup._quiet_until <= wakeup._clock():
        original(wakeup, due)


HINT_MUTANTS: dict[str, Patch] = {
    "a hint is taken for a claim": without(Scheduler, "hint", lambda scheduler, found: None),
    "a dispatcher that hears hints does not poll": without(
        Wakeup, "polls_at", partialmethod(believed, Wakeup.polls_at)
    ),
    "a hint soon after another one is forgotten": around(Wakeup, "_follow", followed_if_calm),
}
