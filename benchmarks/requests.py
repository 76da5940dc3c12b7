"""What a claim adds to a request, in CPU of client and server, and what a replay costs beside a first execution.

The request, through the ORM, in one transaction: it reads its customer, writes an order with three lines, and enqueues one entry.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from sqlalchemy import Engine, ForeignKey, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import outbox
from benchmarks.cpu import process_cpu

ROUNDS = 7
REQUESTS = 320
CLIENTS = (1, 16)
CLAIM_GOAL = 1.35
REPLAY_GOAL = 0.5
BODY = b'{"customer": 1, "lines": [["pen", 500], ["ink", 700], ["pad", 800]]}'
CHARGE = {"amount": 2000, "currency": "eur", "customer": "cus_1", "description": "an order of three lines"}

numbers = count()


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "bench_customer"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Purchase(Base):
    __tablename__ = "bench_purchase"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey(Customer.id))
    lines: Mapped[list["Line"]] = relationship()


class Line(Base):
    __tablename__ = "bench_line"

    id: Mapped[int] = mapped_column(primary_key=True)
    purchase_id: Mapped[int] = mapped_column(ForeignKey(Purchase.id))
    item: Mapped[str]
    amount: Mapped[int]


@dataclass(frozen=True)
class Costs:
    """Microseconds of CPU a request, one figure a round, in turn."""

    plain: list[float]
    claimed: list[float]
    replayed: list[float]


def compare_requests(url: str, bench: outbox.Outbox) -> bool:
    """Print the third table; returns whether all goals were met."""
    print("a request (one read, four rows, one entry) with a claim, over the same without; and replayed, over claimed:")
    print("CPU of client and server")
    print(f"{'clients':>10}{'':>12}{'us':>10}{'ratio':>10}{'at most':>10}")
    met = True
    for clients in CLIENTS:
        engine = create_engine(url, pool_size=clients, max_overflow=0)
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.merge(Customer(id=1, name="Ada"))
        met &= _report(clients, _measure(engine, bench, clients))
        engine.dispose()
    return met


def _measure(engine: Engine, bench: outbox.Outbox, clients: int) -> Costs:
    costs = Costs([], [], [])
    for measured in [False] + [True] * ROUNDS:
        first = next(numbers)
        keys = [f"order:{first}:{number}" for number in range(REQUESTS)]
        plain = _cpu(engine, clients, keys, lambda key: _plain(engine, bench, f"plain:{key}"))
        claimed = _cpu(engine, clients, keys, lambda key: _claimed(engine, bench, key))
        replayed = _cpu(engine, clients, keys, lambda key: _claimed(engine, bench, key))
        gc.freeze()  # what is loaded by now is not walked at each collection, whichever side caused it
        if measured:
            costs.plain.append(plain)
            costs.claimed.append(claimed)
            costs.replayed.append(replayed)
    return costs


def _report(clients: int, costs: Costs) -> bool:
    claim = statistics.median(a / b for a, b in zip(costs.claimed, costs.plain, strict=True))
    replay = statistics.median(a / b for a, b in zip(costs.replayed, costs.claimed, strict=True))
    print(f"{clients:>10}{'without':>12}{statistics.median(costs.plain):>10.0f}")
    print(f"{'':>10}{'claimed':>12}{statistics.median(costs.claimed):>10.0f}{claim:>10.2f}{CLAIM_GOAL:>10.2f}")
    print(f"{'':>10}{'replayed':>12}{statistics.median(costs.replayed):>10.0f}{replay:>10.2f}{REPLAY_GOAL:>10.2f}")
    return claim <= CLAIM_GOAL and replay <= REPLAY_GOAL


def _cpu(engine: Engine, clients: int, keys: list[str], request: Callable[[str], None]) -> float:
    """Microseconds of CPU for each request, made by so many threads at once, each on a connection of the pool."""
    backends = _backends(engine, clients)
    server, client = sum(map(process_cpu, backends)), time.process_time()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(request, keys))
    return (time.process_time() - client + sum(map(process_cpu, backends)) - server) / len(keys) * 1e6


def _backends(engine: Engine, clients: int) -> list[int]:
    """The server's processes behind the pool's connections: all of them, as none may be opened beyond."""
    sessions = [Session(engine) for _ in range(clients)]
    pids = [session.execute(text("SELECT pg_backend_pid()")).scalar_one() for session in sessions]
    for session in sessions:
        session.commit()  # at a rollback psycopg forgets what it has prepared
        session.close()
    return pids


def _plain(engine: Engine, bench: outbox.Outbox, key: str) -> None:
    with Session(engine) as session, session.begin():
        _place_order(session)
        bench.enqueue(session, "noop.charge", CHARGE, parent=key)


def _claimed(engine: Engine, bench: outbox.Outbox, key: str) -> None:
    with (
        Session(engine) as session,
        session.begin(),
        bench.idempotent(session, key, scope="acct_1", request=BODY) as claim,
    ):
        if not claim.replayed:
            number = _place_order(session)
            bench.enqueue(session, "noop.charge", CHARGE)
            claim.respond(201, {"order": number})


def _place_order(session: Session) -> int:
    customer = session.get_one(Customer, 1)
    order = Purchase(customer_id=customer.id)
    order.lines = [Line(item=item, amount=amount) for item, amount in (("pen", 500), ("ink", 700), ("pad", 800))]
    session.add(order)
    session.flush()
    return order.id
