"""Run many seeds: `python3 dev.py simulate --seeds 1000000 --jobs 2`. It stops at the first that violates an invariant.

With --mutants: search a seed for each mutant, and print what `seeds.FOUND_BY` records.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import Pool

from simulation.mutations import GUARDS, first_broken
from simulation.run import BrokenRun, Run, simulate

SEEDS = 3000
CHUNK = 50


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dev.py simulate", description="Play the sending side under faults, seed by seed."
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default {SEEDS})")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent processes (default 1)")
    parser.add_argument("--log", action="store_true", help="print every step")
    parser.add_argument("--mutants", action="store_true", help="print the first seed that finds each mutant")
    options = parser.parse_args(arguments)
    if options.mutants:
        return print_mutants(options.jobs)

    began = time.monotonic()
    ends: Counter[str] = Counter()
    done = 0
    for found in played(range(options.first, options.first + options.seeds), options.jobs):
        if isinstance(found, str):
            print(found)
            return 1
        if options.log:
            print("\n".join(found.log))
        ends.update(found.ends)
        done += 1
        if done % 10_000 == 0:
            print(f"{done} seeds, no invariant broken", flush=True)
    summary = ", ".join(f"{count} {state}" for state, count in sorted(ends.items()))
    print(f"{done} seeds, no invariant broken, {done / (time.monotonic() - began):.0f} a second; entries: {summary}")
    return 0


def print_mutants(jobs: int) -> int:
    """Print the lines of `seeds.FOUND_BY`. Returns: 1 if a mutant was not found."""
    with Pool(jobs) as pool:
        found = sorted(pool.imap_unordered(find, GUARDS), key=lambda mutant: mutant[1])
    for name, seed in found:
        print(f"    {json.dumps(name)}: {seed},")
    missed = [name for name, seed in found if seed < 0]
    print(f"# {len(found) - len(missed)} of {len(found)} mutants found", *missed, sep="\n# not found: ")
    return 1 if missed else 0


def find(mutant: str) -> tuple[str, int]:
    broken = first_broken(mutant, begin_at=0)
    return mutant, -1 if broken is None else broken.seed


def played(seeds: Sequence[int], jobs: int) -> Iterator[Run | str]:
    """The outcome of each seed, or why it broke an invariant."""
    if jobs == 1:
        yield from map(play, seeds)
        return
    with Pool(jobs) as pool:
        yield from pool.imap(play, seeds, CHUNK)


def play(seed: int) -> Run | str:
    try:
        return simulate(seed)
    except BrokenRun as broken:
        return str(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
