"""Looking at a large outbox does not read all of it: the plans of the inspecting queries on PostgreSQL."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database

from dispatchers.admin.read import entries as admin_entries
from dispatchers.admin.read.entries import list_entries
from dispatchers.admin.read.entry_filter import ENDED_STATES, Filter, ParentWanted
from dispatchers.admin.read.overview import read_overview
from outbox.keys import ParentKey, parent_id

ROWS = 20_000  # for each of three destinations: enough for a scan to be the cheaper plan if no index served
FEWER_ROWS = 2000  # enough to show which tables are read, and how many rows

FILL = """
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id,
        destination, payload, options, headers, schema_version, due_at, created_at)
    SELECT gen_random_uuid(), 'test', '', 'app', 'order:' || n, d || '.upsert', '', 'k1', sha256(n::text::bytea),
        gen_random_uuid(), d, '{}', '{}', '{}', 1, now() - n * interval '1 s', now() - n * interval '1 s'
    FROM generate_series(1, :rows) AS n, unnest(ARRAY['crm', 'mail', 'stripe']) AS d
"""
QUEUED = """
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, suspended_reason)
    SELECT id, destination, 'pending', CASE WHEN n % 1000 = 0 THEN '9999-12-31 00:00+00' ELSE due_at END, 0, 0, false, 0,
        CASE WHEN n % 1000 = 0 THEN 'a copy' END
    FROM (SELECT *, row_number() OVER (ORDER BY due_at) AS n FROM outbox_entry) AS numbered
"""
SETTLED = """
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
    SELECT id, 'delivered', 1, 1, 0, due_at FROM outbox_entry ORDER BY due_at
"""


@contextmanager
def read_of(engine: sa.Engine) -> Iterator[dict[str, int]]:
    """How many rows the block's queries read of each table; under "all of ..." where they read it from end to end."""
    read: dict[str, int] = {}

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if " outbox_" in statement.replace('"', ""):
            dbapi = connection.connection.dbapi_connection
            (plan,) = dbapi.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).fetchone()[0]
            _note(plan["Plan"], read)

    sa.event.listen(engine, "before_cursor_execute", explain)
    try:
        yield read
    finally:
        sa.event.remove(engine, "before_cursor_execute", explain)


def _note(plan: dict[str, Any], read: dict[str, int]) -> None:
    if "Relation Name" in plan:
        name = ("all of " if plan["Node Type"] == "Seq Scan" else "") + plan["Relation Name"]
        rows = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
        read[name] = read.get(name, 0) + int(rows)
    for inner in plan.get("Plans", []):
        _note(inner, read)


def whole(read: dict[str, int]) -> list[str]:
    """The tables that were read from end to end, and are not empty."""
    return [name for name, rows in read.items() if name.startswith("all of") and rows]


def filled(database: Database, *statements: str, rows: int = ROWS) -> None:
    with database.engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement).bindparams(rows=rows) if ":rows" in statement else sa.text(statement))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE outbox_entry, outbox_queue, outbox_settlement")


def test_a_page_of_what_waits_reads_pages_of_an_index_only(postgresql: Database) -> None:
    seventh = parent_id("test", ParentKey("order:7"))
    of_seventh = f"parent_id = '{seventh}', id = CAST('{seventh.hex[:8]}' || substr(CAST(id AS text), 9) AS uuid)"
    filled(postgresql, FILL, f"UPDATE outbox_entry SET {of_seventh} WHERE parent = 'order:7'", QUEUED)

    with postgresql.engine.connect() as connection:
        far = list_entries(connection, TABLES, Filter(), max_entries=1000).next
        for wanted, after, entries in [
            (Filter(), None, 50),
            (Filter(), far, 50),
            (Filter(states=["pending"]), None, 50),
            (Filter(destination="crm"), None, 50),
            (Filter(suspended=True), None, 50),
            (Filter(since=timedelta(minutes=10)), None, 50),
            (Filter(parent=ParentWanted("order:7", "test", "", "app")), None, 3),
        ]:
            with read_of(postgresql.engine) as read:
                page = list_entries(connection, TABLES, wanted, max_entries=50, after=after)

            assert len(page.entries) == entries
            assert whole(read) == []
            assert sum(read.values()) < 1500, (wanted, read)


def test_what_ended_is_found_by_when_it_did(postgresql: Database) -> None:
    filled(postgresql, FILL, SETTLED)

    wanted = Filter(states=ENDED_STATES, since=timedelta(minutes=10))
    with postgresql.engine.connect() as connection, read_of(postgresql.engine) as read:
        page = list_entries(connection, TABLES, wanted, max_entries=50)

    assert len(page.entries) == 50
    assert whole(read) == []


def test_one_entry_and_the_entries_of_a_parent_are_found_by_index(postgresql: Database) -> None:
    filled(postgresql, FILL, QUEUED, SETTLED, rows=FEWER_ROWS)
    with postgresql.engine.connect() as connection:
        id = connection.execute(sa.select(TABLES.entry.c.id).limit(1)).scalar_one()

    with postgresql.engine.connect() as connection, read_of(postgresql.engine) as read:
        (found,) = admin_entries.find_ids(connection, TABLES, id.hex[:8])
        details = admin_entries.read_entry(connection, TABLES, found)
        admin_entries.read_entries_of_parent(connection, TABLES, ParentWanted("order:1", "test", "", "app"))

    assert details.id == id
    assert whole(read) == []
    assert sum(read.values()) < 10, read


def test_the_overview_reads_the_queue_and_nothing_that_ended(postgresql: Database) -> None:
    filled(postgresql, FILL, QUEUED, rows=FEWER_ROWS)

    with postgresql.engine.connect() as connection, read_of(postgresql.engine) as read:
        overview = read_overview(connection, TABLES)

    assert [destination.states for destination in overview.destinations] == [{"pending": FEWER_ROWS}] * 3
    assert overview.suspended == 3 * FEWER_ROWS // 1000
    assert not {"outbox_entry", "all of outbox_entry", "outbox_settlement", "all of outbox_settlement"} & read.keys()


def test_reading_is_of_one_moment_and_cannot_write(postgresql: Database) -> None:
    from dispatchers.cli.connections import reading
    from dispatchers.cli.options import Target

    url = postgresql.url.render_as_string(hide_password=False)

    with reading(Target(url, None, "outbox_")) as (connection, tables):
        level = connection.execute(sa.text("SHOW transaction_isolation")).scalar_one()
        with pytest.raises(sa.exc.DBAPIError, match="read-only transaction"):
            connection.execute(sa.delete(tables.queue))

    assert level == "repeatable read"


def test_places_of_a_list_survive_being_written_as_text() -> None:
    from dispatchers.admin.read.plain_values import Place, instant
    from dispatchers.cli.options import Cursor

    at = datetime.fromisoformat("2026-01-31T12:00:00.123456+00:00")
    id = UUID("a4633227-889c-8a14-b547-b020040e96b6")

    assert Cursor().convert(f"{instant(at)},{id}", None, None) == Place(at, id)
    assert json.dumps(instant(at)) == '"2026-01-31T12:00:00.123456Z"'
