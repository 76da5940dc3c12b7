"""One run: a few entries, services, processes and people, drawn from a seed; then the faults stop, and everything must end."""

import gc
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

import sqlalchemy as sa

from dispatchers import database_identity, decide_lookup
from simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of a seed. trace: a digest of every step. ends: how many entries ended how."""

    seed: int
    trace: str
    ends: dict[str, int]
    log: list[str]


class BrokenRun(AssertionError):
    """An invariant was broken, or something else is; the text says which, by which seed, and what led to it."""

    def __init__(self, seed: int, problem: BaseException, log: list[str]) -> None:
        last_steps = "\n".join(log[-60:])
        super().__init__(
            f"seed {seed}: {problem}\n{last_steps}\nto see it again: python3 dev.py simulate --from {seed} --seeds 1"
        )
        self.seed = seed
        self.problem = problem


def simulate(seed: int) -> Run:
    """Play one seed to its end. Raises `BrokenRun`."""
    scenario = Scenario(seed)
    with _quiet(scenario), _uncollected(), _shortened(), scenario.crowd.around(), scenario.hints.around():
        try:
            scenario.play()
        except Exception as problem:
            raise BrokenRun(seed, problem, scenario.invariants.log) from problem
        finally:
            scenario.world.close()
    log = scenario.invariants.log
    trace = hashlib.sha256("\n".join([*log, str(scenario.world.steps)]).encode()).hexdigest()
    return Run(seed, trace, scenario.ends(), log)


@contextmanager
def _quiet(scenario: Scenario) -> Iterator[None]:
    """Hear of our own defects, and of nothing else, in the dispatcher's log."""
    log = logging.getLogger("outbox.dispatcher")
    handler, level, propagates = _Defects(scenario), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which takes a fifth of a run and finds little in it before its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _shortened() -> Iterator[None]:
    """The dispatcher's own minutes are seconds here, as its lease is."""
    with (
        patch.object(decide_lookup, "LOOKUP_FIRST", timedelta(seconds=2)),
        patch.object(decide_lookup, "MAX_LOOKUP", timedelta(minutes=6)),
        patch.object(database_identity, "IDENTITY_EVERY", timedelta(seconds=4)),
    ):
        yield


class _Defects(logging.Handler):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._scenario = scenario

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        is_ours = any(
            text in record.msg
            for text in (
                "internal error",
                "cannot be sent",
                "cannot be sent, because no delivery can be made from its row; the traceback follows",
            )
        )
        if is_ours and not isinstance(problem, sa.exc.OperationalError):
            self._scenario.defects.append(f"{record.getMessage()}: {problem!r}")
