"""The benchmarks: `python3 dev.py bench`.

It starts a PostgreSQL of its own with normal durability, measures all sides in turn (A B A B), prints medians, spreads,
CPU, WAL and each goal with its verdict, and writes the figures, a page and charts.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import drain, enqueue, latency, requests, sends
from benchmarks.contestants import available
from benchmarks.harness import Report, Series, Server, machine, running_server
from benchmarks.report import merged, print_part, write

RESULTS = Path(__file__).with_name("results")
QUICK_SIZE = 0.25

Measuring = Callable[[Server, float], Iterator[Series]]
PARTS: dict[str, Measuring] = {module.PART: module.measure for module in (drain, latency, sends, enqueue, requests)}
QUICK: dict[str, Measuring] = {"drain": drain.measure_quickly, "enqueue": enqueue.measure}


def main() -> None:
    arguments = _arguments()
    parts = QUICK if arguments.quick else {name: PARTS[name] for name in arguments.parts or PARTS}
    size = QUICK_SIZE if arguments.quick else arguments.size
    with running_server() as server:
        report = Report(machine(server), notes=[f"{each.name}: {each.differs}" for each in available()])
        print(report.machine)
        for part, measure in parts.items():
            began = time.monotonic()
            report.series.extend(measure(server, size))
            print_part(report, part)
            print(f"{part} took {time.monotonic() - began:.0f} s")
    if not arguments.quick:
        figures = arguments.out / "performance" / "figures.json"
        old = Report.from_json(figures.read_text()) if figures.exists() else None
        write(merged(old, report), arguments.out)
        print(f"written: {arguments.out / 'performance.md'}, and the folder beside it")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}; else all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first impression in a minute, without peers; writes nothing"
    )
    parser.add_argument("--size", type=float, default=1.0, help="a fraction of the usual size, such as 0.01")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write; docs for the project's own pages")
    return parser.parse_args()


if __name__ == "__main__":
    main()
