"""The benchmarks: `python3 dev.py bench`.

It starts a PostgreSQL of its own with normal durability, measures all sides in turn (A B A B), prints medians, spreads,
CPU, WAL and each goal with its verdict, and writes the figures, a page and charts.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import dashboard, drain, enqueue, latency, relay, requests, scale, scaling, scaling_page, sends
from benchmarks.contestants import DEFAULT, notes
from benchmarks.harness import Report, Series, Server, conditions, machine, running_server
from benchmarks.report import add_to, print_part

RESULTS = Path(__file__).with_name("results")
QUICK_SIZE = 0.25

Measuring = Callable[[Server, float], Iterator[Series]]
MODULES = (drain, latency, sends, relay, enqueue, requests, scaling)
QUICK: dict[str, Measuring] = {"drain": drain.measure_quickly, "enqueue": enqueue.measure}


def main() -> None:
    arguments = _arguments()
    size = QUICK_SIZE if arguments.quick else arguments.size
    with running_server() as server:
        of_run = machine(server)
        print("; ".join(of_run.values()))
        for name, measure in _chosen(arguments).items():
            began = time.monotonic()
            now = {name: conditions(size)}
            report = Report(of_run, list(measure(server, size)), now, notes())
            print_part(report)
            print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
            if not arguments.quick:
                scaling_page.add_to(arguments.out, add_to(arguments.out, report))  # at once: a later part may fail
    if not arguments.quick:
        print(f"written: {arguments.out / 'performance.md'} and scaling.md, and the folder beside them")


def _chosen(arguments: argparse.Namespace) -> dict[str, Measuring]:
    """By name. `scale` is all of its cases."""
    if arguments.quick:
        return QUICK
    cases = {f"scale.{name}": partial(_scale, name, arguments.full) for name in scale.CASES}
    large: dict[str, Measuring] = {dashboard.PART: partial(dashboard.measure, full=arguments.full)}
    parts: dict[str, Measuring] = {module.PART: module.measure for module in MODULES} | cases | large
    named = set(arguments.parts) or {*parts}
    return {name: measure for name, measure in parts.items() if {name, name.partition(".")[0]} & named}


def _scale(name: str, full: bool, server: Server, size: float) -> Iterator[Series]:
    DEFAULT.install(server)
    return scale.CASES[name](server, size, full=full)


def _arguments() -> argparse.Namespace:
    names = [*(module.PART for module in MODULES), "scale", *(f"scale.{name}" for name in scale.CASES), dashboard.PART]
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(names)}; without one, all")
    parser.add_argument(
        "--quick", action="store_true", help="a first impression in a minute, without peers; writes nothing"
    )
    parser.add_argument("--size", type=float, default=1.0, help="a fraction of the usual size, such as 0.01")
    parser.add_argument(
        "--full",
        action="store_true",
        help="scale and dashboard with millions of entries, and after minutes: about an hour",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write; docs for the project's own pages")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(names):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(names)}")
    return arguments


if __name__ == "__main__":
    main()
