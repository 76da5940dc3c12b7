"""What a role of the database must be able to do, on each kind of database that has roles."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy.exc import DBAPIError

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.schedules import pause_schedule, resume_schedule, trigger_schedule
from dispatchers.admin.read.entries import list_entries, read_entry
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.admin.read.overview import read_overview
from dispatchers.admin.read.schedules import read_schedule
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import STEPS, Scan
from outbox.errors import InvalidValue
from outbox.sql.errors.driver import sqlstate
from support.database import PAYLOAD, REQUEST, TABLES, Database
from support.entries import put, run_once
from support.retention import elapse
from support.schedules import Reports

As = Callable[[str], Database]
"""The database as one of the roles: `as_role("app")`."""

KINDS = ("app", "dispatcher", "maintenance", "dashboard", "operator")


def the_operator_decides_about_schedules(as_role: As, ob: outbox.Outbox) -> None:
    reports = Reports(as_role("dispatcher"), ob)
    reports.run_once(beats=True)

    for decide in (pause_schedule, trigger_schedule, resume_schedule):
        with as_role("operator").engine.begin() as connection:
            decide(connection, TABLES, "report", actor="ada", reason="audit")
    reports.run_once()

    with as_role("dashboard").engine.connect() as connection:
        shown = read_schedule(connection, TABLES, "report")
    (tick,) = shown.recent
    assert (tick.actor, [entry.state for entry in tick.entries]) == ("ada", ["delivered"])
    assert refused(as_role("operator"), "UPDATE outbox_schedule SET recent = '[]'")
    assert refused(as_role("app"), "DELETE FROM outbox_schedule")


def the_dashboard_shows_entries_without_their_contents(as_role: As, ob: outbox.Outbox) -> None:
    sent, waiting = put(as_role("app"), ob), put(as_role("app"), ob, "mail.send")
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})

    with as_role("dashboard").engine.connect() as connection:
        overview = read_overview(connection, TABLES)
        listed = list_entries(connection, TABLES, Filter(), max_entries=10)
        shown = read_entry(connection, TABLES, sent[0])
        with pytest.raises(InvalidValue, match="may not read why entries wait"):
            list_entries(connection, TABLES, Filter(reason="slow"), max_entries=10)

    assert overview.destinations[0].states == {"pending": 1}
    assert overview.unserved is None  # unknown, and not none
    assert [(entry.id, entry.child_key) for entry in listed.entries] == [(waiting[0], None)]
    assert (shown.state, shown.child_key, shown.payload_bytes, shown.result) == ("delivered", None, None, None)


def the_retention_runs_with_the_rights_of_maintenance(as_role: As, owners: Database, ob: outbox.Outbox) -> None:
    app = as_role("app")
    with app.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
        ob.enqueue(session, "crm.upsert", PAYLOAD)
        claim.respond(201)
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})
    elapse(owners, timedelta(days=40))
    scan = Scan(Retention.of(timedelta(days=30), [timedelta(days=1)]), max_rows=100)

    for step in STEPS.values():
        with as_role("maintenance").engine.begin() as connection:
            step(connection, TABLES, scan)

    assert [owners.records, owners.entries, owners.rows(TABLES.settlement)] == [[], [], []]


def refused(database: Database, statement: str) -> bool:
    with database.engine.connect() as connection:
        try:
            connection.exec_driver_sql(statement)
        except DBAPIError as error:
            if sqlstate(error.orig) != "42501":  # insufficient_privilege
                raise
            return True
        return False


NEW_ENTRY = """
    WITH written AS (
        INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id, destination,
            payload, options, headers, schema_version, due_at, created_at)
        SELECT gen_random_uuid(), 'test', '', 'app', 'order:x', 'crm.upsert', '', 'k1', sha256('x'), gen_random_uuid(), 'crm',
            '{{}}', '{{}}', '{{}}', 1, {due_at}, {created_at}
        RETURNING id, destination, due_at
    )
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch{more})
    SELECT id, {destination}, {state}, {queue_due}, {deliveries}, {attempts}, {maybe_sent}, {epoch}{values} FROM written
"""
HONEST = {
    "due_at": "now()",
    "created_at": "now()",
    "destination": "destination",
    "state": "'pending'",
    "queue_due": "due_at",
    "deliveries": "0",
    "attempts": "0",
    "maybe_sent": "false",
    "epoch": "0",
    "more": "",
    "values": "",
}
