"""What sharing out costs a fair destination: `python3 -m benchmarks.fairness`, about a minute.

The same entries are drained as an ordinary destination's and as a fair one's, in turn (A B A B), of few scopes and of many, to an
adapter that does nothing. The median of the rounds' ratios is printed; at most 2.5 times the time is the goal. A send to a real
service costs many times what either takes.
"""

import asyncio
import statistics
import sys

from sqlalchemy import Engine

import outbox
from benchmarks.draining import ROUNDS, drained, draining_engine, filling, numbers
from dispatchers import Delivered, Delivery, Operations

ENTRIES = 5_000
SCOPES = (1, 100, 5_000)
GOAL = 2.5


def main() -> None:
    with draining_engine("benchmarks.fairness", __doc__) as engine:
        print(
            f"draining {ENTRIES} entries, seconds\n{'scopes':>8}{'ordinary':>10}{'fair':>10}{'ratio':>10}{'at most':>10}"
        )
        met = [compare(engine, scopes) for scopes in SCOPES]
    sys.exit(0 if all(met) else 1)


def compare(engine: Engine, scopes: int) -> bool:
    keyring = outbox.Keyring({"k1": bytes(range(32))})
    benches = [outbox.Outbox(keyring, env="bench", fair=fair) for fair in ((), {"noop"})]
    pairs = [[asyncio.run(seconds(engine, bench, scopes)) for bench in benches] for _ in range(ROUNDS)]
    ordinary, fair = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(fair / ordinary for ordinary, fair in pairs)
    print(f"{scopes:>8}{ordinary:>10.2f}{fair:>10.2f}{ratio:>10.2f}{GOAL:>10.1f}")
    return ratio <= GOAL


async def seconds(engine: Engine, bench: outbox.Outbox, scopes: int) -> float:
    """How long a new dispatcher takes to drain them."""
    operations = Operations()

    @operations.operation("noop")
    async def deliver(delivery: Delivery) -> Delivered:
        return Delivered()

    with filling(engine) as session:
        for number in range(ENTRIES):
            parent = outbox.ParentKey(f"n:{next(numbers)}", scope=f"tenant {number % scopes}")
            bench.enqueue(session, "noop.charge", {"amount": 2000, "currency": "eur"}, parent=parent)
    settled, _, taken = await drained(engine, bench, operations)
    if settled != ENTRIES:
        raise SystemExit(f"the dispatcher settled {settled} of {ENTRIES}")
    return taken


if __name__ == "__main__":
    main()
