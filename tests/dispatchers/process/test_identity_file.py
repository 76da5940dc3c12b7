"""The file in which dispatchers remember the database's identity, outside of it."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import dispatcher, put_one, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.errors import Suspended
from outbox.errors import ConfigurationError

META = TABLES.meta


def test_the_identity_outside_the_database_is_remembered_across_processes(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    identity = tmp_path / "mark.json"
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=identity)
    stored = json.loads(identity.read_text())
    database.execute(sa.delete(META))

    with pytest.raises(Suspended, match="the database has no identity, although identity 1 of "):
        run_once(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=str(identity))

    assert stored["environment"] == "test"
    assert list(tmp_path.glob("mark*")) == [identity]


def test_the_file_is_written_although_adapters_occupy_the_loops_threads(
    sqlite: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    """As lookups of host names do while a name server hangs."""
    released = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as threads:
            loop.set_default_executor(threads)
            hanging = loop.run_in_executor(None, released.wait)
            working = dispatcher(sqlite, ob, adapters={"crm": MemoryAdapter()}, identity_file=tmp_path / "mark.json")
            try:
                async with asyncio.timeout(60):
                    await working.run_once()
            finally:
                released.set()
                await hanging
                await working.close()

    asyncio.run(main())

    assert (tmp_path / "mark.json").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"checked_at": 5}', "\udce4"], ids=repr)
def test_an_identity_file_without_an_identity_is_refused_at_the_start(
    content: str, database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    identity = tmp_path / "mark"
    identity.write_text(content, errors="surrogateescape")

    with pytest.raises(ConfigurationError) as caught:
        dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=identity)

    assert str(caught.value).startswith(f"identity file {str(identity)!r} holds no database identity (")
    assert str(caught.value).endswith("): if you trust the database, remove the file; a dispatcher writes it again")


def test_an_identity_file_in_a_missing_folder_is_refused_at_the_start(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    identity = tmp_path / "gone" / "mark"

    with pytest.raises(ConfigurationError) as caught:
        dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=identity)

    assert (
        str(caught.value)
        == f"identity file {str(identity)!r}: folder {str(identity.parent)!r} does not exist or is not writable"
    )


def test_an_unwritable_identity_file_is_reported_and_the_work_continues(
    database: Database, ob: outbox.Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = tmp_path / "folder" / "mark"
    identity.parent.mkdir()
    put_one(database, ob)
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, identity_file=identity)
    identity.parent.rmdir()

    assert asyncio.run(working.run_once()) == 1

    assert f"cannot write the database identity file {identity}: No such file or directory" in caplog.text
