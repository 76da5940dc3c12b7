"""The ids that lines of the log carry: in the lines of the dispatcher, of adapters and of callbacks."""

import asyncio
import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from support.database import Database
from support.entries import put_one, run_once

import outbox
from dispatchers import Delivered, Delivery, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.cli.run import JsonLines
from dispatchers.telemetry.log_ids import LogIds
from dispatchers.telemetry.opentelemetry import trace

app = logging.getLogger("app")


class Lines(logging.Handler):
    """Keeps what `outbox run --json` would print."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(LogIds())
        self.setFormatter(JsonLines())
        self.documents: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.documents.append(json.loads(self.format(record)))

    def of(self, message: str) -> dict[str, Any]:
        (found,) = [each for each in self.documents if each["message"].startswith(message)]
        return found


@pytest.fixture
def lines() -> Any:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def ids(document: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in document.items() if name not in ("at", "level", "logger", "message", "trace")
    }


def logging_effects() -> Operations:
    effects = Operations()

    @effects.operation("crm")
    async def send(delivery: Delivery) -> Outcome:
        await asyncio.sleep(0)
        app.info("async adapter")
        return Delivered()

    @effects.operation("mail")
    def send_mail(delivery: Delivery) -> Outcome:
        app.info("sync adapter")
        return Delivered()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        app.info("callback")
        raise ValueError

    return effects


def test_each_line_about_an_entry_carries_its_ids(database: Database, ob: outbox.Outbox, lines: Lines) -> None:
    crm = {"entry_id": str(put_one(database, ob)), "operation": "crm.upsert", "destination": "crm"}
    mail = {"entry_id": str(put_one(database, ob, "mail.send")), "operation": "mail.send", "destination": "mail"}

    run_once(database, ob, include=[logging_effects()])
    app.info("between")

    assert ids(lines.of("async adapter")) == ids(lines.of("callback")) == crm
    assert ids(lines.of("sync adapter")) == mail
    assert ids(lines.of("entry ")) == crm  # its callback raised
    assert ids(lines.of("between")) == {}


def test_a_line_within_a_span_carries_the_ids_of_both(sqlite: Database, ob: outbox.Outbox, lines: Lines) -> None:
    put_one(sqlite, ob)
    tracer = TracerProvider().get_tracer("test")

    run_once(sqlite, ob, include=[logging_effects()], trace=trace(tracer))

    sent, called, failed = (lines.of(message) for message in ("async adapter", "callback", "entry "))
    assert len({sent["trace_id"], called["trace_id"], failed["trace_id"]}) == 1
    assert (len(sent["trace_id"]), len(sent["span_id"])) == (32, 16)
    assert called["span_id"] == failed["span_id"] != sent["span_id"]


def test_a_line_about_what_no_process_sends_carries_its_ids(sqlite: Database, ob: outbox.Outbox, lines: Lines) -> None:
    id = put_one(sqlite, ob)

    run_once(sqlite, ob, adapters={"mail": MemoryAdapter()})

    assert lines.of(f"entry {id}")["entry_id"] == str(id)


def test_an_id_that_the_line_itself_gives_is_kept(sqlite: Database, lines: Lines) -> None:
    app.info("an order", extra={"operation": "orders.place"})

    assert lines.of("an order")["operation"] == "orders.place"
