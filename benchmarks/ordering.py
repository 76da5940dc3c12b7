"""What ordering groups cost the entries that have no order: `python3 -m benchmarks.ordering`, about three minutes.

The same unordered entries are drained with groups beside them and without any, in turn (A B A B), to adapters that do nothing:

- blocked: as many entries wait in the same destination, in groups that are blocked by uncertain entries; without, none.
- drained: as many entries of another destination are drained at the same time by the same dispatcher, in groups; without, as many
  that are unordered, too.

The median of the rounds' ratios is printed, of the time until the last unordered entry was sent. Blocked groups must cost at
most 5 %. An entry that leaves a group takes its dispatcher longer than one that has no order, and so those wait that are
claimed beside it: three times as long at most.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import outbox
from benchmarks.draining import ROUNDS, drained, draining_engine, filling, numbers
from dispatchers import Delivered, Delivery, Operations
from outbox.sessions.session import flush_all

ENTRIES = 10_000
GROUPS = 1_000


def main() -> None:
    with draining_engine("benchmarks.ordering", __doc__) as engine:
        print(f"until {ENTRIES} unordered entries were sent, seconds; beside them {ENTRIES} in {GROUPS} groups")
        print(f"{'groups':>10}{'without':>10}{'with':>10}{'ratio':>10}{'at most':>10}")
        bench = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
        met = [
            compare(engine, bench, "blocked", 1.05, nothing, blocked_groups),
            compare(engine, bench, "drained", 3, others, groups_elsewhere),
        ]
    sys.exit(0 if all(met) else 1)


Beside = Callable[[outbox.Outbox, Session], None]
"""Enqueues what is there beside the unordered entries."""


def compare(engine: Engine, bench: outbox.Outbox, name: str, goal: float, *sides: Beside) -> bool:
    pairs = [[asyncio.run(seconds(engine, bench, beside)) for beside in sides] for _ in range(ROUNDS)]
    without, with_groups = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(groups / none for none, groups in pairs)
    print(f"{name:>10}{without:>10.2f}{with_groups:>10.2f}{ratio:>10.3f}{goal:>10.2f}")
    return ratio <= goal


# --- what is there beside them


def nothing(bench: outbox.Outbox, session: Session) -> None:
    pass


def others(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "other.charge")


def groups_elsewhere(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "other.charge", groups=GROUPS)


def blocked_groups(bench: outbox.Outbox, session: Session) -> None:
    put(bench, session, "noop.charge", groups=GROUPS)
    flush_all(session)
    for statement in (
        "UPDATE outbox_queue SET state = 'uncertain', due_at = '9999-12-31 00:00:00Z', maybe_sent = true"
        " WHERE position IS NOT NULL AND due_at < '9999-12-31 00:00:00Z'",
        "INSERT INTO outbox_blocked_group (ordering_key, entry_id, reason, since)"
        " SELECT ordering_key, id, 'no answer', now() FROM outbox_queue WHERE state = 'uncertain'",
    ):
        session.execute(text(statement))


def put(bench: outbox.Outbox, session: Session, operation: str, groups: int = 0) -> None:
    for number in range(ENTRIES):
        ordering_key = f"group {number % groups}" if groups else None
        payload = {"amount": 2000, "currency": "eur"}
        bench.enqueue(session, operation, payload, parent=f"n:{next(numbers)}", ordering_key=ordering_key)


# --- the drain


async def seconds(engine: Engine, bench: outbox.Outbox, beside: Beside) -> float:
    """How long a new dispatcher takes until it has sent the last unordered entry."""
    operations, left, sent_at = Operations(), ENTRIES, 0.0

    @operations.operation("noop")
    async def deliver(delivery: Delivery) -> Delivered:
        nonlocal left, sent_at
        left, sent_at = left - 1, time.perf_counter()
        return Delivered()

    @operations.operation("other")
    async def deliver_other(delivery: Delivery) -> Delivered:
        return Delivered()

    with filling(engine) as session:
        beside(bench, session)
        put(bench, session, "noop.charge")
    _, started, _ = await drained(engine, bench, operations)
    if left:
        raise SystemExit(f"{left} unordered entries were not sent, or some twice")
    return sent_at - started


if __name__ == "__main__":
    main()
