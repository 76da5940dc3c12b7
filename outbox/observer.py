"""Observation of an outbox's claims: `outbox.configure(observe=...)`. `outbox.metrics` counts and exports them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import iscoroutinefunction
from time import perf_counter
from typing import Literal

from outbox.errors import ConfigurationError, KeyExpired, KeyInFlight, RequestError, RequestMismatch

log = logging.getLogger("outbox.observer")

ClaimOutcome = Literal["miss", "hit", "taken_over", "mismatch", "in_flight", "wait_timeout", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedClaim:
    """The outcome of one claim. It contains no key, scope or payload.

    outcome: "miss": the key was free and the block ran. "hit": the request was answered before. "taken_over": the lease of
        another attempt had expired, and the block ran again. "mismatch": the key was used with another request. "in_flight":
        another transaction or lease had the key. "wait_timeout": it still had the key after the wait. "expired": the key is
        older than its retry window.
    source: the claim's `source`, a name in the app's code.
    waited: how long the claim waited for the transaction or the lease that had the key; None if it did not wait.
    """

    outcome: ClaimOutcome
    source: str
    waited: timedelta | None


Observer = Callable[[ObservedClaim], object]


@dataclass(slots=True)
class GuardedObserver:
    """An app's observer, which no request fails by: its first exception is logged, and none gets out."""

    observe: Observer
    _has_failed: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.observe) or iscoroutinefunction(self.observe):
            raise ConfigurationError(
                f"observe must be a plain function of one outbox.ObservedClaim, not {self.observe!r}: it is called, and not"
                " awaited, wherever a transaction ends"
            )

    def report(self, claim: ObservedClaim) -> None:
        try:
            self.observe(claim)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception(
                    "observe= raised an exception; requests are not affected; its later exceptions are not logged"
                )


class ClaimObservation:
    """Follows one claim on a key. `report` is for later, when the claim's transaction, and its locks, have ended."""

    def __init__(self, observer: GuardedObserver | None, source: str) -> None:
        self._observer = observer
        self._source = source
        self._outcome: ClaimOutcome | None = None
        self._waited: timedelta | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for another transaction, or a lease. What several take is added up."""
        started = perf_counter()
        try:
            yield
        finally:
            self._waited = (self._waited or timedelta(0)) + timedelta(seconds=perf_counter() - started)

    def claimed(self, outcome: Literal["miss", "hit", "taken_over"]) -> None:
        self._outcome = outcome

    def refused(self, error: RequestError) -> None:
        match error:
            case KeyInFlight():
                self._outcome = "in_flight" if self._waited is None else "wait_timeout"
            case RequestMismatch():
                self._outcome = "mismatch"
            case KeyExpired():
                self._outcome = "expired"
            case _:  # a request without a well-formed key claims none
                pass

    def report(self) -> None:
        if self._outcome is not None and self._observer is not None:
            self._observer.report(ObservedClaim(outcome=self._outcome, source=self._source, waited=self._waited))


@contextmanager
def observed(observer: GuardedObserver | None, source: str) -> Iterator[ClaimObservation]:
    """Around a claim in a transaction of its own, which has ended when the block does."""
    observation = ClaimObservation(observer, source)
    try:
        yield observation
    except RequestError as error:
        observation.refused(error)
        raise
    finally:
        observation.report()
