"""How far one server goes: 1 to 8 dispatchers and writers on it, and the times from which `scaling_model` computes more."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.contestants import DEFAULT, working
from benchmarks.drain import figures, wait_until_done
from benchmarks.harness import TICKS, Series, Server, Usage, interleave, process_cpu
from benchmarks.outbox_side import BENCH, PAYLOAD
from benchmarks.scaling_curves import (
    DRAIN,
    ENQUEUE,
    PART,
    PROCESSES,
    SERVER,
    SIZE,
    computed,
    counted,
    of_this_machine,
)
from benchmarks.waiting import add_settled, add_waiting

ROUNDS = 5
DATABASE = "bench_scaling"

JOBS = 200_000
JOBS_LEAST = 2_000
WARM_UP = 4_000  # entries for each dispatcher
STEPS = 50  # reports of progress in a round of a writer
READY_SECONDS = 60.0  # until all processes of a round have started
SETTLING_SECONDS = 1.0  # and until they are idle

WRITTEN = 8_000  # transactions of one entry in a round
WRITTEN_BY_MANY = 200  # transactions of `MANY` entries
MANY = 100

SIZE_ENTRIES = 100_000
PASSED, CLAIMED = 5_000, 400  # rows that a claim passes over, and those that it finds after them
REPEATS = 15
COMMITS = 200


def measure(server: Server, size: float) -> Iterator[Series]:
    DEFAULT.install(server)
    measured = [*drain(server, size), *server_times(server), *enqueue(server, size), *sizes(server, size)]
    yield from measured
    yield from computed(of_this_machine(measured))


# --- drain


def drain(server: Server, size: float) -> Iterator[Series]:
    jobs = max(int(JOBS * size), JOBS_LEAST)
    sides = {counted(number, "dispatcher"): partial(drained, server, number, jobs) for number in PROCESSES}
    return interleave(PART, DRAIN, sides, rounds(size))


def drained(server: Server, number: int, jobs: int) -> Mapping[str, float]:
    """All dispatchers have started and are idle when the entries are committed, with a hint for all of them.

    cores_others: how many cores other programs used meanwhile.
    """
    fresh(server)
    dispatchers, given = replace(DEFAULT, workers=number), server.variables(DATABASE)
    with server.connect(DATABASE) as connection, working(dispatchers, given, "drain", str(jobs)):
        pids = wait_until_ready(connection, number)
        warm_up(server, connection, number)
        connections = number_of(connection, CONNECTIONS)
        commit_at_once(server, jobs)
        began, busy, client = time.perf_counter(), machine_cpu(), sum(map(process_cpu, pids))
        before, exchanges = Usage.now(server, connection), number_of(connection, WRITING_TRANSACTIONS)
        wait_until_done(connection, DEFAULT.left)
        seconds, busy, client = time.perf_counter() - began, machine_cpu() - busy, sum(map(process_cpu, pids)) - client
        after, exchanges = Usage.now(server, connection), number_of(connection, WRITING_TRANSACTIONS) - exchanges
    return {
        **figures(jobs, seconds, client, before, after),
        "entries_per_exchange": jobs / exchanges,
        "connections": connections,
        "cores_others": max(0.0, busy - client - (after.cpu - before.cpu)) / seconds,
    }


CONNECTIONS: LiteralString = (
    "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
)
WRITING_TRANSACTIONS: LiteralString = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"


def wait_until_ready(connection: psycopg.Connection[Any], number: int) -> list[int]:
    """The ids of the processes, once all of them have started."""
    until = time.monotonic() + READY_SECONDS
    while len(found := connection.execute("SELECT pid FROM outbox_dispatcher").fetchall()) < number:
        if time.monotonic() > until:
            raise SystemExit(f"{number} dispatchers did not start within {READY_SECONDS:g} s")
        time.sleep(0.05)
    time.sleep(SETTLING_SECONDS)
    return [pid for (pid,) in found]


def warm_up(server: Server, connection: psycopg.Connection[Any], number: int) -> None:
    """Their first claims prepare and compile what later ones use."""
    commit_at_once(server, WARM_UP * number)
    wait_until_done(connection, DEFAULT.left)
    time.sleep(SETTLING_SECONDS)


def commit_at_once(server: Server, jobs: int) -> None:
    """All entries in one transaction, with the hint of the last."""
    engine = sa.create_engine(server.url(DATABASE))
    with Session(engine) as session, session.begin():
        driver: Any = session.connection().connection.driver_connection
        add_waiting(driver, jobs - 1)
        BENCH.enqueue(session, "noop.send", PAYLOAD, parent=f"hint:{jobs}")
        driver.execute("ANALYZE")
    engine.dispose()


def machine_cpu() -> float:
    """Seconds of CPU that all programs of the machine have used."""
    user, nice, system, _, _, interrupts, soft, stolen = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, interrupts, soft, stolen))) / TICKS


# --- enqueue


def enqueue(server: Server, size: float) -> Iterator[Series]:
    sides = {
        f"{counted(number, 'writer')}, {entries} per commit": partial(
            written, server, number, entries, max(int(transactions * size), STEPS)
        )
        for entries, transactions in ((1, WRITTEN), (MANY, WRITTEN_BY_MANY))
        for number in PROCESSES
    }
    return interleave(PART, ENQUEUE, sides, rounds(size))


def written(server: Server, number: int, entries: int, transactions: int) -> Mapping[str, float]:
    """Entries that so many processes commit in a second, from when all of them have begun."""
    fresh(server)
    writers, step = replace(DEFAULT, workers=number), max(transactions // STEPS, 1)
    with (
        server.connect(DATABASE) as connection,
        working(writers, server.variables(DATABASE), "write", str(step), str(entries)) as progress,
    ):
        pids: set[int] = set()
        while len(pids) < number:
            pids.add(int(next(progress)))
        before, began, client = Usage.now(server, connection), time.perf_counter(), sum(map(process_cpu, pids))
        lines = transactions // step
        for _ in islice(progress, lines):
            pass
        seconds, after = time.perf_counter() - began, Usage.now(server, connection)
        client = sum(map(process_cpu, pids)) - client
    return figures(lines * step * entries, seconds, client, before, after)


# --- size


def sizes(server: Server, size: float) -> Iterator[Series]:
    """Bytes of the tables and indexes for each entry that waits, and for each that was delivered."""
    entries = max(int(SIZE_ENTRIES * size), 5_000)
    kinds: dict[str, Callable[[psycopg.Connection[Any]], None]] = {
        "an entry that waits": lambda connection: add_waiting(connection, entries),
        "a delivered entry": lambda connection: add_settled(connection, entries, "1 hour"),
    }
    for side, add in kinds.items():
        fresh(server)
        with server.connect(DATABASE) as connection:
            empty = [number_of(connection, each) for each in BYTES.values()]
            add(connection)
            server.tidy(DATABASE)
            for (metric, statement), less in zip(BYTES.items(), empty, strict=True):
                yield Series(PART, SIZE, side, metric, [(number_of(connection, statement) - less) / entries])


BYTES: dict[str, LiteralString] = {
    "table_bytes": "SELECT sum(pg_table_size(oid)) FROM pg_class WHERE relname LIKE 'outbox%' AND relkind = 'r'",
    "index_bytes": "SELECT sum(pg_indexes_size(oid)) FROM pg_class WHERE relname LIKE 'outbox%' AND relkind = 'r'",
}


# --- the server's own times


def server_times(server: Server) -> Iterator[Series]:
    """What a claim pays for each row that it passes over, and what a commit waits for the disk."""
    fresh(server)
    with server.connect(DATABASE) as claiming, server.connect(DATABASE) as other:
        add_waiting(claiming, 10 * PASSED)
        server.tidy(DATABASE)
        alone = claim_cpu(claiming)
        with other.transaction(force_rollback=True):
            other.execute(LEASE, [PASSED])
            locked = claim_cpu(claiming)
        other.execute(LEASE, [PASSED])
        leased = claim_cpu(claiming)
        flush = max(0.0, commit_seconds(other, "on") - commit_seconds(other, "off"))
    for side, seconds in (("locked row", locked - alone), ("leased row", leased - alone)):
        yield Series(PART, SERVER, side, "passed_us", [max(0.0, seconds) / PASSED * 1e6])
    yield Series(PART, SERVER, "flush of the WAL", "flush_us", [flush * 1e6])


LEASE = """
    UPDATE outbox_queue SET state = 'sending', lease_token = gen_random_uuid(), lease_until = now() + interval '1 hour',
        leased_at = now(), first_leased_at = now(), deliveries = 1
    WHERE id = ANY (ARRAY(SELECT id FROM outbox_queue ORDER BY due_at LIMIT %s))
