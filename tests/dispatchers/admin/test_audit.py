"""The audit log: each decision is in it once, with who and why, and it is read by its index."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.cli_runner import block, command, document, put_suspended, put_uncertain, succeeded
from support.database import TABLES, Database
from support.entries import dispatcher, put_one

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.decide.audit import AuditFilter, AuditRow, read_audit, write_audit
from dispatchers.admin.decide.payloads import reveal
from dispatchers.admin.decide.resume import OperatorDecision, resume
from dispatchers.errors import EntryNotFound
from dispatchers.maintenance.audit_log import AUDIT_KEPT_FOR, forget_old_decisions
from outbox.sql.clock import clock

pytestmark = pytest.mark.on_mariadb

Decide = Callable[[sa.Connection, UUID], object]
WHO: dict[str, Any] = {"actor": "ada", "reason": "looked"}


def rows_of(database: Database, **wanted: Any) -> list[AuditRow]:
    with database.engine.connect() as connection:
        return list(read_audit(connection, TABLES, AuditFilter(**wanted), max_rows=100).rows)


def short(row: AuditRow) -> tuple[object, ...]:
    return row.action, row.kind, row.target, row.actor, row.reason, row.count


# --- what is written


def released_group(connection: sa.Connection, id: UUID) -> None:
    decisions.release_group(connection, TABLES, "acct_1", **WHO)


def suspended(database: Database, ob: outbox.Outbox) -> UUID:
    return put_suspended(database, ob)


def blocking(database: Database, ob: outbox.Outbox) -> UUID:
    id = put_uncertain(database, ob)
    block(database, id, "acct_1")
    return id


DECISIONS: dict[str, tuple[Callable[..., UUID], Decide, tuple[str, str, str, str]]] = {
    "retry": (put_one, lambda c, id: decisions.retry(c, TABLES, id, **WHO), ("retry", "entry", "{}", "looked")),
    "cancel": (put_one, lambda c, id: decisions.cancel(c, TABLES, id, **WHO), ("cancel", "entry", "{}", "looked")),
    "resolve": (
        put_uncertain,
        lambda c, id: decisions.resolve(c, TABLES, id, "happened", **WHO),
        ("resolve", "entry", "{}", "happened: looked"),
    ),
    "release": (
        suspended,
        lambda c, id: decisions.release(c, TABLES, id, **WHO),
        ("release", "entry", "{}", "looked"),
    ),
    "release a group": (blocking, released_group, ("release", "ordering_group", "acct_1", "looked")),
    "pause": (
        put_one,
        lambda c, id: decisions.pause(c, TABLES, "crm", **WHO),
        ("pause", "destination", "crm", "looked"),
    ),
    "reveal": (
        put_one,
        lambda c, id: reveal(c, TABLES, id, **WHO),
        ("reveal_payload", "entry", "{}", "looked"),
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_each_decision_adds_one_row_with_its_commit(database: Database, ob: outbox.Outbox, name: str) -> None:
    prepare, decide, (action, kind, target, reason) = DECISIONS[name]
    id = prepare(database, ob)

    with database.engine.connect() as connection:
        decide(connection, id)
        connection.rollback()
    undone = rows_of(database)
    with database.engine.begin() as connection:
        decide(connection, id)

    assert undone == []
    assert [short(row) for row in rows_of(database)] == [(action, kind, target.format(id), "ada", reason, 1)]


def test_a_destination_that_resumes_is_in_the_audit_log_too(database: Database) -> None:
    with database.engine.begin() as connection:
        decisions.pause(connection, TABLES, "crm", **WHO)
        decisions.resume(connection, TABLES, "crm", actor="bob", reason="asked")

    assert [(row.action, row.actor, row.reason) for row in rows_of(database)] == [
        ("resume", "bob", "asked"),
        ("pause", "ada", "looked"),
    ]


def test_resuming_after_a_restore_says_how_many_entries_changed(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    asyncio.run(dispatcher(database, ob, adapters={"crm": MemoryAdapter()}).check())

    resume(database.engine, TABLES, OperatorDecision(env="test", actor="ada", reason="a drill", since=timedelta(0)))

    (row,) = rows_of(database)
    assert short(row) == ("resume_after_restore", "database", "test", "ada", "a drill", 1)


# --- how it is read


def written(database: Database, count: int) -> None:
    with database.engine.begin() as connection:
        for number in range(count):
            about: dict[str, Any] = {"kind": "destination", "target": f"crm-{number}"}
            write_audit(connection, TABLES, actor=f"op-{number % 2}", action="pause", reason=None, **about)


def test_pages_follow_one_another_even_at_one_instant(database: Database) -> None:
    written(database, 7)
    database.execute(sa.update(TABLES.audit).values(at=clock()))
    instant = database.rows(TABLES.audit)[0].at
    database.execute(sa.update(TABLES.audit).values(at=instant))

    seen, after = [], None
    with database.engine.connect() as connection:
        while True:
            page = read_audit(connection, TABLES, max_rows=3, after=after)
            seen.append([row.target for row in page.rows])
            if (after := page.next) is None:
                break

    assert seen == [["crm-6", "crm-5", "crm-4"], ["crm-3", "crm-2", "crm-1"], ["crm-0"]]


def test_rows_are_found_by_operator_action_target_and_time(database: Database) -> None:
    written(database, 4)
    age_rows(database, timedelta(hours=2), target="crm-0")

    assert [row.target for row in rows_of(database, actor="op-1")] == ["crm-3", "crm-1"]
    assert [row.target for row in rows_of(database, kind="destination", target="crm-2")] == ["crm-2"]
    assert rows_of(database, action="retry") == []
    assert [row.target for row in rows_of(database, since=timedelta(hours=1))] == ["crm-3", "crm-2", "crm-1"]


def test_a_page_of_a_long_audit_log_is_read_by_its_index(postgresql: Database) -> None:
    rows = "SELECT now() - n * interval '1 s', 'ada', 'retry', 'entry', n::text, 1 FROM generate_series(1, 20000) AS n"
    postgresql.execute(sa.text(f"INSERT INTO outbox_audit (at, actor, action, kind, target, count) {rows}"))
    with postgresql.engine.connect() as connection:
        page = read_audit(connection, TABLES, max_rows=50)
        statements: list[tuple[str, Any]] = []
        sa.event.listen(
            connection,
            "before_cursor_execute",
            lambda c, cursor, statement, parameters, *rest: statements.append((statement, parameters)),
        )
        read_audit(connection, TABLES, max_rows=50, after=page.next)
        statement, parameters = statements[-1]
        plan = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars().all()

    assert "outbox_audit_at" in "\n".join(plan)
    assert "Sort" not in "\n".join(plan)


# --- how long it is kept


def age_rows(database: Database, by: timedelta, *, target: str) -> None:
    (row,) = [row for row in database.rows(TABLES.audit) if row.target == target]
    database.execute(sa.update(TABLES.audit).where(TABLES.audit.c.id == row.id).values(at=row.at - by))


def test_the_oldest_decisions_are_deleted_after_their_time(database: Database, ob: outbox.Outbox) -> None:
    written(database, 3)
    age_rows(database, AUDIT_KEPT_FOR, target="crm-0")
    age_rows(database, AUDIT_KEPT_FOR - timedelta(days=1), target="crm-1")
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()})

    assert asyncio.run(forget_old_decisions(working.store.run, TABLES)) == 1
    assert [row.target for row in rows_of(database)] == ["crm-2", "crm-1"]


def test_the_command_maintenance_deletes_old_decisions_too(database: Database) -> None:
    written(database, 2)
    age_rows(database, AUDIT_KEPT_FOR, target="crm-0")

    assert command("maintenance", "--window", "1d", "--dry-run", database=database).exit_code == 0
    assert len(rows_of(database)) == 2
    assert command("maintenance", "--window", "1d", database=database).exit_code == 0
    assert len(rows_of(database)) == 1


# --- the command


def test_the_command_lists_decisions_the_newest_first(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    succeeded("retry", str(id), "--actor", "ada", "--reason", "the customer waits", database=database)
    succeeded("pause", "--reason", "asked", "crm", "--actor", "bob", database=database)

    printed = succeeded("audit", database=database)
    first = document("audit", "--limit", "1", database=database)
    second = document("audit", "--limit", "1", "--after", first["next"], database=database)
    by_ada = document("audit", "--actor", "ada", "--since", "1h", database=database)

    assert [line.split()[1:4] for line in printed.splitlines()[1:]] == [["bob", "pause", "1"], ["ada", "retry", "1"]]
    assert [first["decisions"][0]["action"], second["decisions"][0]["action"], second["next"]] == [
        "pause",
        "retry",
        None,
    ]
    assert by_ada["decisions"] == second["decisions"]
    assert second["decisions"][0]["target"] == str(id)


def test_showing_a_payload_is_recorded_and_showing_an_entry_is_not(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    succeeded("show", str(id), database=database)
    shown = document("show", str(id), "--payload", "--actor", "ada", "--reason", "ticket 7", database=database)

    assert shown["payload"] == {"amount": 2000}
    (row,) = rows_of(database)
    assert short(row) == ("reveal_payload", "entry", str(id), "ada", "ticket 7", 1)


def test_a_missing_entrys_payload_is_not_found_and_not_recorded(database: Database) -> None:
    with pytest.raises(EntryNotFound), database.engine.begin() as connection:
        reveal(connection, TABLES, uuid4(), actor="ada", reason="asked")

    assert rows_of(database) == []
