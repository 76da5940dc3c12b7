"""What claiming costs, in terms that do not depend on the machine: statements, commits, locks, HOT updates, bytes of WAL."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database, statements_of
from support.entries import claim, claim_request, dispatcher, put, quota, settle

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_postgresql
from dispatchers.store.queue.claim_request import Forms
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, Settle, Transition
from outbox.times import EPOCH

MAX_WAL_BYTES = 700  # per drained entry; 480 were measured
HOT_MIN = 0.9
STRIPE_FORM = "native stripe version=2025-10-29.clover account=- mode=test"

FILL = """
    WITH written AS (
        INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id,
            destination, payload, options, headers, schema_version, due_at, created_at)
        SELECT gen_random_uuid(), 'test', '', 'app', 'order:' || n, d || '.upsert', '', 'k1', sha256(n::text::bytea),
            gen_random_uuid(), d, '{"amount": 2000, "currency": "eur"}', '{}', '{}', 1, now() - n * interval '1 ms', now()
        FROM generate_series(1, :rows) AS n, unnest(CAST(:names AS text[])) AS d
        RETURNING id, destination, due_at
    )
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)
    SELECT id, destination, 'pending', due_at, 0, 0, false, 0 FROM written
"""


def fill(database: Database, rows: int, *names: str) -> None:
    """Due entries, `rows` for each destination, none of them known to the planner's statistics."""
    database.execute(sa.text(FILL).bindparams(rows=rows, names=list(names)))


def run(database: Database, *statements: str) -> None:
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def number(database: Database, query: str) -> Any:
    with database.engine.connect() as connection:
        return connection.execute(sa.text(query)).scalar_one()


@contextmanager
def commits_of(engine: sa.Engine) -> Iterator[list[sa.Connection]]:
    """The connections that committed during the block, one for each commit."""
    committed: list[sa.Connection] = []

    def commit(connection: sa.Connection) -> None:
        committed.append(connection)

    sa.event.listen(engine, "commit", commit)
    try:
        yield committed
    finally:
        sa.event.remove(engine, "commit", commit)


def drained(entries: list[ClaimedEntry]) -> list[tuple[ClaimedEntry, Transition]]:
    return [(entry, Settle("delivered", 1, result={"id": "pi_1"})) for entry in entries]


def test_a_batch_costs_the_same_few_statements_whatever_its_size(postgresql: Database, ob: outbox.Outbox) -> None:
    fill(postgresql, 1000, "crm")
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claimed = claim(store, quota(permits=512))

    def outcomes(entries: list[ClaimedEntry]) -> list[tuple[ClaimedEntry, Transition]]:
        waits = [(entry, Retry(timedelta(0), "slow", 1, True, EPOCH)) for entry in entries[1::3]]
        parks = [(entry, MarkUncertain("vanished", 1, True, EPOCH)) for entry in entries[2::3]]
        return [*drained(entries[::3]), *waits, *parks]

    with statements_of(postgresql.engine) as small, commits_of(postgresql.engine) as commits:
        asyncio.run(store.exchange(outcomes(claimed[:3]), claim_request(quota(permits=4))))
    with statements_of(postgresql.engine) as large, commits_of(postgresql.engine) as commits_of_large:
        exchange = asyncio.run(store.exchange(outcomes(claimed[3:]), claim_request(quota(permits=256))))

    assert len(exchange.settled) == 497
    assert len(exchange.claimed) == 256
    assert len(small) == len(large) == 3  # ends, moves, claims
    assert len(commits) == len(commits_of_large) == 1


def test_a_dispatcher_drains_500_entries_in_a_handful_of_statements(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=500)
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, concurrency=512)

    with statements_of(postgresql.engine) as sent, commits_of(postgresql.engine) as commits:
        settled = asyncio.run(working.run_once())

    assert settled == 500
    # what the sweep asks, then a claim and a settling for each half of the permits, which two groups may split once more; the
    # guards of each transaction
    assert len(sent) <= 40
    assert len(commits) <= 20


def test_two_entries_of_each_of_200_destinations_take_a_few_claims(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.begin() as session:
        for number in range(400):
            ob.enqueue(session, "crm.x", {}, parent=f"order:{number}", destination=f"host-{number % 200}")
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()})

    with statements_of(postgresql.engine) as sent:
        settled = asyncio.run(working.run_once())

    assert settled == 400
    claims = [statement for statement in sent if "lease_until = now() +" in statement]
    assert len(claims) <= 8  # two that bring something, and after each of those a round that may find more


def test_many_destinations_are_claimed_in_one_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    names = [f"host-{number}" for number in range(40)]
    fill(postgresql, 2, *names)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claim(store, quota("nobody"))  # a store's first transaction asks for the isolation level

    with statements_of(postgresql.engine) as sent:
        claimed = claim(store, *(quota(name) for name in names))

    assert len(claimed) == 80
    assert len(sent) == 2  # the transaction's guards, and the claim