"""
CLAIM = """
    SELECT id FROM outbox_queue
    WHERE destination = 'noop' AND due_at <= now() AND (lease_until IS NULL OR lease_until < now())
    ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED
"""


def claim_cpu(connection: psycopg.Connection[Any]) -> float:
    """Seconds of the server's CPU, as a median."""
    backend, used = connection.info.backend_pid, list[float]()
    for _ in range(REPEATS):
        before = process_cpu(backend)
        with connection.transaction(force_rollback=True):
            connection.execute(CLAIM, [CLAIMED])
        used.append(process_cpu(backend) - before)
    return statistics.median(used)


def commit_seconds(connection: psycopg.Connection[Any], durable: LiteralString) -> float:
    """Of a transaction that changes one row, as a median."""
    connection.execute(b"SET synchronous_commit = " + durable.encode())
    taken: list[float] = []
    for _ in range(COMMITS):
        began = time.perf_counter()
        connection.execute("SELECT pg_current_xact_id(), pg_logical_emit_message(true, 'bench', 'a row')")
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# --- what they share


def rounds(size: float) -> int:
    return max(int(ROUNDS * size), 1)


def fresh(server: Server) -> None:
    server.create(DATABASE, DEFAULT.installed)
    server.tidy(DATABASE)


def number_of(connection: psycopg.Connection[Any], statement: LiteralString) -> int:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return int(row[0])
