"""What very many of a kind cost: `python3 -m benchmarks.many`, about half a minute; with `--top 100000` about ten minutes.

The same entries are drained as those of 30 destinations, accounts, operations, ordering groups, scopes, parents or kids, and as
those of very many. The CPU time of the dispatcher for an entry is at most 3 times as much; with 100,000 each entry is alone.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Engine, create_engine

import outbox
from benchmarks.draining import database, filling
from dispatchers import Delivered, Delivery, Operations
from dispatchers.process.dispatcher_work import DispatcherWork
from outbox import migrations

FEW, MANY = 30, 1_000
ENTRIES_MIN = 3_000
GOAL = 3.0

Given = tuple[str, dict[str, Any]]
"""The operation and the settings of an entry."""

KINDS: dict[str, Callable[[int, int], Given]] = {
    "destinations": lambda number, share: (f"d{share}.do", {}),
    "accounts": lambda number, share: ("noop.do", {"destination": f"noop:acct_{share}"}),
    "operations": lambda number, share: (f"noop.do{share}", {}),
    "groups": lambda number, share: ("noop.do", {"ordering_key": f"group {share}"}),
    "scopes": lambda number, share: ("fair.do", {"parent": outbox.ParentKey(f"n:{number}", scope=f"tenant {share}")}),
    "parents": lambda number, share: ("noop.do", {"parent": f"p:{share}", "discriminator": str(number)}),
    "kids": lambda number, share: ("noop.do", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.many", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one or more of {', '.join(KINDS)}; without one, all")
    parser.add_argument("--top", type=int, default=MANY, help="how many there are of a kind")
    parser.add_argument("--database", help="SQLAlchemy URL of a database to use instead of a temporary PostgreSQL")
    arguments = parser.parse_args()
    with database(arguments.database) as (url, origin):
        print(f"{origin}; CPU of the dispatcher for an entry, in us\n{'':>14}{FEW:>10}{arguments.top:>10}{'ratio':>10}")
        migrations.upgrade(url)
        engine = create_engine(url)
        met = [compare(engine, kind, arguments.top) for kind in arguments.kinds or KINDS]
        engine.dispose()
    sys.exit(0 if all(met) else 1)


def compare(engine: Engine, kind: str, top: int) -> bool:
    entries = max(ENTRIES_MIN, top)
    asyncio.run(drained(engine, kind, FEW, ENTRIES_MIN // 10))  # what a process does once
    few, many = (asyncio.run(drained(engine, kind, count, entries)) for count in (FEW, top))
    print(f"{kind:>14}{few * 1e6:>10.0f}{many * 1e6:>10.0f}{many / few:>10.2f}", flush=True)
    return many <= GOAL * few


async def drained(engine: Engine, kind: str, count: int, entries: int) -> float:
    """The CPU seconds of the dispatcher for each of so many entries, which belong to `count` of the kind."""
    benches, operations = _benches(kind, count), Operations()
    with filling(engine) as session:
        for number in range(entries):
            operation, given = KINDS[kind](number, number % count)
            benches[number % len(benches)].enqueue(session, operation, {}, **{"parent": f"n:{number}", **given})
    for operation in sorted({KINDS[kind](0, share)[0] for share in range(count)}):
        operations.operation(operation)(_deliver)
    working = DispatcherWork(engine, outbox=benches[0], include=[operations])
    began, settled, empty = time.process_time(), 0, 0
    while settled < entries and empty < entries:  # a group's next entry is due after the one before
        found = await working.run_once()
        settled, empty = settled + found, 0 if found else empty + 1
    taken = time.process_time() - began
    await working.close()
    if settled != entries:
        raise SystemExit(f"the dispatcher settled {settled} of {entries} entries of {count} {kind}")
    return taken / entries


def _benches(kind: str, count: int) -> Sequence[outbox.Outbox]:
    """One outbox, but one for each kid, with the key ring of all."""
    kids = {f"k{number}": number.to_bytes(4) * 8 for number in range(1, (count if kind == "kids" else 1) + 1)}
    return [outbox.Outbox(outbox.Keyring(kids, current=kid), env="bench", fair={"fair"}) for kid in kids]


async def _deliver(delivery: Delivery) -> Delivered:
    return Delivered()


if __name__ == "__main__":
    main()
