"""Whose database it is: a process of another env refuses itself, and an operator may adopt a database by an option."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, error_of
from support.daemons import daemon, write_factory
from support.database import TABLES, Database
from support.entries import Blocking, dispatcher, put_one, queue_row, run_once, state, until_true

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.errors import Suspended
from outbox.errors import ConfigurationError
from outbox.sql.connections.places import place_of

META = TABLES.meta
ADOPT = ("resume", "--after-restore", "--nothing-lost", "--reason", "a copy for staging", "--actor", "ada")
REFUSED = (
    " belongs to env 'test', but this process has env 'tets': it must not use this database (other processes are"
    " not affected). Set OUTBOX_ENV to 'test'. Or, if this is a copy of 'test''s database, or if 'test' has a new name, run"
    ' `outbox resume --after-restore --adopt-from test --env tets --reason "..."`'
)


@pytest.fixture
def typo(ob: outbox.Outbox) -> outbox.Outbox:
    """A process whose OUTBOX_ENV was mistyped."""
    return outbox.Outbox(ob.configuration.keyring, env="tets")


def serve(database: Database, ob: outbox.Outbox) -> int:
    return run_once(database, ob, adapters={"crm": MemoryAdapter()})


def committed(database: Database) -> list[list[Any]]:
    return [database.rows(table) for table in TABLES.metadata.tables.values()]


@pytest.mark.parametrize("waiting", [0, 1], ids=["empty", "full"])
def test_a_process_of_another_env_refuses_itself_and_writes_nothing(
    database: Database, ob: outbox.Outbox, typo: outbox.Outbox, waiting: int
) -> None:
    serve(database, ob)
    ids = [put_one(database, ob) for _ in range(waiting)]
    before = committed(database)

    with pytest.raises(ConfigurationError) as once:
        serve(database, typo)
    with pytest.raises(ConfigurationError) as checked:
        asyncio.run(dispatcher(database, typo, adapters={"crm": MemoryAdapter()}).check())

    refused = f"the database {place_of(database.engine)}{REFUSED}"
    assert (str(once.value), str(checked.value)) == (refused, refused)
    assert committed(database) == before
    assert serve(database, ob) == waiting
    assert all(state(database, id) == "delivered" for id in ids)


def test_its_command_ends_with_1_and_the_others_continue(database: Database, ob: outbox.Outbox, tmp_path: Path) -> None:
    write_factory(tmp_path, 'def make(): return Dispatcher(url, adapters={"crm": MemoryAdapter()})')
    serve(database, ob)

    with daemon(tmp_path, database.url, OUTBOX_SECRET=SECRET_TEXT, OUTBOX_ENV="tets") as mistyped:
        assert mistyped.wait(120) == 1

    assert REFUSED in mistyped.output
    assert "Traceback" not in mistyped.output
    id = put_one(database, ob)
    serve(database, ob)
    assert state(database, id) == "delivered"


def test_the_first_process_does_not_take_over_entries_of_another_env(
    database: Database, ob: outbox.Outbox, typo: outbox.Outbox
) -> None:
    id = put_one(database, ob)

    with pytest.raises(
        ConfigurationError,
        match=r"unsettled entries of the database .* belong to env 'test', but",
    ):
        serve(database, typo)

    assert database.rows(META) == []
    assert serve(database, ob) == 1
    assert state(database, id) == "delivered"


def test_an_entry_of_another_env_is_never_sent_and_stops_no_other(
    database: Database, ob: outbox.Outbox, typo: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    serve(database, ob)
    foreign = put_one(database, typo, ordering_key="order:1")
    following, ours = put_one(database, ob, ordering_key="order:1"), put_one(database, ob)
    service = MemoryAdapter()
    working = dispatcher(database, ob, adapters={"crm": service})

    async def main() -> tuple[int, int]:
        await working.check()
        return await working.run_once(), await working.run_once()

    assert asyncio.run(main()) == (1, 0)
    (warning,) = [record.getMessage() for record in caplog.records if str(foreign) in record.getMessage()]
    for part in ("crm.upsert", "belongs to env 'tets'", "database to env 'test'", f"`outbox cancel {foreign}` ends it"):
        assert part in warning
    assert (state(database, foreign), state(database, ours)) == ("pending", "delivered")
    assert document("show", str(foreign), database=database)["reason"] in warning

    assert document("cancel", "--reason", "asked", str(foreign), database=database)["settled"]
    assert serve(database, ob) == 1
    assert (state(database, foreign), state(database, following)) == ("cancelled", "delivered")


def test_a_running_dispatcher_ends_when_another_env_adopts_its_database(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.claim_loops.SWEEP_SECONDS", 0.0)
    id = put_one(database, ob)

    async def main() -> None:
        service = Blocking()
        working = dispatcher(database, ob, adapters={"crm": service})
        pump = asyncio.create_task(working.pump(asyncio.Event()))
        await until_true(lambda: service.waiting == 1)
        await asyncio.to_thread(document, *ADOPT, "--adopt-from", "test", "--env", "staging", database=database)
        await until_true(lambda: working._loops.refusal is not None)
        service.released.set()  # what was in flight is finished all the same
        with pytest.raises(
            ConfigurationError, match=r"the database .* belongs to env 'staging', but this process has env 'test'"
        ):
            await pump
        await working.close()

    asyncio.run(main())

    assert state(database, id) == "delivered"


def test_an_identity_file_of_another_env_refuses_the_process_alone(
    database: Database, ob: outbox.Outbox, typo: outbox.Outbox, tmp_path: Path
) -> None:
    identity_file = tmp_path / "identity_file"
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=identity_file)
    database.execute(sa.delete(META))

    with pytest.raises(
        ConfigurationError, match=r"as this process remembers, the database .* belongs to env 'test', but"
    ):
        run_once(database, typo, adapters={"crm": MemoryAdapter()}, identity_file=identity_file)

    assert database.rows(META) == []


# --- resuming


def test_resume_in_the_wrong_environment_is_refused_and_changes_nothing(database: Database, ob: outbox.Outbox) -> None:
    serve(database, ob)
    put_one(database, ob)
    database.execute(sa.update(META).values(suspended_reason="restored"))
    before = committed(database)

    assert error_of(*ADOPT, database=database, OUTBOX_ENV="tets") == (
        1,
        "refused",
        f"the database {place_of(database.engine)}{REFUSED}",
    )

    assert committed(database) == before
    with pytest.raises(Suspended):
        serve(database, ob)


@pytest.mark.parametrize(("adopted", "env"), [("prod", "staging"), ("test", "test")])
def test_only_the_env_that_has_the_database_can_be_adopted_from(
    database: Database, ob: outbox.Outbox, adopted: str, env: str
) -> None:
    serve(database, ob)

    warning = error_of(*ADOPT, "--adopt-from", adopted, database=database, OUTBOX_ENV=env)

    assert warning == (
        1,
        "refused",
        f"adopt_from '{adopted}': the database belongs to env 'test': to adopt the database, pass that env here, and the"
        " new env with --env",
    )


def test_an_adopted_database_suspends_the_old_entries_and_sends_its_own(database: Database, ob: outbox.Outbox) -> None:
    serve(database, ob)
    theirs = put_one(database, ob)
    staging = outbox.Outbox(ob.configuration.keyring, env="staging")

    assert document(*ADOPT, "--adopt-from", "test", database=database, OUTBOX_ENV="staging")["suspended"] == 1

    ours = put_one(database, staging)
    asyncio.run(dispatcher(database, staging, adapters={"crm": MemoryAdapter()}).check())
    assert serve(database, staging) == 1
    assert (state(database, ours), queue_row(database, theirs).due_at.year) == ("delivered", 9999)
    with pytest.raises(ConfigurationError, match=r"the database .* belongs to env 'staging'"):
        serve(database, ob)


def test_adopting_is_no_decision_about_a_destination(database: Database) -> None:
    result = command("resume", "--reason", "asked", "mail", "--adopt-from", "prod", database=database)

    assert result.exit_code == 2
    assert "--nothing-lost, --since and --adopt-from need --after-restore" in result.stderr
