"""What the tests of `outbox doctor` share: a healthy deployment, and what the command finds in it."""

import asyncio
import json
from typing import Any

import sqlalchemy as sa

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.dispatcher_work import DispatcherWork
from support.cli_runner import SECRET_TEXT, command
from support.database import TABLES, Database
from support.entries import dispatcher, put, run_once

SETTINGS = {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}


def examined(database: Database, **changed: str) -> Any:
    """The document of `outbox doctor`, with the deployment's settings but what is `changed`."""
    result = command("doctor", "--json", database=database, **{**SETTINGS, **changed})
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["is_healthy"] else 7), result.output
    return document


def found(database: Database, **changed: str) -> list[tuple[str, str, str]]:
    """(check, severity, text) of each finding."""
    return [(each["check"], each["severity"], each["text"]) for each in examined(database, **changed)["findings"]]


def crm(database: Database, ob: outbox.Outbox, **settings: Any) -> DispatcherWork:
    return dispatcher(database, ob, **{"adapters": {"crm": MemoryAdapter()}} | settings)


def beat(*working: DispatcherWork) -> None:
    for each in working:
        asyncio.run(each.heartbeats.beat())


def deploy(database: Database, ob: outbox.Outbox) -> None:
    """A healthy setup: an entry was sent, another one waits, and a dispatcher serves both."""
    put(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    put(database, ob)
    beat(crm(database, ob))


def suspended(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.update(TABLES.meta).values(suspended_reason="this is a copy"))
