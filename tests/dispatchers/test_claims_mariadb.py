"""What a batch costs on MariaDB. The rules of claims and settlements are tested on each database, in `test_claims`."""

import asyncio
import json

import pytest
from support.database import CHARGE, PAYLOAD, TABLES, Database, statements_of
from support.entries import dispatcher

import outbox
from dispatchers import Delivered, Delivery, Operations
from dispatchers.store import claims_mariadb

ENTRIES = 40


def drain(mariadb: Database, ob: outbox.Outbox, result: str) -> list[str]:
    """Enqueue entries and drain them; the statements that the dispatcher sent about its batches."""
    operations = Operations()

    @operations.operation("stripe")
    async def send(delivery: Delivery) -> Delivered:
        return Delivered({"text": result, "amount": delivery.payload["amount"]})

    with mariadb.begin() as session:
        for number in range(ENTRIES):
            ob.enqueue(session, CHARGE, PAYLOAD, parent=f"n:{number}")
    with statements_of(mariadb.engine) as sent:
        settled = asyncio.run(dispatcher(mariadb.engine, ob, include=[operations]).run_once())
    assert settled == ENTRIES
    return sent


def test_the_statements_of_a_batch_are_as_many_for_one_entry_as_for_forty(mariadb: Database, ob: outbox.Outbox) -> None:
    sent = drain(mariadb, ob, "done")

    for wanted in ("UPDATE outbox_queue SET state", "DELETE FROM outbox_queue", "INSERT INTO outbox_settlement"):
        assert sum(statement.startswith(wanted) for statement in sent) == 1, wanted


def test_long_results_are_inserted_in_parts(
    mariadb: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_mariadb, "TEXT_CHARS_MAX", 10_000)
    result = "100 % 'ünï' \\ " * 100

    sent = drain(mariadb, ob, result)

    assert sum(statement.startswith("INSERT INTO outbox_settlement") for statement in sent) > 5
    stored = mariadb.rows(TABLES.settlement)
    assert len(stored) == ENTRIES
    assert {json.loads(row.result)["text"] for row in stored} == {result}
