"""With encryption nothing of a payload, a result or an answer is found in the database, its files, a log, an error or a page."""

import json
import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session
from support.canaries import leaks, shown
from support.dashboard import Browser, dashboard, signed_in
from support.database import Client, Database
from support.encrypted import D1, D2, outbox_with, stored
from support.entries import HOUR, age, put_one, run_once

import outbox
from dispatchers import Delivered, Operations, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter

pytestmark = [pytest.mark.on_mariadb]

PAGES = ("/", "/entries", "/entries?states=delivered&states=failed", "/requests", "/audit", "/uncertain")
PATHS = st.lists(st.sampled_from(["member", "name", "item", "text"]), max_size=4)


def placed(canary: str, path: list[str]) -> Any:
    """JSON that has the canary somewhere: in a list, as a member or its name, or inside a longer text."""
    value: Any = canary
    for step in path:
        match step:
            case "member":
                value = {"a": 1, "b": value}
            case "item":
                value = [None, value]
            case "name":
                value = {json.dumps(value): True}
            case _:
                value = f"before {json.dumps(value)} after"
    return value


def history(database: Database, ob: outbox.Outbox, value: Any) -> list[str]:
    """All that can happen to entries and a request. Returns what the errors on the way show."""
    errors: list[str] = []
    effects, sends, called, seen = Operations(), list[int](), list[int](), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append(settlement.entry.payload)
        called.append(1)
        if len(called) == 1:
            raise RuntimeError("the callback failed")
        ob.enqueue(session, "mail.send", value)

    def answer(delivery: Any) -> Any:
        sends.append(1)
        seen.append(delivery.payload)
        return [Unknown("no answer"), Rejected("refused", result=value), Delivered(value)][min(len(sends) - 1, 2)]

    adapters = {name: MemoryAdapter(answer) for name in ("crm", "mail")}
    put_one(database, ob, payload=value, parent="order:first")
    put_one(database, ob, "mail.send", payload=value, parent="order:x")
    client = Client(database, ob, is_async=False)

    def respond(session: Session, claim: outbox.Claim) -> None:
        claim.respond(200, {"a": value})

    for _ in range(2):
        client.request(
            lambda session, claim: claim.respond(200, {"a": value}), key="r1", content={"c": json.dumps(value)}
        )  # type: ignore[arg-type]
    for key_holder in (outbox_with(None), outbox_with(D2), ob, ob, ob):
        run_once(database, key_holder, include=[effects], adapters=adapters)
        age(database, HOUR)
    for other in (outbox_with(None), outbox_with(D2)):
        with pytest.raises(outbox.CannotDecrypt) as caught:
            Client(database, other, is_async=False).request(
                lambda session, claim: None, key="r1", content={"c": json.dumps(value)}
            )
        errors.append(shown(caught.value))
    with database.begin() as session:
        results = [entry.result for entry in ob.status(session, "order:first")]
    assert (value in results, [each for each in seen if each != value]) == (True, [])
    return errors


def pages(database: Database, canary: str) -> str:
    """What a viewer and an operator see of everything, and a payload reader of a process without the keys."""
    texts = []
    for roles in (["viewer"], ["operator"], ["viewer", "payload_reader"]):
        with dashboard(database, authenticate=signed_in(*roles)) as app:
            browser = Browser(app)
            texts += [browser.get(path).text for path in PAGES]
            for row in database.entries:
                texts.append(browser.get(f"/entries/{row.id}").text)
                texts.append(browser.api(f"/entries/{row.id}/reveal", {"reason": "x"}, Authorization="Bearer t").text)
            texts += [browser.get(f"/requests/{row.id}").text for row in database.records]
    return "\n".join(texts)


@settings(max_examples=3, phases=[Phase.generate])
@given(path=PATHS)
def check(database: Database, caplog: pytest.LogCaptureFixture, path: list[str]) -> None:
    from support.database import TABLES

    canary = f"canary/{uuid4().hex}"
    for table in reversed(TABLES.metadata.sorted_tables):
        database.execute(sa.delete(table))
    caplog.clear()

    errors = history(database, outbox_with(D1), placed(canary, path))

    seen = {
        "tables": stored(database),
        "logs": caplog.text,
        "errors": "\n".join(errors),
        "pages": pages(database, canary),
    }
    assert {name: leaks(text, canary) for name, text in seen.items()} == {name: [] for name in seen}


@pytest.mark.owner
def test_no_canary_is_found_at_any_position_in_a_value(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    check(database, caplog)


def test_no_canary_is_in_the_files_of_sqlite(sqlite: Database) -> None:
    canary, control = uuid4().hex, uuid4().hex
    put_one(sqlite, outbox_with(None), "other.call", payload={"card": control}, parent="other")
    history(sqlite, outbox_with(D1), {"card": canary})

    files = b"".join(path.read_bytes() for path in Path(str(sqlite.url.database)).parent.glob("shop.db*"))
    assert (control.encode() in files, canary.encode() in files) == (True, False)


@pytest.mark.owner
def test_no_canary_is_in_the_write_ahead_log(postgresql: Database) -> None:
    canary, control = uuid4().hex, uuid4().hex
    put_one(postgresql, outbox_with(None), "other.call", payload={"card": control}, parent="other")
    history(postgresql, outbox_with(D1), {"card": canary})

    with postgresql.owner() as connection:
        folder = Path(connection.execute(sa.text("SELECT current_setting('data_directory')")).scalar_one()) / "pg_wal"
        connection.execute(sa.text("SELECT pg_switch_wal()"))
    try:
        log = b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    except OSError:
        pytest.skip("the server's files cannot be read from here")
    assert (control.encode() in log, canary.encode() in log) == (True, False)
