"""The clock of the dispatcher's own waits and limits."""

import time


def steady_clock() -> float:
    """Monotonic seconds that also count while the machine is suspended."""
    return time.clock_gettime(_STEADY)


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
