"""Leased claims in the portable mode: the server may end each of their short transactions in favour of another request's."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.concurrency import CONFLICT, conflict_at, retold
from support.database import REQUEST, TABLES, Database

import outbox
from outbox.requests import short_transactions


def request(source: Any, ob: outbox.Outbox, key: str) -> outbox.Response:
    with ob.leased(source, key, scope="ada", content=REQUEST) as claim:
        claim.renew()
        return claim.respond(201, {"key": key})


async def request_async(source: Any, ob: outbox.Outbox, key: str) -> outbox.Response:
    async with ob.leased(source, key, scope="ada", content=REQUEST) as claim:
        await claim.renew()
        return await claim.respond(201, {"key": key})


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_conflict_at_any_statement_is_not_seen_by_the_request(
    portable: Database, ob: outbox.Outbox, is_async: bool
) -> None:
    number, statements = 0, 1000
    while number < statements:
        number += 1
        with conflict_at(sa.Engine, number) as sent:
            if is_async:
                answer = asyncio.run(request_async(portable.async_engine(), ob, f"retry-{number}"))
            else:
                answer = request(portable.engine, ob, f"retry-{number}")
        statements = len(sent) - 1 if number == 1 else statements
        assert answer.json() == {"key": f"retry-{number}"}

    assert number > 8
    assert {record.state for record in portable.records} == {"succeeded"}
    assert len(portable.records) == number


def test_a_renewal_is_repeated_after_another_connection_changed_the_record(
    portable: Database, ob: outbox.Outbox
) -> None:
    tries = []

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        if statement.startswith("UPDATE outbox_record") and "lease_until" in statement:
            tries.append(statement)
            if len(tries) == 1:
                with sa.create_engine(portable.url, poolclass=sa.NullPool).begin() as other:
                    other.exec_driver_sql("UPDATE outbox_record SET created_at = created_at")
        return statement, parameters

    with ob.leased(portable.engine, "retry-1", scope="ada", content=REQUEST, lease=timedelta(minutes=1)) as claim:
        with retold(portable.engine, execute):
            claim.renew()
        claim.respond(201)

    assert len(tries) == 2
    assert [row.state for row in portable.rows(TABLES.record)] == ["succeeded"]


def test_a_claim_that_always_meets_a_conflict_is_in_flight(
    portable: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_transactions, "MAX_PAUSE_SECONDS", 0)
    sent = []

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        sent.append(statement)
        return CONFLICT, {}

    with retold(portable.engine, execute), pytest.raises(outbox.KeyInFlight):
        request(portable.engine, ob, "retry-1")

    assert len(sent) == short_transactions.CONFLICT_TRIES
    assert portable.records == []
