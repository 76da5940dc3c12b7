"""The portable mode, on PostgreSQL at SERIALIZABLE: what it may not send, who wins a claim, and conflicts at every statement."""

import asyncio
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from support.cli_runner import SECRET_TEXT, refused, succeeded
from support.concurrency import CONFLICT, conflict_at, retold
from support.daemons import FileService, daemon, write_factory
from support.database import REQUEST, TABLES, Database
from support.entries import HOUR, age, claim, put, put_one, queue_row, quota, run_once, settle, state, states
from support.other_servers import calling_itself
from support.portable import SENT, refused_in
from support.retention import clean, elapse

import outbox
from dispatchers import Operations, Settlement, database_identity
from dispatchers.adapters import MemoryAdapter
from dispatchers.cli import connections
from dispatchers.errors import Suspended
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue.row_errors import is_conflict
from dispatchers.transitions import Settle
from outbox import migrations

TO_FILES = """
from support.daemons import FileService, OverStore, ShortLivedClaims

def make():
    moment = os.environ["MOMENT"]
    return OverStore(ShortLivedClaims(url, ob, moment), outbox=ob, adapters={"crm": FileService(here, moment)})
"""


# --- what is sent to the server


def test_no_statement_needs_what_the_engines_lack(portable: Database, ob: outbox.Outbox) -> None:
    effects, shown = Operations(), []

    @effects.on_settled("crm")
    def settled(session: Session, settlement: Settlement) -> None:
        shown.append(settlement.state)

    adapter = MemoryAdapter()
    with SENT.recorded() as sent:
        migrations.upgrade(portable.url, prefix="second_")
        migrations.downgrade(portable.url, prefix="second_")
        with portable.begin() as session:
            with ob.idempotent(session, "retry-1", scope="ada", content=REQUEST) as request:
                ob.enqueue(session, "crm.upsert", {}, ordering_key="ada")
                ob.enqueue(session, "crm.upsert", {"n": 2}, discriminator="2", ordering_key="ada")
                request.respond(201)
            cancelled = ob.enqueue(session, "crm.upsert", {}, parent="order:2")
        with portable.begin() as session:
            assert ob.cancel(session, cancelled.id)
        with ob.leased(portable.engine, "retry-2", scope="ada", content=REQUEST) as lease:
            lease.respond(201)
        run_once(portable, ob, adapters={"crm": adapter}, include=[effects])
        elapse(portable, timedelta(days=90))
        deleted = clean(portable)

    assert {"delivered"} == set(shown)
    assert deleted
    assert len(sent) > 100
    assert [found for statement in sent for found in refused_in(statement)] == []


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT id FROM q FOR UPDATE SKIP LOCKED",
        "SELECT pg_try_advisory_xact_lock(1)",
        "LISTEN outbox",
        "SELECT pg_notify('outbox', '')",
        "CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS ''",
        "DO $$ BEGIN END $$",
        "WITH a AS (DELETE FROM q RETURNING id) INSERT INTO s SELECT id FROM a",
        "SELECT pg_walfile_name(pg_current_wal_lsn())",
        "SELECT system_identifier FROM pg_control_system()",
        "SELECT nextval('outbox_position')",
    ],
)
def test_the_audit_finds_each_thing_that_it_is_for(statement: str) -> None:
    assert refused_in(statement)


# --- the mode and its servers


def test_another_isolation_level_is_refused(portable: Database, ob: outbox.Outbox) -> None:
    engine = portable.new_engine(isolation_level="READ COMMITTED")

    refusal = pytest.raises(outbox.ConfigurationError, match="at read committed, and in the portable mode")
    with refusal, Session(engine) as session:
        ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        session.commit()

    assert portable.entries == []


