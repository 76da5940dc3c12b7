"""`outbox callbacks`: what is on record, put there before a deploy, and taken off when a callback is removed permanently."""

import asyncio
import logging
import shlex
import sys
from pathlib import Path

import pytest
from support.callbacks import Shop
from support.cli_runner import document, refused, succeeded
from support.database import TABLES, Database
from support.entries import put, run_once, states

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter

APP = """
import outbox
from dispatchers import Dispatcher, Operations
from dispatchers.adapters import MemoryAdapter

effects = Operations()
effects.on_settled("crm")(lambda session, settlement: None)
effects.on_uncertain("crm.upsert")(lambda session, settlement: None)
effects.on_completed("checkout")(lambda session, completed: None)
ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")


def make_dispatcher():
    return Dispatcher("sqlite:///none.db", include=[effects], adapters={"crm": MemoryAdapter()}, outbox=ob)
"""


def test_what_is_recorded_before_a_deploy_is_skipped_by_no_dispatcher(
    database: Database, ob: outbox.Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "next_deploy.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    put(database, ob, count=2)

    printed = succeeded("callbacks", "record", "next_deploy:make_dispatcher", database=database)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert printed == "2 recorded: on_settled crm, on_uncertain crm.upsert\n"
    assert states(database) == {"retry": 2}
    listed = document("callbacks", "list", database=database)["callbacks"]
    assert [(each["name"], each["waiting"]) for each in listed] == [
        ("on_settled crm", 2),
        ("on_uncertain crm.upsert", 0),
    ]
    lines = succeeded("callbacks", "list", database=database).splitlines()
    assert lines[0].split() == ["CALLBACK", "WAITING", "SINCE", "LAST", "START"]
    assert lines[1].split()[:3] == ["on_settled", "crm", "2"]


def test_forget_lets_settle_what_waits_for_a_callback(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    shop = Shop(database, ob, is_async=False)
    shop.on_settled(lambda *_: None, "crm")
    asyncio.run(shop.dispatcher(database.new_engine(), adapters={"mail": MemoryAdapter()}).run_once())
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    printed = succeeded("callbacks", "forget", "on_settled crm", database=database)
    assert printed == "on_settled crm forgotten; 2 entries waited for it and will settle without it\n"
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 2

    assert (states(database), database.rows(TABLES.callback)) == ({"delivered": 2}, [])
    gone = refused("callbacks", "forget", "on_settled crm", database=database)
    assert gone == (3, "outbox: no callback 'on_settled crm' is recorded: `outbox callbacks list` shows them\n")


def test_a_mistyped_callback_is_forgotten_by_the_command_of_its_warning(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    effects = Operations()
    effects.on_settled("crm.uspert")(lambda session, settlement: None)
    with caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        run_once(database, ob, include=[effects], adapters={"crm.upsert": MemoryAdapter()})
    run_once(database, ob, adapters={"crm.upsert": MemoryAdapter()})
    assert [row.name for row in database.rows(TABLES.callback)] == ["on_settled crm.uspert"]

    (warning,) = [message for message in caplog.messages if "on_settled" in message]
    succeeded(*shlex.split(warning.split("`")[1])[1:], database=database)

    assert "did you mean 'crm.upsert'?" in warning
    assert database.rows(TABLES.callback) == []


@pytest.mark.parametrize("name", ["crm.upsert", "on_setled crm.upsert"])
def test_forgetting_what_is_not_on_record_names_what_was_meant(
    database: Database, ob: outbox.Outbox, name: str
) -> None:
    effects = Operations()
    effects.on_settled("crm.upsert")(lambda session, settlement: None)
    run_once(database, ob, include=[effects], adapters={"crm": MemoryAdapter()})

    status, text = refused("callbacks", "forget", name, database=database)

    assert status == 3
    assert text.endswith("; did you mean 'on_settled crm.upsert'?\n")
    assert len(database.rows(TABLES.callback)) == 1
