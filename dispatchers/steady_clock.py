"""The clock of the dispatcher's own waits and limits."""

import time
from collections.abc import Callable
from functools import partial

steady_clock: Callable[[], float] = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Monotonic seconds that also count while the machine is suspended."""
