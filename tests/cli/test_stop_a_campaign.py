"""Stop 3,000 wrong mails, as docs/runbooks.md says: pause, find, dry run, cancel, see zero, resume."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support.cli_runner import command, document
from support.daemons import wait_for
from support.database import Database
from support.entries import dispatcher, pumping, states
from support.mail_servers import MAIL, Mailbox, adapter_for, mail_server

import outbox

pytestmark = pytest.mark.on_mariadb

POLL = timedelta(milliseconds=250)  # as by default: the dispatcher and the commands share a process here
SALE = {**MAIL, "subject": "Spring sale"}
WRONG = ("--operation", "mail.send", "--parent-prefix", "spring:", "--payload", "subject=Spring sale")
WHY = ("--reason", "CRM-9: wrong prices", "--actor", "ada")


def put_mails(database: Database, ob: outbox.Outbox, campaign: str, numbers: range, payload: Any) -> None:
    with database.begin() as session:
        for number in numbers:
            ob.enqueue(session, "mail.send", payload, parent=f"{campaign}:{number}")


def waiting(database: Database) -> Any:
    (destination,) = document("status", database=database)["destinations"]
    return destination["states"], destination["decided"]


def stop_the_campaign(database: Database) -> None:
    """The operator's commands. The dispatcher runs all the time."""
    found = document("cancel", *WRONG, *WHY, "--dry-run", database=database)
    assert (found["count"], found["done"]) == (3000, 0)
    assert found["breakdown"] == {
        "operation": {"mail.send": 3000},
        "source": {"app": 3000},
        "parent": {"spring:": 3000},
        "state": {"pending": 3000},
    }
    assert [sample["parent"].partition(":")[0] for sample in found["samples"]] == ["spring"] * 5
    assert found["samples"][0].keys() == {"id", "operation", "source", "parent", "created_at"}, "nothing that was sent"

    cancelled = command("cancel", *WRONG, *WHY, "--max", "3000", "--yes", "--json", database=database)

    assert cancelled.exit_code == 0, cancelled.output
    done = json.loads(cancelled.stdout)
    assert (done["done"], done["not_settled"]) == (3000, 0)
    assert document("list", *WRONG, database=database)["entries"] == []
    assert waiting(database) == ({"pending": 5}, 0)
    (of_mail,) = document("destinations", database=database)["destinations"]
    assert (of_mail["due"], of_mail["decided"], of_mail["paused"]) == (5, 0, True)


@pytest.mark.every_value
def test_3000_wrong_mails_are_stopped_while_the_dispatcher_runs(database: Database, ob: outbox.Outbox) -> None:
    mailbox, done = Mailbox(), threading.Event()

    async def work() -> None:
        async with mail_server(mailbox) as port:
            working = dispatcher(database.new_engine(), ob, adapters={"mail": adapter_for(port)}, poll=POLL)
            async with working.heartbeats.running():
                await pumping(working, done.is_set)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(asyncio.run, work())
        try:
            put_mails(database, ob, "spring", range(3), SALE)
            wait_for(lambda: len(mailbox.contents) == 3, "those before the pause")
            command("pause", "mail", *WHY, database=database)
            put_mails(database, ob, "spring", range(3, 3003), SALE)
            put_mails(database, ob, "order", range(5), MAIL)
            stop_the_campaign(database)
            assert len(mailbox.contents) == 3
            command("resume", "mail", *WHY, database=database)
            wait_for(lambda: len(mailbox.contents) == 8, "the right mails")
        finally:
            done.set()
            working.result(60)

    assert states(database) == {"delivered": 8, "cancelled": 3000}
    assert sum(b"Spring sale" in mail for mail in mailbox.contents) == 3
