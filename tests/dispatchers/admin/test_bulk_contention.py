"""Decisions in bulk beside other transactions: a lock that is not released costs the entries that it concerns, and no others."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT
from support.database import TABLES, Database, statements_of
from support.entries import age, change, put, run_once

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import bulk
from dispatchers.admin.decide.again import again
from dispatchers.admin.decide.bulk import LOCKED, BulkDecision, Progress, decide, preview
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.stored_outcome import StoredOutcome, read_outcome, write_outcome
from outbox.configuration import Configuration
from outbox.keys import Keyring
from outbox.sql.clock import clock, later
from outbox.times import NEVER

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


DECISIONS = {
    "cancel, by a dispatcher": (Filter(states=("pending",)), BulkDecision(action="cancel", **WHO)),
    "cancel, at once": (Filter(states=("pending",)), BulkDecision(action="cancel", **WHO)),
    "retry": (Filter(states=("pending",)), BulkDecision(action="retry", **WHO)),
    "resolve": (Filter(states=("uncertain",)), BulkDecision(action="resolve", verdict="happened", **WHO)),
    "release": (Filter(states=("pending",)), BulkDecision(action="release", **WHO)),
}


@pytest.mark.parametrize("kind", DECISIONS)
def test_a_batch_costs_as_many_statements_as_one_entry(database: Database, ob: outbox.Outbox, kind: str) -> None:
    """Entries of one state: a few statements for each batch of at most `MAX_BATCH_ENTRIES`, however many entries it has."""
    wanted, decision = DECISIONS[kind]
    sent: dict[int, int] = {}
    for count in (1, 30, 1000):
        prepare(database, kind, put(database, ob, count=count))
        with statements_of(database.engine) as statements:
            done = decided(database, database.engine, wanted, decision)
        assert done == Progress(count, {})
        changing = [each for each in statements if not each.startswith(("BEGIN", "COMMIT"))]
        sent[count] = len(changing)
        database.execute(sa.delete(TABLES.queue))

    assert sent[30] == sent[1] < 30
    assert sent[1000] <= 10 * sent[1]


def prepare(database: Database, kind: str, ids: list[Any]) -> None:
    """Bring what was enqueued into the state that the decision is about."""
    changes: dict[str, dict[str, Any]] = {
        "resolve": {"state": "uncertain", "maybe_sent": True, "due_at": NEVER, "deliveries": 1, "attempts": 1},
        "release": {"suspended_reason": "a poison message"},
        "retry": {"due_at": later(clock(), HOUR)},
    }
    if kind == "cancel, at once":
        age(database, HOUR)
        unserved = StoredOutcome().with_unserved_reason("no adapter serves it")
        database.execute(sa.update(TABLES.queue).values(outcome=unserved))
    elif kind in changes:
        database.execute(sa.update(TABLES.queue).values(**changes[kind]))


@pytest.mark.parametrize("kind", ["cancel, by a dispatcher", "resolve"])
def test_entries_with_different_histories_are_decided_by_one_statement(
    database: Database, ob: outbox.Outbox, kind: str
) -> None:
    """What was stored of each is kept."""
    ids = put(database, ob, count=20)
    prepare(database, kind, ids)
    stored = {id: number % 2 == 1 for number, id in enumerate(ids)}
    for id in ids:
        change(database, id, outcome=write_outcome("x", stored=stored[id]))
    wanted, decision = DECISIONS[kind]

    with statements_of(database.engine) as statements:
        assert decided(database, database.engine, wanted, decision) == Progress(20, {})

    assert sum(each.startswith("UPDATE outbox_queue") for each in statements) == 1
    outcomes = {row.id: read_outcome(row.outcome) for row in database.rows(TABLES.queue)}
    assert {id: outcome.stored for id, outcome in outcomes.items()} == stored
    assert {row.known for row in database.rows(TABLES.queue)} == {"crm"}
