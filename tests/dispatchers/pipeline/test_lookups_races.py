"""Status lookups beside other actions on the same entry, and lookups whose process dies."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.database import Database
from support.entries import (
    HOUR,
    age,
    claim_one,
    put_one,
    queue_row,
    run_once,
    settle,
    settlement_row,
    state,
)
from support.lookups import QUIET, awaiting_lookup, decide_on, keyless, look_up

import outbox
from dispatchers import Absent, CannotTell, Delivery, Found
from dispatchers.admin.decide import decisions
from dispatchers.decide_lookup import MAX_CRASHES
from dispatchers.errors import DecisionRefused
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox.times import NEVER


@pytest.fixture
def store(database: Database, ob: outbox.Outbox) -> DatabaseStore:
    return DatabaseStore(database.engine, ob.configuration)


def during_a_lookup(act: Callable[[], Any], finding: Any) -> Callable[[Delivery], Any]:
    """A sync find, on a thread of its own, in whose midst something else happens."""

    def find(delivery: Delivery) -> Any:
        act()
        return finding

    return find


@pytest.mark.parametrize("finding", [Absent(), CannotTell("down"), Found({"by": "the look"})], ids=repr)
def test_late_proof_of_success_during_a_lookup_counts(
    database: Database, ob: outbox.Outbox, store: DatabaseStore, finding: Any
) -> None:
    id = put_one(database, ob)
    slow_sender = claim_one(store)
    adapter = keyless()
    age(database, QUIET)
    run_once(database, ob, adapters={"crm": adapter})
    adapter.find = during_a_lookup(
        lambda: settle(store, (slow_sender, Settle("delivered", 1, result={"by": "the sender"}))), finding
    )

    look_up(database, ob, adapter)
    look_up(database, ob, adapter)

    assert (state(database, id), adapter.deliveries) == ("delivered", [])
    assert json.loads(settlement_row(database, id).result) == {"by": "the sender"}


def test_an_operator_waits_for_a_lookup_to_end(database: Database, ob: outbox.Outbox, store: DatabaseStore) -> None:
    id, adapter = awaiting_lookup(database, ob, finds=[CannotTell("down")])
    look_up(database, ob, adapter)
    refusals: list[str] = []

    def say() -> None:
        with pytest.raises(DecisionRefused) as refused:
            decide_on(database, id, decisions.resolve, "did_not_happen")
        refusals.append(str(refused.value))

    adapter.find = during_a_lookup(say, CannotTell("down"))
    look_up(database, ob, adapter, HOUR)

    assert refusals == [f"entry {id} is sending: a send or a status lookup is in flight; try again when it has ended"]
    decide_on(database, id, decisions.resolve, "did_not_happen")
    run_once(database, ob, adapters={"crm": adapter})
    assert state(database, id) == "failed"


def test_an_operators_decision_before_a_lookup_is_what_counts(
    database: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    id, adapter = awaiting_lookup(database, ob, finds=[CannotTell("down"), Absent()])
    run_once(database, ob, adapters={"crm": adapter})

    decide_on(database, id, decisions.resolve, "happened")
    look_up(database, ob, adapter, HOUR)

    assert (state(database, id), len(adapter.lookup)) == ("delivered", 1)


def test_a_lookup_that_lost_its_lease_changes_nothing(
    database: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    """Its process was stopped for long; another one has looked since, and found it.

    The first has no second permit: it would claim the entry itself as soon as the lease is over.
    """
    id, adapter = awaiting_lookup(database, ob, finds=[Found({"by": "another"})])
    stopped = keyless()

    def be_stopped() -> None:
        age(database, QUIET)
        run_once(database, ob, adapters={"crm": adapter})

    stopped.find = during_a_lookup(be_stopped, Absent())
    run_once(database, ob, adapters={"crm": stopped}, concurrency=1)

    assert (state(database, id), stopped.deliveries) == ("delivered", [])
    assert json.loads(settlement_row(database, id).result) == {"by": "another"}


# --- crashes


def test_a_lookup_whose_process_crashed_is_made_again(
    database: Database, ob: outbox.Outbox, store: DatabaseStore
) -> None:
    id, adapter = awaiting_lookup(database, ob)
    claim_one(store)
    age(database, QUIET)

    run_once(database, ob, adapters={"crm": adapter})

    assert (state(database, id), len(adapter.deliveries)) == ("delivered", 1)


def test_lookups_that_kill_their_process_end(database: Database, ob: outbox.Outbox, store: DatabaseStore) -> None:
    id, adapter = awaiting_lookup(database, ob, finds=[])
    for _ in range(MAX_CRASHES):
        claim_one(store)
        age(database, QUIET)

    run_once(database, ob, adapters={"crm": adapter})

    row = queue_row(database, id)
    assert (row.state, row.due_at, row.attempts) == ("uncertain", NEVER, 1)
    assert json.loads(row.outcome)["reason"].endswith("3 consecutive status lookups crashed with their process")
