"""Apps and dispatchers on all nodes of a Galera cluster while nodes are broken: `python3 dev.py galera --chaos`.

Nodes are killed, frozen, cut off and made to copy another node. At the end every entry is compared with the service's ledger.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from dispatchers import Adapter, Delivered, Delivery, Limits, Outcome, Rejected
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.time_limits import FOREVER, Window
from outbox import migrations
from outbox.keys import Tag, encode_native
from outbox.sql.connections.engines import engine_of
from support.database import TABLES
from support.galera_cluster import Cluster, Node, end_on_signals, missing_part, running_cluster, wait_until

OB = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
GROUPS = 8  # for each app; every second entry is in one
REFUSED = 10  # of so many entries the service refuses one, which is in no group: it would block the others
FAULTS = ("kill", "freeze", "split", "stall", "copy")


class Ledger(Adapter):
    """A service that remembers keys. executed, refused: the numbers of the entries, by key. sent: how often each key came."""

    timeout = timedelta(seconds=5)
    window: Window = FOREVER

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.executed: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.sent: Counter[str] = Counter()

    async def send(self, delivery: Delivery) -> Outcome:
        number = delivery.payload["number"]
        with self._lock:
            self.sent[delivery.key] += 1
            if number % REFUSED == 1:
                self.refused[delivery.key] = number
                return Rejected("no such order", conclusive=True)
            is_repeated = delivery.key in self.executed
            self.executed.setdefault(delivery.key, number)
        return Delivered({"number": number}, replayed=is_repeated)


LOST = (sa.exc.DBAPIError, pymysql.Error, outbox.NoTransaction)
"""What a lost node raises in an app. PyMySQL's own: when SQLAlchemy resets the connection that it takes back."""


@dataclass
class Run:
    """One run. conflicts: the commits of apps that were refused. unknown: those whose result the app did not learn."""

    ledger: Ledger = field(default_factory=Ledger)
    conflicts: int = 0
    unknown: int = 0
    enqueued: int = 0
    failures: list[BaseException] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)


def place_orders(run: Run, engine: sa.Engine, app: int, numbers: range) -> None:
    """Each in a transaction of its own, which is run again until its commit is known: a key makes that safe."""
    for number in numbers:
        group = None if number % 2 else f"app {app}, group {number // 2 % GROUPS}"
        while not run.stopping.is_set():
            try:
                with Session(engine) as session, session.begin():
                    entry = {"parent": f"order:{number}", "ordering_key": group, "if_exists": "ignore"}
                    OB.enqueue(session, "crm.upsert", {"number": number}, **entry)  # type: ignore[arg-type]
            except LOST as error:
                is_conflict = getattr(getattr(error, "orig", None), "args", (0,))[:1] == (1213,)
                run.conflicts += is_conflict
                run.unknown += not is_conflict
                run.stopping.wait(0.005 if is_conflict else 0.2)
            else:
                run.enqueued += 1
                break


def dispatch(run: Run, engine: sa.Engine, concurrency: int) -> None:
    async def main() -> None:
        working = DispatcherWork(
            engine,
            outbox=OB,
            adapters={"crm": run.ledger},
            lease=timedelta(seconds=8),
            margin=timedelta(seconds=1),
            poll=timedelta(milliseconds=50),
            concurrency=concurrency,
            limits={"crm": Limits(breaker=None)},
        )
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        while not run.stopping.is_set() and not pump.done():  # noqa: ASYNC110  # another thread sets it
            await asyncio.sleep(0.05)
        stopping.set()
        await pump

    asyncio.run(main())


@contextmanager
def working(run: Run, *threads: threading.Thread) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        run.stopping.set()
        for thread in threads:
            thread.join(60)


def noting(run: Run, function: object, *arguments: object) -> threading.Thread:
    def body() -> None:
        try:
            function(*arguments)  # type: ignore[operator]
        except BaseException as error:
            run.failures.append(error)

    return threading.Thread(target=body, daemon=True)


def break_node(cluster: Cluster, node: Node, fault: str) -> None:
    """Break one node until the others have noticed, and let it come back."""
    others = [each for each in cluster.nodes if each is not node]
    if fault == "stall":  # too short to leave the group: flow control stops the commits of all nodes
        node.freeze()
        time.sleep(1)
        node.thaw()
        return
    if fault in ("kill", "copy"):
        node.kill()
    else:
        node.freeze() if fault == "freeze" else node.split()
    others[0].until("wsrep_cluster_size", str(len(others)))
    if fault == "copy":
        node.lose_data()
    if fault in ("kill", "copy"):
        node.start()
    else:
        node.thaw() if fault == "freeze" else _heal(node)
    cluster.until_whole()


