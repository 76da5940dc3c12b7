"""Run many seeds: `python3 dev.py simulate --seeds 1000000 --jobs 2`. It stops at the first that violates an invariant."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import Pool

from simulation.run import BrokenRun, Run, simulate

SEEDS = 3000
CHUNK = 50


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dev.py simulate", description="Play the sending side under faults, seed by seed."
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default {SEEDS})")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default 1)")
    parser.add_argument("--log", action="store_true", help="print every step")
    options = parser.parse_args(arguments)

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
    told = ", ".join(f"{count} {state}" for state, count in sorted(ends.items()))
    print(f"{done} seeds, no invariant broken, {done / (time.monotonic() - began):.0f} a second; entries: {told}")
    return 0


def played(seeds: Sequence[int], jobs: int) -> Iterator[Run | str]:
    """What became of each seed, or why it broke an invariant."""
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
