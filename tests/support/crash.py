"""Rounds of work, each in a process that dies at a failpoint, and what is found afterwards: `python3 dev.py kills --rounds 200`.

One process, which never opens the database itself, forks one for each round that works until it dies. Another, which outlives
them all, then recovers, and compares the services' ledger with the outbox. So a round costs no start of an interpreter, and of
the database's connections only those of the process that dies.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import sqlalchemy as sa

import outbox
from dispatchers import Adapter, Delivery, Dispatcher, Limits, Operations, Outcome, Unknown
from dispatchers.admin.decide import decisions
from dispatchers.maintenance.jobs import Maintenance
from dispatchers.maintenance.retention import Retention
from dispatchers.store.database import DatabaseStore
from dispatchers.testing.failpoints import POINTS, failpoint
from dispatchers.testing.postgres import temporary_postgres
from outbox.keys import Tag, encode_native
from support.daemons import FileService
from support.database import TABLES, Base, Database, Order
from support.entries import HOUR, age
from support.mariadb_copies import READ_COMMITTED
from support.mysql_server import temporary_mysql

ROUNDS = 20
ROUNDS_IN_CI = 1
MAX_PASSES = 4  # of the next process: what was sent, looked at, decided upon, and what callbacks have enqueued
Task = Callable[[Database, Path], None]
OB = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")


class Fax(Adapter):
    """Keeps no keys, and never reports what it has done: each of its entries is uncertain, and needs an operator."""

    timeout = timedelta(seconds=5)

    def __init__(self, books: Path) -> None:
        self.books = books / "faxes.txt"

    async def send(self, delivery: Delivery) -> Outcome:
        with self.books.open("a") as book:
            book.write(f"{delivery.key}\n")
        return Unknown("no answer")

    @property
    def sent(self) -> list[str]:
        return self.books.read_text().split() if self.books.exists() else []


def dispatcher(database: Database, books: Path) -> Dispatcher:
    effects = Operations()

    @effects.on_settled("pay")
    def charged(session: sa.orm.Session, settlement: object) -> None:
        session.add(Order(customer=f"paid {settlement.entry.parent.key}", amount=1))  # type: ignore[attr-defined]
        OB.enqueue(session, "mail.receipt", {}, discriminator=settlement.entry.discriminator)  # type: ignore[attr-defined]

    service = FileService(books)
    adapters = {"pay": service, "mail": service, "fax": Fax(books)}
    limits = {"fax": Limits(breaker=None)}  # it never answers, and is no worse for it
    return Dispatcher(database.engine, outbox=OB, include=[effects], adapters=adapters, limits=limits)


def work(database: Database, books: Path, name: str) -> None:
    """Everything that the points lie in: an app's transaction, sends, callbacks, a decision, maintenance."""
    rng = Random(name)
    with database.begin() as session:
        session.add(Order(customer=name, amount=1))
        for operation in ("pay.charge", "fax.send", "mail.send"):
            for number in range(rng.choice([1, 1, 2, 3])):
                OB.enqueue(session, operation, {}, parent=name, discriminator=str(number))
    asyncio.run(dispatcher(database, books).run_once())
    look_at_the_uncertain(database, Fax(books))
    asyncio.run(dispatcher(database, books).run_once())
    keep_up(database)


def keep_up(database: Database) -> None:
    store = DatabaseStore(database.engine, OB.configuration)
    retention = Retention.of(timedelta(days=35), [])
    asyncio.run(Maintenance(store.run, TABLES, retention, pause_ratio=0).run_once(max_batches=1))


def look_at_the_uncertain(database: Database, fax: Fax) -> None:
    """An operator compares each uncertain entry with the service's own ledger."""
    keys = {entry.id: encode_native(Tag(bytes(entry.tag))) for entry in database.entries}
    for row in database.queue:
        if row.state == "uncertain":
            verdict = "happened" if keys[row.id] in fax.sent else "did_not_happen"
            with database.engine.begin() as connection:
                decisions.resolve(connection, TABLES, row.id, verdict, actor="ada", reason="looked")  # type: ignore[arg-type]


def recover(database: Database, books: Path) -> None:
    """What the next process does, some hours later; then the comparison."""
    for _ in range(MAX_PASSES):
        if not database.queue:
            break
        age(database, 2 * HOUR)
        asyncio.run(dispatcher(database, books).run_once())
        look_at_the_uncertain(database, Fax(books))
    compare(database, books)
    keep_up(database)


