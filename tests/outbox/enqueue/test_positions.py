"""Positions are in commit order, for all writers, table names, and numbers of ordering keys."""

import random
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.concurrency import TEST_TIMEOUT
from support.daemons import wait_for
from support.database import TABLES, Database

import outbox
from outbox.requests import records
from outbox.sessions.session import flush_all
from outbox.sql import positions
from outbox.sql.connections.requirements import LockBudget

ADVISORY = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()")


def enqueue(session: Session, ob: outbox.Outbox, parent: str, *ordering_keys: str) -> None:
    for key in ordering_keys:
        ob.enqueue(session, "crm.upsert", {}, parent=parent, discriminator=key, ordering_key=key)
    flush_all(session)


def committed(database: Database, ob: outbox.Outbox, parent: str, *ordering_keys: str) -> None:
    with database.begin() as session:
        enqueue(session, ob, parent, *ordering_keys)


def waits(database: Database, work: "Future[None]") -> None:
    """Return once a transaction waits for a lock; `work` must not have ended by then."""
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        wait_for(lambda: work.done() or connection.scalar(waiting), "a transaction to wait for a lock")
    assert not work.done()


def in_order(database: Database) -> list[str]:
    """The parents of the entries, by position."""
    parents = {row.id: row.parent for row in database.entries}
    return [parents[row.id] for row in sorted(database.queue, key=lambda row: row.position)]


def test_one_ordering_key_has_one_lock_under_two_names_of_the_tables(postgresql: Database, ob: outbox.Outbox) -> None:
    """One service finds the tables by its search_path, the other by their schema."""
    named = outbox.Outbox(ob.configuration.keyring, env="test", schema="public")

    with ThreadPoolExecutor(1) as pool, postgresql.session() as first:
        enqueue(first, ob, "first", "customer:1")
        second = pool.submit(committed, postgresql, named, "second", "customer:1")
        waits(postgresql, second)
        first.commit()
        second.result(TEST_TIMEOUT)

    assert in_order(postgresql) == ["first", "second"]


def test_tables_of_another_prefix_have_locks_of_their_own(postgresql: Database, ob: outbox.Outbox) -> None:
    other = outbox.Outbox(ob.configuration.keyring, env="test", prefix="other_")
    other.configuration.tables.metadata.create_all(postgresql.engine)

    with ThreadPoolExecutor(1) as pool, postgresql.session() as first:
        enqueue(first, ob, "first", *map(str, range(300)))
        pool.submit(committed, postgresql, other, "second", "1").result(TEST_TIMEOUT)
        first.commit()


def test_different_ordering_keys_do_not_wait_for_each_other(postgresql: Database, ob: outbox.Outbox) -> None:
    with ThreadPoolExecutor(1) as pool, postgresql.session() as first:
        enqueue(first, ob, "first", "customer:1")
        pool.submit(committed, postgresql, ob, "second", "customer:2").result(TEST_TIMEOUT)
        first.commit()

    assert in_order(postgresql) == ["first", "second"]


def test_a_large_flush_takes_one_lock_and_keeps_the_order(postgresql: Database, ob: outbox.Outbox) -> None:
    keys = [f"customer:{number}" for number in range(600)]

    with ThreadPoolExecutor(2) as pool, postgresql.session() as small:
        enqueue(small, ob, "small before", "customer:7")
        large = postgresql.session()
        flush = pool.submit(enqueue, large, ob, "large", *keys)
        waits(postgresql, flush)  # for a transaction that has one of its keys
        small.commit()
        flush.result(TEST_TIMEOUT)
        assert large.execute(ADVISORY).scalar_one() == 1
        later = pool.submit(committed, postgresql, ob, "small after", "customer:7")
        waits(postgresql, later)
        large.commit()
        large.close()
        later.result(TEST_TIMEOUT)

    assert list(dict.fromkeys(in_order(postgresql))) == ["small before", "large", "small after"]


def test_many_flushes_of_one_transaction_take_a_bounded_number_of_locks(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "BUDGET", LockBudget(5))

    with postgresql.session() as session:
        for number in range(12):
            enqueue(session, ob, f"order:{number}", f"customer:{number}")
        taken = session.execute(ADVISORY).scalar_one()
        session.commit()
        enqueue(session, ob, "order:12", "customer:12")  # the next transaction starts again
        again = session.execute(ADVISORY).scalar_one()
        session.commit()

    assert taken <= 5 + 2  # the share, and the lock without one
    assert again == 2
    assert in_order(postgresql) == [f"order:{number}" for number in range(13)]


def test_a_reader_of_an_entry_sees_all_before_it_of_its_ordering_key(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent flushes of few and of many ordering keys, against a reader."""
    monkeypatch.setattr(positions, "BUDGET", LockBudget(3))
    engine = postgresql.new_engine(pool_size=6)
    barrier, over = threading.Barrier(5), threading.Event()
    seen: list[dict[str, set[int]]] = []

    def write(worker: int) -> None:
        rng = random.Random(worker)
        barrier.wait(TEST_TIMEOUT)
        for number in range(15):
            keys = rng.sample("abcdefgh", rng.choice([1, 2, 3, 4, 8]))
            with Session(engine) as session, session.begin():
                enqueue(session, ob, f"{worker}.{number}", *keys)

    def read() -> None:
        queue = TABLES.queue
        barrier.wait(TEST_TIMEOUT)
        with postgresql.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
            while not over.is_set():
                visible = defaultdict(set)
                for key, position in connection.execute(sa.select(queue.c.ordering_key, queue.c.position)):
                    visible[key].add(position)
                seen.append(visible)

    with ThreadPoolExecutor(5) as pool:
        reader = pool.submit(read)
        for writer in [pool.submit(write, worker) for worker in range(4)]:
            writer.result(TEST_TIMEOUT)
        over.set()
        reader.result(TEST_TIMEOUT)

    final = defaultdict(set)
    for row in postgresql.queue:
        final[row.ordering_key].add(row.position)
    for visible in seen:
        for key, found in visible.items():
            assert found == {position for position in final[key] if position <= max(found)}


def test_a_transaction_claims_a_bounded_number_of_keys(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BUDGET", LockBudget(3))

    def claim(session: Session, number: int) -> None:
        with ob.idempotent(session, f"retry-{number}", scope="ada", content=b"{}") as claimed:
            if not claimed.replayed:
                claimed.respond(200)

    with postgresql.session() as session:
        for number in range(3):
            claim(session, number)
        with pytest.raises(
            outbox.ClaimError, match="has claimed 3 keys, and keeps a lock of the database server for each"
        ):
            claim(session, 3)
        session.commit()
        claim(session, 3)
        session.commit()

    assert len(postgresql.records) == 4