def _heal(node: Node) -> None:
    def healed() -> bool:
        try:
            node.heal()
        except pymysql.Error:
            return False
        return True

    wait_until(healed, f"{node.name} may reach the others")


def chaos(cluster: Cluster, entries: int, faults: Sequence[str]) -> str:
    """Returns the finding. Raises AssertionError for an entry that was lost, done twice, or ended falsely."""
    query = {"read_timeout": "6", "write_timeout": "6", "connect_timeout": "3"}
    engines = [engine_of(url.update_query_dict(query)) for url in cluster.urls("shop")]
    migrations.upgrade(engines[0])
    run, began, size = Run(), time.monotonic(), len(engines)
    parts = [range(entries * app // size, entries * (app + 1) // size) for app in range(size)]
    apps = [noting(run, place_orders, run, engine, app, parts[app]) for app, engine in enumerate(engines)]
    senders = [noting(run, dispatch, run, engine, 64) for engine in engines]
    with working(run, *apps, *senders):
        for number, fault in enumerate(faults):
            node = cluster.nodes[number % size]
            try:
                break_node(cluster, node, fault)
            except Exception as error:
                error.add_note(f"after the fault {fault!r} of {node.name}, the {number + 1}th")
                raise
        wait_until(lambda: bool(run.failures) or run.enqueued == entries, "all enqueued", 1800)
        wait_until(lambda: bool(run.failures) or not _count(cluster.nodes[0], "queue"), "all settled", 1800)
    if run.failures:
        raise BaseExceptionGroup("apps or dispatchers ended", run.failures)
    cluster.until_whole()
    for node, engine in zip(cluster.nodes, engines, strict=True):
        wait_until(lambda node=node: _count(node, "settlement") == entries, f"{node.name} has every settlement")
        compare(run, engine, entries)
        engine.dispose()
    repeats = sum(run.ledger.sent.values()) - entries
    return (
        f"{entries} entries, {len(faults)} faults: each ended once and as the service says, on {size} nodes;"
        f" {repeats} sends repeated under the same key, {run.conflicts} commits of apps refused, {run.unknown} unknown;"
        f" {time.monotonic() - began:.0f} s"
    )


def _count(node: Node, table: str) -> int:
    return int(node.execute(f"SELECT count(*) FROM shop.outbox_{table}")[0][0])


def compare(run: Run, engine: sa.Engine, entries: int) -> None:
    """Entry by entry: one for each order, and its final state is what the service did under its key."""
    entry, settlement = TABLES.entry, TABLES.settlement
    with engine.connect() as connection:
        states = select_states(connection, entry, settlement)
        assert not connection.scalar(sa.select(sa.func.count()).select_from(TABLES.queue))
    expected = {f"order:{number}": number for number in range(entries)}
    assert Counter(parent for parent, _, _ in states) == Counter(expected.keys())
    for parent, tag, state in states:
        key, number = encode_native(Tag(bytes(tag))), expected[parent]
        done, refused = run.ledger.executed.get(key), run.ledger.refused.get(key)
        wanted = ("failed", None, number) if number % REFUSED == 1 else ("delivered", number, None)
        assert (state, done, refused) == wanted, (parent, state, done, refused)
    assert len(run.ledger.executed) + len(run.ledger.refused) == entries  # nothing under another key


def select_states(connection: sa.Connection, entry: sa.Table, settlement: sa.Table) -> list[tuple[str, bytes, str]]:
    rows = sa.select(entry.c.parent, entry.c.tag, settlement.c.state).join(settlement, settlement.c.id == entry.c.id)
    return [(row.parent, row.tag, row.state) for row in connection.execute(rows)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py galera --chaos", description=__doc__)
    parser.add_argument("--chaos", action="store_true", required=True)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument(
        "--faults", type=int, default=15, help=f"in all; in turn {', '.join(FAULTS)}, each on the next node"
    )
    options = parser.parse_args(arguments)
    if (missing := missing_part()) is not None:
        print(f"a Galera cluster needs {missing}, which is not installed here", file=sys.stderr)
        return 1
    end_on_signals()
    with running_cluster() as cluster:
        print(chaos(cluster, options.entries, [FAULTS[number % len(FAULTS)] for number in range(options.faults)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
