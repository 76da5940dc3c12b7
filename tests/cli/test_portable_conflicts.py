"""Commands in the portable mode, at SERIALIZABLE, whose transaction the server ends in favour of another connection's."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, succeeded
from support.concurrency import CONFLICT, is_conflict
from support.database import TABLES, Database
from support.entries import put, put_one
from support.retention import elapse, settle_all

import outbox
from dispatchers.cli import connections
from dispatchers.store.app_code import callback_registry
from outbox.sql.clock import clock
from outbox.sql.deployment import record_secrets

FACTORY = """
from dispatchers import Dispatcher, Operations
from dispatchers.adapters import MemoryAdapter

def make():
    effects = Operations()
    effects.on_settled("crm")(lambda session, settlement: None)
    return Dispatcher("sqlite:///none.db", include=[effects], adapters={"crm": MemoryAdapter()})
"""

REASON = ("--reason", "their request")


@contextmanager
def before_statement(beginning: str, work: Callable[[], object], *, times: int = 1) -> Iterator[list[str]]:
    """Do `work` before the next statements of any engine that begin so. Yields the statements that then met a conflict."""
    failed: list[str] = []
    left = times

    def execute(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        nonlocal left
        if left and statement.startswith(beginning):
            left -= 1
            work()

    def fail(context: sa.engine.ExceptionContext) -> None:
        if is_conflict(context.sqlalchemy_exception):
            failed.append(str(context.statement)[: len(beginning)])

    sa.event.listen(sa.Engine, "before_cursor_execute", execute)
    sa.event.listen(sa.Engine, "handle_error", fail)
    try:
        yield failed
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", execute)
        sa.event.remove(sa.Engine, "handle_error", fail)


def touching(database: Database, table: sa.Table, column: str) -> Callable[[], None]:
    """Writes the table's rows as they are, on another connection, and commits."""

    def touch() -> None:
        with database.engine.begin() as other:
            other.execute(sa.update(table).values({column: table.c[column]}))

    return touch


def proposed(database: Database) -> str:
    """A proposal of ada to cancel an entry."""
    made = document("cancel", "--operation", "crm.upsert", "--propose", "--actor", "ada", *REASON, database=database)
    return str(made["id"])


def test_a_confirmation_is_repeated_after_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    put_one(portable, ob)
    proposal = proposed(portable)

    with before_statement("SELECT outbox_proposal", touching(portable, TABLES.proposal, "reason")) as failed:
        printed = succeeded("confirm", proposal, "--yes", "--actor", "bob", database=portable)

    assert len(failed) == 1
    assert "1 entries changed" in printed
    assert [row.state for row in portable.rows(TABLES.proposal)] == ["confirmed"]
    assert [row.action for row in portable.rows(TABLES.audit)].count("cancel") == 1


def test_a_withdrawal_is_repeated_after_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    put_one(portable, ob)
    proposal = proposed(portable)

    with before_statement("SELECT outbox_proposal", touching(portable, TABLES.proposal, "reason")) as failed:
        succeeded("confirm", proposal, "--withdraw", "--actor", "bob", database=portable)

    assert len(failed) == 1
    assert [row.state for row in portable.rows(TABLES.proposal)] == ["withdrawn"]


def test_a_kid_is_forgotten_after_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    with portable.engine.begin() as connection:
        record_secrets(connection, TABLES, ob.configuration.keyring)

    with before_statement("DELETE FROM outbox_kid", touching(portable, TABLES.kid, "recorded_at")) as failed:
        succeeded("keys", "forget", "k1", database=portable)

    assert len(failed) == 1
    assert portable.rows(TABLES.kid) == []


def test_a_callback_is_forgotten_after_a_conflict(portable: Database) -> None:
    with portable.engine.begin() as connection:
        callback_registry.register(connection, TABLES, ["on_settled crm"])

    with before_statement("DELETE FROM outbox_callback", touching(portable, TABLES.callback, "started_at")) as failed:
        printed = succeeded("callbacks", "forget", "on_settled crm", database=portable)

    assert len(failed) == 1
    assert "forgotten; 0 entries waited" in printed
    assert portable.rows(TABLES.callback) == []


def test_callbacks_are_recorded_after_a_conflict(
    portable: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy_with_conflict.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    with portable.engine.begin() as connection:
        callback_registry.register(connection, TABLES, ["on_settled crm"])

    with before_statement("INSERT INTO outbox_callback", touching(portable, TABLES.callback, "started_at")) as failed:
        succeeded(
            *("callbacks", "record", "deploy_with_conflict:make"),
            database=portable,
            OUTBOX_ENV="test",
            OUTBOX_SECRET=SECRET_TEXT,
        )

    assert len(failed) == 1
    assert [row.name for row in portable.rows(TABLES.callback)] == ["on_settled crm"]


def test_a_command_that_only_reads_is_repeated_after_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    """The server ends a reader that saw what one transaction wrote, but not what a second one did, which came before that."""
    put_one(portable, ob)
    with portable.engine.connect() as earlier:
        earlier.execute(sa.select(TABLES.kid)).all()
        with portable.engine.begin() as later:
            record_secrets(later, TABLES, ob.configuration.keyring)

        def commit_earlier() -> None:
            earlier.execute(sa.update(TABLES.queue).values(due_at=clock()))
            earlier.commit()

        with before_statement("SELECT scanned", commit_earlier) as failed:
            printed = succeeded("list", database=portable)

    assert len(failed) == 1
    assert "crm.upsert" in printed


def test_maintenance_repeats_the_batch_that_met_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    put(portable, ob, count=3)
    settle_all(portable)
    elapse(portable, timedelta(days=90))

    with before_statement("DELETE FROM outbox_settlement", touching(portable, TABLES.settlement, "attempts")) as failed:
        counted = json.loads(command("maintenance", "--window", "24h", "--json", database=portable).stdout)

    assert len(failed) == 1
    assert counted["deleted"]["entries"] == 3


def test_a_resume_counts_what_it_changed_before_a_conflict(portable: Database, ob: outbox.Outbox) -> None:
    put(portable, ob, count=3)
    resume = ("resume", "--after-restore", "--since", "1h", "--env", "test")

    with before_statement("UPDATE outbox_meta SET environment", touching(portable, TABLES.meta, "number")) as failed:
        printed = succeeded(*resume, *REASON, database=portable)

    assert len(failed) == 1
    assert "3 more entries count as maybe sent" in printed
    assert [row.count for row in portable.rows(TABLES.audit)] == [3]


def test_a_transaction_that_was_repeated_is_not_repeated_with_its_command(
    portable: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PAUSE_SECONDS", 0)
    tries = []

    @connections.repeated_after_conflicts
    def repeated() -> None:
        transact()

    @connections.repeated_after_conflicts
    def transact() -> None:
        tries.append(1)
        with portable.engine.begin() as connection:
            connection.exec_driver_sql(CONFLICT)

    with pytest.raises(sa.exc.DBAPIError):
        repeated()

    assert len(tries) == connections.CONFLICT_TRIES