def test_different_quotas_of_destinations_are_claimed_in_few_statements(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    wanted = {f"host-{number}": number for number in range(1, 41)}
    fill(postgresql, 40, *wanted)
    store = DatabaseStore(postgresql.engine, ob.configuration)
    claim(store, quota("nobody"))  # a store's first transaction asks for the isolation level

    with statements_of(postgresql.engine) as sent:
        claimed = claim(store, *(quota(name, permits) for name, permits in wanted.items()), max_entries=2000)

    assert len(sent) == 7  # the transaction's guards; 1, 2, 4, 8, 16 and 32 of each
    taken = Counter(entry.destination for entry in claimed)
    assert all(permits / 2 < taken[name] <= permits for name, permits in wanted.items())


@pytest.mark.parametrize("form", ["native", STRIPE_FORM], ids=["short form", "Stripe's form"])
@pytest.mark.parametrize("batch", [100, 500])
def test_leases_are_hot_updates(postgresql: Database, ob: outbox.Outbox, batch: int, form: str) -> None:
    fill(postgresql, 2000, "crm")
    store = DatabaseStore(postgresql.engine, ob.configuration)

    with updates_of_queue(postgresql.engine) as updates:
        drain(store, batch, form)

    assert sum(each.updates for each in updates) == 2000
    assert sum(each.hot for each in updates) / 2000 >= HOT_MIN


class Updates(NamedTuple):
    updates: int
    hot: int
    """Those that touched no index."""


@contextmanager
def updates_of_queue(engine: sa.Engine) -> Iterator[list[Updates]]:
    """Those of each transaction that committed during the block.

    Asked in the transaction, because the server's totals come later, and before PostgreSQL 15 not always.
    """
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'outbox_queue'"
    found: list[Updates] = []

    def ask(connection: sa.Connection) -> Updates:
        return Updates(*connection.exec_driver_sql(counts).one())

    def begin(connection: sa.Connection) -> None:
        connection.info["before"] = ask(connection)  # a backend counts on, until it has reported

    def commit(connection: sa.Connection) -> None:
        before, now = connection.info["before"], ask(connection)
        found.append(Updates(now.updates - before.updates, now.hot - before.hot))

    sa.event.listen(engine, "begin", begin)
    sa.event.listen(engine, "commit", commit)
    yield found
    sa.event.remove(engine, "begin", begin)
    sa.event.remove(engine, "commit", commit)


@pytest.mark.parametrize("batch", [100, 500])
def test_draining_an_entry_writes_little_wal(postgresql: Database, ob: outbox.Outbox, batch: int) -> None:
    store = DatabaseStore(postgresql.engine, ob.configuration)
    run(postgresql, "CHECKPOINT")  # where pages are logged in full at their first change, those made after it are not

    written = []
    for _ in range(3):
        fill(postgresql, 1000, "crm")
        before = wal_written(postgresql)
        drain(store, batch, "native")
        written.append(wal_written(postgresql) - before)

    # The least: another checkpoint, or others on an older server, only ever add to it.
    assert 0 < min(written) / 1000 <= MAX_WAL_BYTES


def wal_written(database: Database) -> int:
    """By our one pooled connection, where the server reports it (18 on); else by the whole server, other clients included."""
    if number(database, "SELECT current_setting('server_version_num')::int") < 180_000:
        return int(number(database, "SELECT pg_current_wal_insert_lsn() - '0/0'"))
    number(database, "SELECT pg_stat_force_next_flush() IS NULL")
    return int(number(database, "SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())"))


def drain(store: DatabaseStore, batch: int, form: str) -> None:
    while entries := claim(store, quota(permits=512), max_entries=batch, forms=Forms({"crm": form})):
        settle(store, *drained(entries))


@pytest.mark.parametrize("permits", [[50] * 40, [50, 40, 30] * 13, list(range(1, 61))], ids=["one", "three", "many"])
@pytest.mark.parametrize("is_analyzed", [True, False])
def test_a_claim_locks_no_row_that_it_does_not_take(
    postgresql: Database, ob: outbox.Outbox, permits: list[int], is_analyzed: bool
) -> None:
    """However many are wanted: rows are locked one by one, until there are enough."""
    names = [f"host-{number}" for number in range(len(permits))]
    fill(postgresql, 60, *names)
    if is_analyzed:
        run(postgresql, "ANALYZE outbox_queue", "ANALYZE outbox_entry")
    quotas = [quota(name, each) for name, each in zip(names, permits, strict=True)]

    with postgresql.engine.connect() as connection:
        claimed = claims_postgresql.claim(connection, TABLES, claim_request(*quotas, max_entries=300))
        xid = connection.scalar(sa.text("SELECT CAST(pg_current_xact_id() AS text)"))
        locked = number(postgresql, f"SELECT count(*) FROM outbox_queue WHERE CAST(xmax AS text) = '{xid}'")

    assert sum(permits) > 300
    assert len(claimed) == locked == 300
