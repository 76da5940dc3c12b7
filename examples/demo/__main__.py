"""`python -m examples.demo`: exit status 0 if the audit passed, 1 if it failed, 2 if the demo could not be run."""

import argparse
import signal
import sys
from types import FrameType

from rich.console import Console

from examples.demo.children import ChildDied
from examples.demo.demo_run import run_demo
from examples.demo.introduction import print_introduction
from examples.demo.report import report
from examples.demo.scenario import DemoOptions, Stuck
from examples.demo.stay import stay
from examples.demo.view import view

LINES_WIDTH = 100
ORDERS, OPENING_ORDERS = 300, 60


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="examples.demo", description="Charge cards during crashes, and audit the result."
    )
    parser.add_argument("--orders", type=positive, help="how many checkouts (300; with --stay 60, and then more)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--database", metavar="URL", help="an SQLAlchemy URL (a temporary PostgreSQL, else SQLite)")
    where.add_argument("--sqlite", action="store_true", help="use SQLite, and start no PostgreSQL")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random faults (1)")
    parser.add_argument(
        "--forgetful", action="store_true", help="a payment service that forgets every key at once: the audit must fail"
    )
    parser.add_argument(
        "--stay", action="store_true", help="keep a shop open until Ctrl-C, with the dashboard; no audit"
    )
    given = parser.parse_args()
    if given.stay and given.forgetful:
        parser.error("--forgetful shows itself in the audit, and --stay makes none: leave one of them out")
    signal.signal(signal.SIGTERM, stop)

    console = Console()
    if not console.is_terminal:
        console = Console(width=LINES_WIDTH)
    options = DemoOptions(
        orders=given.orders or (OPENING_ORDERS if given.stay else ORDERS),
        seed=given.seed,
        database=given.database,
        sqlite=given.sqlite,
        forgetful=given.forgetful,
    )
    try:
        if given.stay:
            stay(options, console)
            return 0
        print_introduction(console, options)
        with view(console) as shown:
            ending = run_demo(options, shown)
    except (ChildDied, Stuck) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    report(console, ending)
    return 0 if ending.audit.passed else 1


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def stop(number: int, frame: FrameType | None) -> None:
    """Exit as after a Ctrl-C, so that every process that the demo started is ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
