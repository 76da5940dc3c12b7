"""What a dead destination costs the others: `python3 -m benchmarks.bulkheads`, about half a minute.

The same entries are drained by a dispatcher that runs, with a backlog of a destination that never answers beside them, and
without one, in turn (A B A B). The median of the rounds' ratios is printed; at most 5 % more time is the goal.
"""

import asyncio
import statistics
import sys

from sqlalchemy import Engine

import outbox
from benchmarks.draining import ROUNDS, drained, draining_engine, filling, numbers
from dispatchers import Delivered, Delivery, Operations, Unknown

ALIVE = 10_000
DEAD = 10_000
DEAD_SECONDS = 0.05  # until a send to it fails
GOAL = 1.05


def main() -> None:
    with draining_engine("benchmarks.bulkheads", __doc__) as engine:
        bench = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
        pairs = [tuple(asyncio.run(seconds(engine, bench, dead)) for dead in (0, DEAD)) for _ in range(ROUNDS)]
    ratio = statistics.median(beside / alone for alone, beside in pairs)
    alone, beside = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    print(f"draining {ALIVE} entries: alone {alone:.2f} s, beside {DEAD} of a dead destination {beside:.2f} s")
    print(f"ratio {ratio:.3f}, at most {GOAL}")
    sys.exit(0 if ratio <= GOAL else 1)


async def seconds(engine: Engine, bench: outbox.Outbox, dead: int) -> float:
    """How long a new dispatcher takes for the living ones; what it takes to notice that the others are dead is in it."""
    operations = Operations()

    @operations.operation("alive")
    async def deliver(delivery: Delivery) -> Delivered:
        return Delivered()

    @operations.operation("dead", at_least_once=True)
    async def fail(delivery: Delivery) -> Unknown:
        await asyncio.sleep(DEAD_SECONDS)
        return Unknown("no answer")

    with filling(engine) as session:
        for operation, count in (("dead.charge", dead), ("alive.charge", ALIVE)):
            for _ in range(count):
                bench.enqueue(session, operation, {"amount": 2000, "currency": "eur"}, parent=f"n:{next(numbers)}")
    settled, _, taken = await drained(engine, bench, operations)
    if not ALIVE <= settled < ALIVE + 1000:
        raise SystemExit(f"the dispatcher settled {settled}, {ALIVE} of them alive")
    return taken


if __name__ == "__main__":
    main()
