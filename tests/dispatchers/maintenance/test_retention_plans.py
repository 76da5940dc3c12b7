"""What a batch of retention costs: no table is read from end to end, and the statements do not grow with the rows."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from support.database import TABLES, Database, nodes, statements_of
from support.retention import RETENTION, WINDOW, elapse, maintenance, request, settle_all

import outbox
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import STEPS, Scan
from dispatchers.store.records.queries import next_accepted

ROWS = 5000
IN_BATCHES = "generate_series(1, :rows) AS n"
FILL = [
    # Every third entry is unsettled, every other one belongs to a request; what is settled was settled 0 to 60 days ago.
    f"""
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id, record_id,
        destination, payload, options, headers, schema_version, due_at, created_at)
    SELECT md5('e' || :life || n)::uuid, 'test', '', 'http', 'order:' || n, 'crm.upsert', '', 'k1', sha256(n::text::bytea),
        md5('r' || :life || n)::uuid, CASE WHEN n % 2 = 0 THEN md5('r' || :life || n)::uuid END,
        'crm', '{{"amount": 2000, "currency": "eur"}}', '{{}}', '{{}}', 1, now(), now()
    FROM {IN_BATCHES}
    """,
    f"""
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)
    SELECT md5('e' || :life || n)::uuid, 'crm', 'pending', now(), 0, 0, false, 0 FROM {IN_BATCHES} WHERE n % 3 = 0
    """,
    f"""
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
    SELECT md5('e' || :life || n)::uuid, 'delivered', 1, 1, 0, now() - (:rows - n) * interval '60 days' / :rows
    FROM {IN_BATCHES} WHERE n % 3 <> 0
    """,
    f"""
    INSERT INTO outbox_event (entry_id, at, kind) SELECT md5('e' || :life || n)::uuid, now(), 'attempt' FROM {IN_BATCHES}
    """,
    f"""
    INSERT INTO outbox_record (id, env, scope, source, parent, kid, state, fingerprint, fingerprint_version, status, body,
        headers, created_at, answered_at, replay_until, keep_until)
    SELECT md5('r' || :life || n)::uuid, 'test', '', 'http', 'order:' || n, 'k1', 'succeeded', sha256('r'), 1, 201, '', '{{}}',
        now(), now(), now(), now() + interval '30 days' - (:rows - n) * interval '60 days' / :rows
    FROM {IN_BATCHES} WHERE n % 2 = 0
    """,
    f"""
    INSERT INTO outbox_tombstone (id, env, scope, source, fingerprint, fingerprint_version, forget_at)
    SELECT md5('t' || :life || n)::uuid, 'test', '', 'http', sha256('t'), 1,
        now() + interval '10 days' - (:rows - n) * interval '60 days' / :rows
    FROM {IN_BATCHES}
    """,
]
NAMES = ("entry", "queue", "settlement", "event", "record", "tombstone")


@contextmanager
def plans_of(engine: sa.Engine) -> Iterator[list[dict[str, Any]]]:
    """The plan of every statement of the block that reads or writes rows."""
    plans: list[dict[str, Any]] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "outbox_" in statement and not statement.startswith("INSERT"):
            dbapi = connection.connection.dbapi_connection
            (plan,) = dbapi.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()[0]
            plans.append(plan["Plan"])

    sa.event.listen(engine, "before_cursor_execute", explain)
    try:
        yield plans
    finally:
        sa.event.remove(engine, "before_cursor_execute", explain)


def run(database: Database, statement: str) -> None:
    for name in NAMES:
        database.execute(sa.text(statement.format(name)))


def fill(database: Database, rows: int) -> None:
    for statement in FILL:
        database.execute(sa.text(statement).bindparams(rows=rows, life=str(rows)))


def test_a_batch_costs_the_same_few_statements_whatever_its_size(database: Database, ob: outbox.Outbox) -> None:
    def statements(count: int) -> int:
        for number in range(count):
            request(database, ob, f"retry-{number}", "crm.upsert")
        settle_all(database)
        elapse(database, 2 * RETENTION)
        engine = database.new_engine()
        with statements_of(engine) as sent:
            assert asyncio.run(maintenance(engine).run_once())["entries"] == count
        database.execute(sa.delete(TABLES.tombstone))
        return len(sent)

    assert statements(2) == statements(60) <= 25


EXPIRED_AT = "date_trunc('day', now()) - interval '50 days'"
AT_ONE_INSTANT = [
    f"UPDATE outbox_settlement SET settled_at = {EXPIRED_AT}",
    f"UPDATE outbox_record SET keep_until = {EXPIRED_AT}",
    f"UPDATE outbox_tombstone SET forget_at = {EXPIRED_AT}",
    "DELETE FROM outbox_queue",
    f"""
    INSERT INTO outbox_record (id, env, scope, source, parent, kid, state, fingerprint, fingerprint_version, status, body,
        headers, completion, created_at, replay_until, keep_until)
    SELECT gen_random_uuid(), 'test', '', 'http', 'order:' || n, 'k1', 'accepted', sha256('r'), 1, 202, '', '{{}}', 'done',
        now(), now() + interval '1 day', now() + interval '1 day'
    FROM generate_series(1, {ROWS}) AS n
    """,
]


def test_rows_that_share_one_instant_are_read_in_the_order_of_an_index(postgresql: Database) -> None:
    fill(postgresql, ROWS)
    for statement in AT_ONE_INSTANT:
        postgresql.execute(sa.text(statement))
    run(postgresql, "ANALYZE outbox_{}")
    engine = postgresql.new_engine()
    scan = Scan(Retention.of(RETENTION, [WINDOW]), 500)

    with plans_of(engine) as plans, engine.begin() as connection:
        for step in STEPS.values():
            batch = step(connection, TABLES, scan)
            batch = step(connection, TABLES, scan._replace(after=batch.after))
            assert batch.scanned == 500
        page = next_accepted(connection, TABLES, None)
        assert len(next_accepted(connection, TABLES, page[-1])) == len(page)

    pages = [plan for plan in plans if any(node["Node Type"] == "Limit" for node in nodes(plan))]
    below = [list(nodes(node)) for plan in pages for node in nodes(plan) if node["Node Type"] == "Limit"]
    assert len(below) == 8
    assert not [node["Node Type"] for found in below for node in found if "Sort" in node["Node Type"]]
