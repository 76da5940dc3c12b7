"""The faults of the fake services, and how often each happens."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from random import Random


class ServiceFault(StrEnum):
    """One request meets at most one of these. Those about executing do nothing to a replay."""

    LOSE_RESPONSE = "lose_response"
    """Executed and remembered; the connection is dropped without an answer."""

    LOSE_REQUEST = "lose_request"
    """Nothing executed, nothing remembered; the connection is dropped. The client cannot distinguish it from the other fault."""

    FAIL_AFTER = "fail_after"
    """Executed, yet answered with a 500, which is remembered if the service remembers errors."""

    FAIL_BEFORE = "fail_before"
    """Not executed, and answered with a 500. Where the service remembers errors, the key will never execute."""

    UNAVAILABLE = "unavailable"
    """A 503 from in front of the API: nothing executed, nothing remembered."""

    RATE_LIMIT = "rate_limit"
    """A 429 with Retry-After: nothing executed, nothing remembered."""

    SLOW = "slow"
    """Executes for `slow_for`; meanwhile the key is in use."""

    CUT_OFF = "cut_off"
    """Executed and remembered; the connection breaks in the middle of the answer's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The fraction of requests that meet each fault, 0 to 1; together at most 1.

    slow_for: how long a slow request executes. retry_after: what a 429 asks for, in whole seconds.
    latency: what every request takes, on average; each between half and one and a half of it.
    """

    lose_response: float = 0
    lose_request: float = 0
    fail_after: float = 0
    fail_before: float = 0
    unavailable: float = 0
    rate_limit: float = 0
    slow: float = 0
    cut_off: float = 0
    slow_for: timedelta = timedelta(seconds=1)
    retry_after: timedelta = timedelta(seconds=1)
    latency: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        fractions = [self.fraction(fault) for fault in ServiceFault]
        if min(fractions) < 0 or sum(fractions) > 1:
            raise ValueError(f"{self!r}: each fraction must be at least 0, and all together at most 1")

    def fraction(self, fault: ServiceFault) -> float:
        return float(getattr(self, fault.value))

    def draw(self, random: Random) -> ServiceFault | None:
        """The fault that the next request meets, from one random number."""
        point = random.random()
        for fault in ServiceFault:
            point -= self.fraction(fault)
            if point < 0:
                return fault
        return None
