"""Decisions in bulk beside other transactions: a lock that is not released costs the entries that it concerns, and no others."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT
from support.database import TABLES, Database, statements_of
from support.entries import age, put, run_once

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import bulk
from dispatchers.admin.decide.again import again
from dispatchers.admin.decide.bulk import LOCKED, BulkDecision, Progress, decide, preview
from dispatchers.admin.read.entry_filter import Filter
from outbox.configuration import Configuration
from outbox.keys import Keyring

HOUR = timedelta(hours=1)
WHO: dict[str, Any] = {"actor": "ada", "reason": "the service is back"}


def decided(database: Database, engine: sa.Engine, wanted: Filter, decision: BulkDecision) -> Progress:
    with database.engine.connect() as connection:
        found = preview(connection, TABLES, wanted, decision)
    *_, last = decide(engine, TABLES, decision, found, pause=lambda seconds: None)
    return last


def test_what_another_operator_is_deciding_is_skipped_and_counted(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_LOCK_MS", 50)
    app = outbox.Outbox(Keyring.from_text(SECRET_TEXT), env="test")
    first, *_ = put(postgresql, app, count=3)
    run_once(postgresql, app, adapters={"crm": MemoryAdapter(lambda delivery: Rejected("no"))})
    configuration = Configuration(Keyring.from_text(SECRET_TEXT), env="test")
    decision = BulkDecision(action="again", configuration=configuration, **WHO)
    bounded = postgresql.new_engine(connect_args={"options": "-c statement_timeout=20s"})

    with postgresql.engine.connect() as connection:  # which does not commit for a while
        again(connection, configuration, first, actor="bob", reason="asked")
        done = decided(postgresql, bounded, Filter(states=("failed",)), decision)
        connection.rollback()

    assert done == Progress(2, {LOCKED: 1})
    assert [row.count for row in postgresql.rows(TABLES.audit)] == [2]
    assert decided(postgresql, bounded, Filter(states=("failed",)), decision) == Progress(1, {})
    bounded.dispose()


def test_who_serves_an_operation_is_asked_once_in_a_batch(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=10)
    age(database, HOUR)

    with statements_of(database.engine) as statements:
        done = decided(database, database.engine, Filter(states=("pending",)), BulkDecision(action="cancel", **WHO))

    assert done == Progress(10, {})
    assert sum("waiting_since <=" in statement for statement in statements) == 1
