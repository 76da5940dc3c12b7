"""What a batch costs on MariaDB. `test_claims` and `test_settlements` hold the rules, on each database."""

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.database import CHARGE, PAYLOAD, TABLES, Database, statements_of
from support.entries import change, claim, claim_one, claim_request, dispatcher, put, quota, settle

import outbox
from dispatchers import Delivered, Delivery, Operations
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_rows, rows_mariadb
from dispatchers.transitions import Settle

ENTRIES = 40
ENTRY_IDS = re.compile(r"id IN \(X'")


def drain(mariadb: Database, ob: outbox.Outbox, result: str) -> list[str]:
    """Enqueue entries and drain them; the statements that the dispatcher sent about its batches."""
    operations = Operations()

    @operations.operation("stripe")
    async def send(delivery: Delivery) -> Delivered:
        return Delivered({"text": result, "amount": delivery.payload["amount"]})

    with mariadb.begin() as session:
        for number in range(ENTRIES):
            ob.enqueue(session, CHARGE, PAYLOAD, parent=f"n:{number}")
    with statements_of(mariadb.engine) as sent:
        settled = asyncio.run(dispatcher(mariadb.engine, ob, include=[operations]).run_once())
    assert settled == ENTRIES
    return sent


@pytest.mark.differs("mysql", "it has no compound statements: test_mysql")
def test_a_batch_is_claimed_with_two_statements_and_ended_with_one(mariadb: Database, ob: outbox.Outbox) -> None:
    sent = drain(mariadb, ob, "done")

    of_entries = [statement for statement in sent if ENTRY_IDS.search(statement)]
    assert ["INSERT INTO outbox_settlement" in statement for statement in of_entries] == [False, True]
    assert of_entries[0].startswith("UPDATE outbox_queue SET state")


def test_a_claim_locks_what_it_reads_but_not_the_entries_own_rows(mariadb: Database, ob: outbox.Outbox) -> None:
    put(mariadb, ob, count=4)
    request = claim_request(quota())

    with mariadb.engine.connect() as one, mariadb.engine.connect() as other:
        first, _ = rows_mariadb.lock_due(one, TABLES, quota(permits=3), request, None)
        second, _ = rows_mariadb.lock_due(other, TABLES, quota(), request, None)
        for table in ("entry", "meta", "destination"):
            other.execute(sa.text(f"SELECT * FROM outbox_{table} FOR UPDATE NOWAIT"))

    assert (len(first), len(second)) == (3, 1)
    assert not {row.id for row in first} & {row.id for row in second}


def test_a_batch_does_not_wait_for_an_entry_that_is_not_committed(mariadb: Database, ob: outbox.Outbox) -> None:
    put(mariadb, ob, count=ENTRIES)
    impatient = {"init_command": "SET innodb_lock_wait_timeout = 0"}
    engine = mariadb.new_engine(connect_args=impatient, isolation_level="READ COMMITTED")
    store = DatabaseStore(engine, ob.configuration)

    with mariadb.begin() as session:
        ob.enqueue(session, CHARGE, PAYLOAD, parent="n:late")
        session.flush()
        claimed = claim(store, quota(permits=ENTRIES))
        settled = settle(store, *[(entry, Settle("delivered", 1)) for entry in claimed])

    assert len(settled) == ENTRIES


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_a_batch_may_not_end_keeps_its_queue_row(mariadb: Database, ob: outbox.Outbox, lost: int) -> None:
    put(mariadb, ob, count=2)
    store = DatabaseStore(mariadb.engine, ob.configuration)
    claimed = claim(store, quota())
    for entry in claimed[:lost]:
        change(mariadb, entry.id, lease_token=UUID(int=7))

    settled = settle(store, *((entry, Settle("failed", 1, reason="declined")) for entry in claimed))

    assert settled == {row.id for row in mariadb.rows(TABLES.settlement)} == {entry.id for entry in claimed[lost:]}
    assert {row.id for row in mariadb.rows(TABLES.queue)} == {entry.id for entry in claimed[:lost]}


@pytest.mark.parametrize(
    ("read", "is_settled"),
    [("a,b", True), (None, True), ("", False), ("a", False), ("a,c", False), ("a,b,c", False)],
)
def test_an_entry_ends_only_under_the_callbacks_that_were_read(
    mariadb: Database, ob: outbox.Outbox, read: str | None, is_settled: bool
) -> None:
    put(mariadb, ob)
    entry = claim_one(DatabaseStore(mariadb.engine, ob.configuration))
    recorded = {"recorded_at": sa.func.now(), "started_at": sa.func.now()}
    mariadb.execute(sa.insert(TABLES.callback).values([{"name": name, **recorded} for name in ("b", "a")]))

    with mariadb.engine.begin() as connection:
        settled = claims_rows.settle(connection, TABLES, [(entry, Settle("delivered", 1))], callbacks=read)

    assert settled == ({entry.id} if is_settled else set())
    assert [row.id for row in mariadb.rows(TABLES.queue)] == ([] if is_settled else [entry.id])


def test_an_entry_that_is_claimed_again_meanwhile_does_not_end(mariadb: Database, ob: outbox.Outbox) -> None:
    put(mariadb, ob)
    store = DatabaseStore(mariadb.engine, ob.configuration)
    entry = claim_one(store)
    taken_over = sa.update(TABLES.queue).values(lease_token=UUID(int=7))

    with ThreadPoolExecutor(1) as pool, mariadb.engine.connect() as connection:
        connection.execute(taken_over)
        settling = pool.submit(settle, store, (entry, Settle("failed", 1)))
        wait_for_a_lock(mariadb)
        connection.commit()
        settled = settling.result()

    assert settled == set()
    assert len(mariadb.rows(TABLES.queue)) == 1
    assert mariadb.rows(TABLES.settlement) == []


def wait_for_a_lock(mariadb: Database) -> None:
    """Return once a transaction waits for a lock."""
    waiting = sa.text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
    deadline = time.monotonic() + 30
    with mariadb.new_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        while connection.execute(waiting).one()[1] == "0":
            assert time.monotonic() < deadline, "nothing waits"


def test_long_results_are_inserted_in_parts(
    mariadb: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_mariadb, "MAX_TEXT_CHARS", 10_000)
    result = "100 % 'ünï' \\ " * 100

    sent = drain(mariadb, ob, result)

    assert sum("INSERT INTO outbox_settlement" in statement for statement in sent) > 5
    stored = mariadb.rows(TABLES.settlement)
    assert len(stored) == ENTRIES
    assert {json.loads(row.result)["text"] for row in stored} == {result}


@pytest.mark.differs("mysql", "it has no compound statements")
def test_no_compound_statement_gives_a_result_set(mariadb: Database, ob: outbox.Outbox) -> None:
    """A Galera node may say only after a result set that it has undone the transaction, and SQLAlchemy would not raise that."""
    described: list[object] = []

    def note(connection: object, cursor: Any, statement: str, *rest: object) -> None:
        if statement.startswith("BEGIN NOT ATOMIC"):
            described.append(cursor.description)

    sa.event.listen(sa.Engine, "after_cursor_execute", note)
    try:
        drain(mariadb, ob, "done")
        put(mariadb, ob)  # one alone, as most transactions write
    finally:
        sa.event.remove(sa.Engine, "after_cursor_execute", note)

    assert len(described) >= 2
    assert set(described) == {None}
