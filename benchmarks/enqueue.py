"""What entries add to a transaction, in CPU of client and server, and how much WAL an entry is."""

import gc
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

from sqlalchemy import Engine, String, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox
from benchmarks.harness import Series, Server, Usage, interleave, process_cpu
from benchmarks.waiting import add_settled
from outbox import migrations

PART = "enqueue"
DATABASE = "bench_enqueue"
WAL_DATABASE = "bench_enqueue_wal"
ROUNDS = 25  # short ones: a machine's speed may change by a third within seconds
TRANSACTIONS = 40  # in a round
SIDES = {"no entry": 0, "1 entry": 1, "10 entries": 10, "100 entries": 100}
PLAIN_CORE = {"outbox_plain_core": True}  # without the short way to the driver: outbox/sql/postgresql/fast_execute.py
WAL_ROUNDS = 3
WAL_PRESENT = 200_000
WAL_ENTRIES = 200  # few, so that most pages are touched for the first time after the checkpoint
PAYLOAD = {"amount": 2000, "currency": "eur", "customer": "cus_1", "description": "one line of an order"}
BENCH = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
DATA_KEY = outbox.Encryption({"d1": bytes(range(32))})
ENCRYPTING = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench", encryption=DATA_KEY)

numbers = count()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(String(255))  # MariaDB wants a length
    amount: Mapped[int]


def measure(server: Server, size: float) -> Iterator[Series]:
    server.create(DATABASE)
    migrations.upgrade(server.url(DATABASE))
    engine = create_engine(server.url(DATABASE))
    Base.metadata.create_all(engine)
    yield from compare_transactions(engine, size)
    engine.dispose()
    yield from compare_wal(server, size)


def compare_wal(server: Server, size: float) -> Iterator[Series]:
    """In a database of its own: rows of other lengths would leave room for single rows on each page, which VACUUM finds."""
    server.create(WAL_DATABASE)
    migrations.upgrade(server.url(WAL_DATABASE))
    engine = create_engine(server.url(WAL_DATABASE))
    Base.metadata.create_all(engine)
    with server.connect(WAL_DATABASE) as connection:
        add_settled(connection, max(int(WAL_PRESENT * size), 1000), "1 hour")
    rows = {"an ORM row": 0, "an entry": 1}
    wal = {side: partial(wal_bytes, server, engine, entries) for side, entries in rows.items()}
    yield from interleave(PART, "WAL after a checkpoint", wal, max(int(WAL_ROUNDS * size), 1))
    engine.dispose()


def compare_transactions(engine: Engine, size: float) -> Iterator[Series]:
    plain = engine.execution_options(**PLAIN_CORE)
    contestants = {side: (engine, entries, BENCH) for side, entries in SIDES.items()}
    contestants |= {"1 entry, plain Core": (plain, 1, BENCH), "1 entry, encrypted": (engine, 1, ENCRYPTING)}
    rounds = max(int(TRANSACTIONS * size), 2)
    sides = {side: partial(transactions_cpu, *each, transactions=rounds) for side, each in contestants.items()}
    gc.freeze()  # what is loaded by now is not walked at each collection, whichever side caused it
    yield from interleave(PART, "transaction", sides, max(int(ROUNDS * size), 1), warm_ups=1)
    gc.unfreeze()


def transactions_cpu(engine: Engine, entries: int, ob: outbox.Outbox, *, transactions: int) -> Mapping[str, float]:
    """Microseconds of CPU for each of some transactions, each in a session of its own, as a request's is."""
    with Session(engine) as session:
        backend = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        session.commit()  # at a rollback psycopg forgets what it has prepared, and the first transactions would be colder
    server, client = process_cpu(backend), time.process_time()
    for _ in range(transactions):
        transaction(engine, entries, ob, with_order=True)
    # One thread: the pool hands out the same connection, so the same server process, each time.
    used = time.process_time() - client, process_cpu(backend) - server
    client_us, server_us = (each / transactions * 1e6 for each in used)
    return {"cpu_us": client_us + server_us, "client_us": client_us, "server_us": server_us}


def transaction(engine: Engine, entries: int, ob: outbox.Outbox = BENCH, *, with_order: bool) -> None:
    number = next(numbers)
    with Session(engine) as session, session.begin():
        if with_order:
            session.add(Order(customer="ada", amount=2000))
        for line in range(entries):
            ob.enqueue(session, "noop.charge", PAYLOAD, parent=f"order:{number}", discriminator=str(line))


def wal_bytes(server: Server, engine: Engine, entries: int) -> Mapping[str, float]:
    """For each of some transactions of one entry, or of one ORM row."""
    server.tidy(WAL_DATABASE)
    with server.connect() as connection:
        before = Usage.now(server, connection)
        for _ in range(WAL_ENTRIES):
            transaction(engine, entries, with_order=not entries)
        return {"wal_bytes": (Usage.now(server, connection).wal - before.wal) / WAL_ENTRIES}
