"""An operator's decision at the same time as another one, or as a claim."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from support.daemons import wait_for
from support.database import TABLES, Database
from support.decisions import decide, history, uncertain
from support.entries import claim, put_one, queue_row, run_once, state

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.errors import DecisionRefused
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome


def waiting_for_a_lock(database: Database) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.new_engine().connect() as connection:
        return connection.scalar(sa.text(query)) or 0


def test_of_two_who_decide_at_once_the_second_sees_what_the_first_did(postgresql: Database, ob: outbox.Outbox) -> None:
    id = uncertain(postgresql, ob)
    first = postgresql.engine.connect()
    first.begin()
    decisions.resolve(first, TABLES, id, "did_not_happen", actor="bob", reason="not in the list")

    second = threading.Thread(target=decide, args=(postgresql, decisions.resolve, id, "happened"))
    second.start()
    wait_for(lambda: not second.is_alive() or waiting_for_a_lock(postgresql), "the second to meet the first's lock")
    first.commit()
    first.close()
    second.join()

    assert read_outcome(queue_row(postgresql, id).outcome).known.state == "delivered"  # type: ignore[union-attr]
    assert [reason for kind, _, reason in history(postgresql, id) if kind == "decision"] == [
        "did_not_happen: not in the list",
        "happened: looked at it",
    ]


def test_a_claim_passes_over_what_an_operator_is_deciding(postgresql: Database, ob: outbox.Outbox) -> None:
    deciding, other = put_one(postgresql, ob), put_one(postgresql, ob)
    adapter = MemoryAdapter()

    with postgresql.engine.begin() as connection:
        decisions.cancel(connection, TABLES, deciding, actor="ada", reason="asked")
        assert run_once(postgresql.new_engine(), ob, adapters={"crm": adapter}) == 1
    assert run_once(postgresql, ob, adapters={"crm": adapter}) == 1

    assert [delivery.id for delivery in adapter.deliveries] == [other]
    assert state(postgresql, deciding) == "cancelled"


def test_a_decision_never_lands_on_an_entry_that_was_claimed_meanwhile(
    sqlite: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = put_one(sqlite, ob)
    store = DatabaseStore(sqlite.engine, ob.configuration)
    refresh = decisions._require

    def look_and_be_late(*arguments: Any) -> None:
        refresh(*arguments)
        claim(store)  # between the look and the write: SQLite, unprepared, has no lock on what was only read

    monkeypatch.setattr(decisions, "_require", look_and_be_late)
    with (
        pytest.raises(DecisionRefused, match="has just changed: show it again"),
        sqlite.unprepared_engine().begin() as connection,
    ):
        decisions.cancel(connection, TABLES, id, actor="ada", reason="asked")

    assert (state(sqlite, id), queue_row(sqlite, id).outcome) == ("sending", None)