def compare(database: Database, books: Path) -> None:
    """The ledgers against the outbox, entry by entry, and the app's rows against both."""
    assert not database.queue, database.queue
    executed = Counter(Fax(books).sent) + Counter(FileService(books).effects)
    states = {row.id: row.state for row in database.rows(TABLES.settlement)}
    orders = Counter(order.customer for order in database.orders)
    for entry in database.entries:
        happened = executed.pop(encode_native(Tag(bytes(entry.tag))), 0)
        assert happened == (states[entry.id] == "delivered"), (entry.operation, states[entry.id], happened)
        assert states[entry.id] == "delivered" or entry.operation == "fax.send", (entry.operation, states[entry.id])
        assert orders[entry.parent] == 1, "entries without their business row"
    assert not executed, "effects that no entry asked for"
    charges = Counter(f"paid {entry.parent}" for entry in database.entries if entry.operation == "pay.charge")
    assert charges == Counter({name: count for name, count in orders.items() if name.startswith("paid ")})
    parents = {entry.parent for entry in database.entries}
    assert all(name in parents for name in orders if not name.startswith("paid ")), "a business row without its entries"


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py kills", description="Kill processes at every failpoint, and compare.")
    parser.add_argument("--url", help="a database with the tables; left out, a PostgreSQL is started for this")
    parser.add_argument("--mysql", action="store_true", help="start a MySQL instead")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at each point (default {ROUNDS})")
    parser.add_argument("--point", choices=POINTS, action="append", help="one of them (default: all)")
    options = parser.parse_args()
    points = options.point or list(POINTS)
    with tempfile.TemporaryDirectory() as books:
        if options.url:
            return kill(sa.make_url(options.url), Path(books), points, options.rounds)
        with started_mysql() if options.mysql else started_postgresql() as url:
            forked(url, make_tables)
            return kill(url, Path(books), points, options.rounds)


@contextmanager
def started_postgresql() -> Iterator[sa.URL]:
    with temporary_postgres() as server:
        yield sa.make_url(server.url)


@contextmanager
def started_mysql() -> Iterator[sa.URL]:
    with temporary_mysql() as url:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql("CREATE DATABASE kills")
        engine.dispose()
        yield url.set(database="kills").update_query_dict({"init_command": READ_COMMITTED})


def make_tables(database: Database) -> None:
    for metadata in (TABLES.metadata, Base.metadata):
        metadata.create_all(database.engine)


def empty_tables(database: Database, books: Path) -> None:
    """What is compared after a round is all that there is: so the last of a thousand rounds costs what the first one does."""
    for metadata in (TABLES.metadata, Base.metadata):
        for table in metadata.tables.values():
            database.execute(sa.delete(table))


def kill(url: sa.URL, books: Path, points: Sequence[str], rounds: int) -> int:
    sa.create_engine(url)  # loads the driver, once for all
    with survivor(url) as done:
        for point in points:
            (books / point).mkdir()
            problem = kill_at(point, url, books / point, rounds, done)
            print(problem or f"{point}: {rounds} killed, all is true", flush=True)
            if problem:
                return 1
    return 0


def kill_at(point: str, url: sa.URL, books: Path, rounds: int, done: Callable[[Task, Path], bool]) -> str | None:
    """What went wrong, if anything did. done: by the survivor, and whether it could."""
    if not done(empty_tables, books):
        return f"{point}: the tables could not be emptied"
    for number in range(rounds):
        name = f"{point}:{number}"
        if (ended := forked(url, partial(die_at, point, books=books, name=name))) != -signal.SIGKILL:
            return f"{name}: it did not die there, but ended with {ended}"
        if not done(recover, books):
            return f"{name}: broken"
    return None


@contextmanager
def survivor(url: sa.URL) -> Iterator[Callable[[Task, Path], bool]]:
    """A process that recovers, and says whether all is true, each time that it is asked."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=act_when_asked, args=(url, ours, theirs))
    process.start()
    theirs.close()

    def done(task: Task, books: Path) -> bool:
        ours.send((task, books))
        try:
            return bool(ours.recv())
        except EOFError:
            return False

    try:
        yield done
    finally:
        ours.close()
        process.join()


def act_when_asked(url: sa.URL, asking: Connection, answering: Connection) -> None:
    asking.close()  # the other end's copy: else this one would never see its end
    database = Database(url)
    with suppress(EOFError):
        while True:
            task, books = answering.recv()
            task(database, books)
            answering.send(True)


def die_at(point: str, database: Database, books: Path, name: str) -> None:
    with failpoint(point):
        work(database, books, name)


def forked(url: sa.URL, act: Callable[[Database], None]) -> int:
    """The exit status of a process that did this, as `subprocess` returns it."""
    pid = os.fork()
    if pid == 0:
        try:
            act(Database(url))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
