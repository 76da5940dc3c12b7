"""The whole sending side under faults, on a virtual clock: no invariant is violated, and each mutant violates one."""

import asyncio
import os
import subprocess
import sys
from datetime import timedelta
from random import Random

import pytest
from simulation.app import OUTBOX
from simulation.crowd import Crowd
from simulation.database import START, Database, RemoteStore
from simulation.invariants import Invariants
from simulation.mutations import GUARDS, first_broken
from simulation.run import simulate
from simulation.seeds import FOUND_BY, SEEDS_IN_CI
from simulation.world import Process, World
from support.database import IMPORT_PATH
from support.python_processes import run_python

from dispatchers.adapters import MemoryAdapter
from dispatchers.process.dispatcher_work import DispatcherWork, Simulation

PARTS = 4  # of the seeds, so that several processes share them
SEEDS_READ = 100  # the first, whose logs another test reads


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_an_invariant(part: int) -> None:
    for seed in range(SEEDS_READ + part, SEEDS_IN_CI, PARTS):
        simulate(seed)


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_an_invariant_is_broken_within_thousands_of_seeds(guard: str) -> None:
    assert first_broken(guard) is not None


def test_a_seed_is_recorded_of_no_guard_that_there_is_not() -> None:
    assert FOUND_BY.keys() <= GUARDS.keys()


def test_a_seed_plays_the_same_run_again_in_any_process() -> None:
    program = "from simulation.run import simulate; print(*[simulate(seed).trace for seed in range(6)])"
    traces = [
        subprocess.run(
            [sys.executable, "-c", f"junk = [object() for _ in range({size})]; {program}"],
            env=os.environ | {"PYTHONPATH": IMPORT_PATH, "PYTHONHASHSEED": str(size)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for size in (1, 5000)
    ]

    assert traces[0] == traces[1] == [simulate(seed).trace for seed in range(6)]
    assert len(set(traces[0])) == 6


def test_a_broken_invariant_has_its_seed_and_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = first_broken("the fence is gone")
    assert broken is not None

    assert f"seed {broken.seed}: entry " in str(broken)
    assert f"python3 dev.py simulate --from {broken.seed} --seeds 1" in str(broken)
    GUARDS["the fence is gone"](monkeypatch)
    with pytest.raises(type(broken)) as again:
        simulate(broken.seed)
    assert str(again.value) == str(broken)


def test_the_command_plays_seeds_and_prints_how_entries_ended() -> None:
    arguments = ("-m", "simulation", "--seeds", "6", "--from", "7", "--jobs", "2")
    printed = run_python(*arguments, env=os.environ | {"PYTHONPATH": IMPORT_PATH}, check=True).stdout

    assert printed.startswith("6 seeds, no invariant broken, ")
    assert " delivered" in printed


def test_the_runs_reach_every_end_and_every_kind_of_trouble() -> None:
    logs = [simulate(seed).log for seed in range(SEEDS_READ)]
    steps = "\n".join("\n".join(log) for log in logs)

    for end in (
        "Settle delivered",
        "Settle failed",
        "Settle cancelled",
        "MarkUncertain",
        "Retry",
        "AwaitLookup",
        "SendAgain",
        "RetryCallback",
        "Release",
    ):
        assert f" {end}\n" in steps
    for trouble in (
        " cancelled\n",
        "Settle delivered: lost",
        "Retry: lost",
        "reported delivered",
        "reported uncertain",
        "to crm",
        "lookup returned Found\n",
        "lookup returned Absent\n",
        "lookup returned CannotTell\n",
        "blocks its group\n",
        "is released\n",
        "is being cancelled\n",
        " postponed\n",
        "is paused\n",
        "is resumed\n",
        "the database is set back\n",
        "an operator resumes\n",
        " hub refuses a",
        " hears a hint\n",
    ):
        assert trouble in steps


def test_an_idle_dispatcher_asks_the_database_no_more_often_than_it_polls() -> None:
    world = World(1)
    database = Database(world, Invariants(world, START), Crowd(0))
    process = Process(world, "idle")
    asked = 0

    class CountingStore(RemoteStore):
        async def exchange(self, *arguments: object) -> object:  # type: ignore[override]
            nonlocal asked
            asked += 1
            return await super().exchange(*arguments)  # type: ignore[arg-type]

    async def live() -> None:
        dispatcher = DispatcherWork(
            outbox=OUTBOX,
            adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter()},
            poll=timedelta(seconds=1),
            simulation=Simulation(store=CountingStore(database, process), clock=process.time, rng=Random(1)),
        )
        await dispatcher.pump(asyncio.Event())

    process.call_soon(lambda: process.create_task(live()))
    world.run_until(lambda: False, latest=100.0)
    world.close()

    assert 100 < asked < 500  # two claim loops, each after half a second to a second
