"""The database's roles: PostgreSQL itself keeps each process to what it must do. The app's own role: test_roles_app.py."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import dispatcher, put, run_once, states
from support.migrations import ODD, run_script
from support.migrations import Database as Blank
from support.roles import (
    As,
    refused,
    the_dashboard_shows_entries_without_their_contents,
    the_retention_runs_with_the_rights_of_maintenance,
)

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.check.doctor import Context, diagnose
from dispatchers.admin.read.overview import read_overview
from outbox import migrations
from outbox.sql.schema.identifiers import quoted

pytest_plugins = ["support.blank_databases"]


def test_the_dispatcher_drains_what_the_app_enqueued(as_role: As, ob: outbox.Outbox) -> None:
    put(as_role("app"), ob, count=20)
    put(as_role("app"), ob, "mail.send", count=5)
    sending = as_role("dispatcher")
    mail = MemoryAdapter(lambda delivery: Rejected("no such mailbox"))

    settled = run_once(sending, ob, adapters={"crm": MemoryAdapter(), "mail": mail})

    assert settled == 25
    assert states(sending) == {"delivered": 20, "failed": 5}


def test_the_dispatchers_own_check_passes(as_role: As, ob: outbox.Outbox) -> None:
    working = dispatcher(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})

    asyncio.run(working.check())


def test_a_dispatcher_keeps_its_heartbeat_and_the_dashboard_reads_it(
    as_role: As, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    working = dispatcher(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})

    asyncio.run(working.heartbeats.beat())
    asyncio.run(working.heartbeats.beat())
    with as_role("dashboard").engine.connect() as connection:
        (shown,) = read_overview(connection, TABLES).dispatchers
    asyncio.run(working.heartbeats.leave())

    assert (caplog.messages, shown.operations, shown.is_live) == ([], ["crm"], True)
    assert as_role("dashboard").rows(TABLES.dispatcher) == []
    assert not refused(as_role("maintenance"), "DELETE FROM outbox_dispatcher WHERE seen_at < now()")
    assert refused(as_role("app"), "SELECT FROM outbox_dispatcher")


def test_maintenance_deletes_what_is_old_and_adds_nothing(as_role: As, ob: outbox.Outbox) -> None:
    put(as_role("app"), ob)
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})
    maintenance = as_role("maintenance")

    for table in ("settlement", "entry", "event", "record", "tombstone", "audit"):
        locked = "" if table == "event" else "FOR UPDATE SKIP LOCKED"
        ids = f"ARRAY(SELECT id FROM outbox_{table} LIMIT 100 {locked})"
        assert not refused(maintenance, f"DELETE FROM outbox_{table} WHERE id = ANY({ids})")
    assert refused(maintenance, "DELETE FROM outbox_queue")
    assert refused(maintenance, "INSERT INTO outbox_queue SELECT * FROM outbox_queue")
    assert refused(maintenance, "UPDATE outbox_entry SET payload = ''")
    assert refused(maintenance, "UPDATE outbox_settlement SET state = 'failed'")


def test_no_role_moves_a_row_to_another_id(as_role: As, owners: Database, ob: outbox.Outbox) -> None:
    """An entry would vanish from under its row of the queue, or have the settlement of another one."""
    waiting, ended = put(as_role("app"), ob, count=2)
    with as_role("app").begin() as session:
        assert ob.cancel(session, ended)

    for kind in ("app", "dispatcher", "maintenance", "operator"):
        role = as_role(kind)
        assert refused(role, f"UPDATE outbox_entry SET id = gen_random_uuid() WHERE id = '{waiting}'")
        assert refused(role, f"UPDATE outbox_settlement SET id = '{waiting}' WHERE id = '{ended}'")
        assert refused(role, "UPDATE outbox_record SET id = gen_random_uuid()")
        assert refused(role, "UPDATE outbox_proposal SET id = gen_random_uuid()")
    assert not refused(owners, f"UPDATE outbox_settlement SET id = '{waiting}' WHERE id = '{ended}'")


def test_maintenance_runs_the_retention(as_role: As, owners: Database, ob: outbox.Outbox) -> None:
    the_retention_runs_with_the_rights_of_maintenance(as_role, owners, ob)


@pytest.mark.parametrize("table", [table.name for table in TABLES.metadata.tables.values()])
def test_the_dashboard_only_reads(as_role: As, table: str) -> None:
    dashboard = as_role("dashboard")

    assert not refused(dashboard, f"SELECT count(*) FROM {table}")
    assert refused(dashboard, f"INSERT INTO {table} SELECT * FROM {table}")
    assert refused(dashboard, f"DELETE FROM {table}")
    assert refused(dashboard, f"SELECT 1 FROM {table} FOR UPDATE")
    assert refused(dashboard, "SELECT nextval('outbox_position')")


@pytest.mark.parametrize(
    "column",
    [
        "outbox_entry.payload",
        "outbox_entry.tag",
        "outbox_queue.outcome",
        "outbox_settlement.result",
        "outbox_record.body",
        "outbox_record.headers",
        "outbox_body.body",
        "outbox_kid.secret_check",
    ],
)
def test_the_dashboard_reads_no_payload_answer_or_key(
    as_role: As, with_roles: Blank, names: dict[str, str], column: str
) -> None:
    migrations.partition(with_roles.url)
    run_script(with_roles, migrations.roles(**names))

    assert refused(as_role("dashboard"), f"SELECT {column} FROM {column.partition('.')[0]}")


def test_the_dashboard_lists_and_shows_entries(as_role: As, ob: outbox.Outbox) -> None:
    the_dashboard_shows_entries_without_their_contents(as_role, ob)


def test_the_doctor_says_what_the_dashboards_role_may_not_check(as_role: As, ob: outbox.Outbox) -> None:
    put(as_role("app"), ob)
    asyncio.run(dispatcher(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()}).heartbeats.beat())
    database = as_role("dashboard")

    async def run(work: Callable[[sa.Connection], Any]) -> Any:
        with database.engine.begin() as connection:
            return work(connection)

    ring = outbox.Keyring({"k1": bytes(range(32))})
    found = asyncio.run(diagnose(run, Context(tables=TABLES, prefix="outbox_", env="test", keyring=ring)))

    assert found.findings == []
    assert [each.check for each in found.unchecked] == ["secrets", "served", "encryption", "horizon"]
    assert found.unchecked[0].reason == "this role may not read it"
    assert found.unchecked[-1].reason.endswith("GRANT pg_read_all_stats TO it")


# The SQL


def rights(database: Blank) -> list[tuple[object, ...]]:
    with database.begin() as connection:
        relations = "SELECT relname, relacl::text FROM pg_class WHERE relname LIKE '%outbox%' OR relname LIKE 'weird%'"
        columns = "SELECT attname, attacl::text FROM pg_attribute WHERE attacl IS NOT NULL"
        functions = "SELECT proname, proacl::text FROM pg_proc WHERE proname LIKE '%cancel' AND proacl IS NOT NULL"
        schemas = "SELECT nspname, nspacl::text FROM pg_namespace WHERE nspname NOT LIKE 'pg%'"
        queries = (relations, columns, functions, schemas)
        return [tuple(row) for query in queries for row in connection.execute(sa.text(f"{query} ORDER BY 1, 2"))]


@pytest.mark.parametrize("where", [{}, ODD], ids=["default", "odd names"])
def test_printed_again_the_sql_changes_nothing(
    blank_postgresql: Blank, names: dict[str, str], where: dict[str, str]
) -> None:
    migrations.upgrade(blank_postgresql.url, **where)
    without = rights(blank_postgresql)
    script = migrations.roles(**where, **names)
    run_script(blank_postgresql, script)
    before = rights(blank_postgresql)

    run_script(blank_postgresql, script)

    assert rights(blank_postgresql) == before != without


def test_a_right_given_by_hand_is_taken_away_again(
    owners: Database, with_roles: Blank, as_role: As, names: dict[str, str]
) -> None:
    with owners.begin() as session:
        session.execute(sa.text(f"GRANT ALL ON outbox_entry, outbox_queue TO {quoted(names['app'])}, PUBLIC"))
        session.execute(sa.text(f"GRANT UPDATE (payload) ON outbox_entry TO {quoted(names['app'])}"))
    assert not refused(as_role("app"), "UPDATE outbox_entry SET payload = ''")

    run_script(with_roles, migrations.roles(**names))

    assert refused(as_role("app"), "UPDATE outbox_entry SET payload = ''")
    assert refused(as_role("app"), "DELETE FROM outbox_queue")


def test_one_role_may_play_two_parts(blank_postgresql: Blank, names: dict[str, str]) -> None:
    migrations.upgrade(blank_postgresql.url)

    run_script(blank_postgresql, migrations.roles(**names | {"maintenance": names["dispatcher"]}))

    with blank_postgresql.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {quoted(names['dispatcher'])}")
        connection.exec_driver_sql("UPDATE outbox_queue SET suspended_reason = NULL")
        connection.exec_driver_sql("DELETE FROM outbox_tombstone")


def test_tables_made_by_the_apps_metadata_need_no_version_table(blank_postgresql: Blank, names: dict[str, str]) -> None:
    with blank_postgresql.begin() as connection:
        migrations.metadata().create_all(connection)
    without = rights(blank_postgresql)

    run_script(blank_postgresql, migrations.roles(**names))

    assert rights(blank_postgresql) != without


def test_a_role_that_owns_the_tables_is_refused(blank_postgresql: Blank, names: dict[str, str]) -> None:
    migrations.upgrade(blank_postgresql.url)
    with blank_postgresql.begin() as connection:
        owner = connection.exec_driver_sql("SELECT current_user").scalar_one()
    before = rights(blank_postgresql)

    with pytest.raises(Exception, match=r"one of these roles owns the outbox's tables, .* let a role of its own run"):
        run_script(blank_postgresql, migrations.roles(**names | {"app": owner}))

    assert rights(blank_postgresql) == before