@pytest.mark.parametrize(
    "named",
    [
        {"server_version": "15.12-YB-2025.2.3.2-b0"},
        {"server_version": "13.0.0", "crdb_version": "CockroachDB CCL v26.3.0 (x86_64-pc-linux-gnu)"},
    ],
)
def test_yugabytedb_and_cockroachdb_are_not_refused_in_this_mode(
    portable: Database, ob: outbox.Outbox, named: dict[str, str]
) -> None:
    put_one(portable, ob)

    with calling_itself(portable.url, **named) as url:
        migrations.check(url)
        assert run_once(url.render_as_string(hide_password=False), ob, adapters={"crm": MemoryAdapter()}) == 1


def test_a_cockroachdb_before_26_3_is_refused_in_this_mode_too(portable: Database, ob: outbox.Outbox) -> None:
    named = {"server_version": "13.0.0", "crdb_version": "CockroachDB CCL v26.2.1 (x86_64-pc-linux-gnu)"}

    refusal = pytest.raises(outbox.ConfigurationError, match=r"the server is CockroachDB v26\.2\.1")
    with calling_itself(portable.url, **named) as url, refusal:
        migrations.upgrade(url, prefix="new_")


def test_asyncpg_connects_where_the_type_json_does_not_exist(
    portable: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CockroachDB, which has only `jsonb`."""
    asyncpg, decoded = pytest.importorskip("asyncpg"), []
    set_type_codec = asyncpg.Connection.set_type_codec

    async def set_known_codec(connection: Any, type: str, **codec: Any) -> None:
        if type == "json":
            raise ValueError("unknown type: pg_catalog.json")
        decoded.append(type)
        await set_type_codec(connection, type, **codec)

    async def select_one() -> int | None:
        engine = create_async_engine(portable.url.set(drivername="portable+asyncpg"))
        async with engine.connect() as connection:
            found: int | None = await connection.scalar(sa.text("SELECT 1"))
        await engine.dispose()
        return found

    monkeypatch.setattr(asyncpg.Connection, "set_type_codec", set_known_codec)

    assert asyncio.run(select_one()) == 1
    assert decoded == ["jsonb"]


# --- who wins


def test_of_two_dispatchers_that_choose_the_same_entries_one_gets_each(portable: Database, ob: outbox.Outbox) -> None:
    put(portable, ob, count=8)
    have_chosen, waited = threading.Barrier(2), set()

    def choose(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("UPDATE outbox_queue") and threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            have_chosen.wait(30)  # each has read the same rows by now, and changed none

    def claimer(_: int) -> list[Any]:
        engine = portable.new_engine()
        sa.event.listen(engine, "before_cursor_execute", choose)
        return claim(DatabaseStore(engine, ob.configuration), quota(permits=4))

    with ThreadPoolExecutor(2) as pool:
        taken = [entry for batch in pool.map(claimer, range(2)) for entry in batch]

    assert len(waited) == 2
    assert len(taken) == len({entry.id for entry in taken}) == 8
    assert {row.deliveries for row in portable.queue} == {1}


def test_a_conflict_at_any_statement_leaves_one_claim_and_one_settlement(portable: Database, ob: outbox.Outbox) -> None:
    store = DatabaseStore(portable.engine, ob.configuration)
    number, statements = 0, 1000
    while number < statements:
        number += 1
        id = put_one(portable, ob, ordering_key="ada", discriminator=str(number))
        with conflict_at(portable.engine, number) as sent:
            (entry,) = claim(store)
            settled = settle(store, (entry, Settle("delivered", 1)))
        statements = len(sent) if number == 1 else statements
        assert (entry.id, entry.deliveries, settled) == (id, 1, {id})
        assert state(portable, id) == "delivered"

    assert number > 12
    assert states(portable) == {"delivered": number}


def test_a_server_that_answers_with_conflicts_is_not_taken_for_silent(
    portable: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    id = put_one(portable, ob)
    store = DatabaseStore(portable.engine, ob.configuration, lease=timedelta(seconds=20))

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        return (CONFLICT, {}) if statement.startswith("UPDATE outbox_queue") else (statement, parameters)

    with retold(portable.engine, execute), pytest.raises(sa.exc.DBAPIError) as ended:
        claim(store)

    assert is_conflict(ended.value)
    assert "has not answered" not in caplog.text
    assert queue_row(portable, id).deliveries == 0


def test_a_conflict_after_a_callback_is_not_the_callbacks_failure(
    portable: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """At the statement with which the dispatcher checks that the callback's transaction can still commit."""
    put_one(portable, ob)
    effects, checks = Operations(), []
    effects.on_settled("crm")(lambda session, settlement: None)

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        if statement == "RELEASE SAVEPOINT outbox_callback":
            checks.append(statement)
        return (CONFLICT, {}) if len(checks) == 1 and statement is checks[0] else (statement, parameters)

    with retold(portable.engine, execute):
        assert run_once(portable, ob, adapters={"crm": MemoryAdapter()}, include=[effects]) == 1

    assert len(checks) == 2
    assert states(portable) == {"delivered": 1}
    assert "raised" not in caplog.text


# --- an operator


def test_an_operators_decision_is_repeated_after_a_conflict(portable: Database) -> None:
    with conflict_at(sa.Engine, 3) as sent:
        printed = succeeded("pause", "crm", "--reason", "their request", database=portable)

    assert CONFLICT not in sent[3:]
    assert printed.startswith("destination crm paused")
    assert [row.paused for row in portable.rows(TABLES.destination)] == [True]
    assert len(portable.rows(TABLES.audit)) == 1


def test_a_decision_that_always_meets_a_conflict_says_what_to_do(
    portable: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PAUSE_SECONDS", 0)

    with retold(sa.Engine, lambda *statement: (CONFLICT, {})):
        status, text = refused("pause", "crm", "--reason", "their request", database=portable)

    assert (status, text.count("undone: run the command again")) == (1, 1)
    assert portable.rows(TABLES.destination) == []


# --- a process that is killed


@pytest.mark.parametrize("moment", ["after the claim", "on the way back", "after settling"])
def test_a_killed_process_leaves_work_that_ends_under_the_same_key(
    portable: Database, ob: outbox.Outbox, tmp_path: Path, moment: str
) -> None:
    put_one(portable, ob, parent="invoice:42")
    write_factory(tmp_path, TO_FILES)
    service = FileService(tmp_path)

    with daemon(tmp_path, portable.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    age(portable, HOUR)
    run_once(portable, ob, adapters={"crm": service})

    key = ob.child_key("invoice:42", "crm.upsert")
    assert states(portable) == {"delivered": 1}
    assert service.effects == [key]
    assert Counter(service.sent) == {key: 2 if moment == "on the way back" else 1}


# --- a restore


def test_after_a_restore_an_operator_raises_the_epoch(portable: Database, ob: outbox.Outbox) -> None:
    """Nothing of the server shows the restore, so the operator says it: what may have been sent is in doubt then."""
    adapter = MemoryAdapter()
    run_once(portable, ob, adapters={"crm": adapter})
    id = put_one(portable, ob)
    settings = {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}

    succeeded("resume", "--after-restore", "--reason", "backup of last night", database=portable, **settings)

    row = queue_row(portable, id)
    assert (row.maybe_sent, row.in_doubt_since is not None) == (True, True)
    assert run_once(portable, ob, adapters={"crm": adapter}) == 1


def test_a_process_that_remembers_a_later_state_notices_a_restore(
    portable: Database, ob: outbox.Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of the identity. A process that remembers nothing sends."""
    monkeypatch.setattr(database_identity, "IDENTITY_EVERY", timedelta(0))
    remembering = {"adapters": {"crm": MemoryAdapter()}, "identity_file": tmp_path / "identity.json"}
    run_once(portable, ob, **remembering)
    (backup,) = portable.rows(TABLES.meta)
    run_once(portable, ob, **remembering)
    put_one(portable, ob)
    portable.execute(sa.update(TABLES.meta).values(backup._mapping))

    with pytest.raises(Suspended, match="an older state was restored"):
        run_once(portable, ob, **remembering)

    environment = {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}
    succeeded("resume", "--after-restore", "--reason", "last night's backup", database=portable, **environment)
    assert run_once(portable, ob, **remembering) == 1
