"""Decisions that depend on what the service remembers: the same key, a new key, another status lookup."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from support.dashboard import put_heartbeat
from support.database import TABLES, Database
from support.entries import HOUR, age, change, put_one, queue_row, run_once, state

import outbox
from dispatchers import Absent, CannotTell, Delivered, Delivery, Found, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.uncertain import look_up, send_again
from dispatchers.errors import DecisionRefused
from outbox.errors import InvalidValue

DAY = timedelta(days=1)


def put_in_doubt(database: Database, ob: outbox.Outbox, *, since: timedelta = HOUR) -> UUID:
    """An entry that its only attempt, so long ago, left uncertain; and a live dispatcher that serves it."""
    id = put_one(database, ob, "crm.upsert")
    lost = MemoryAdapter(lambda delivery: Unknown("no answer", final=False), window=None)
    run_once(database, ob, adapters={"crm": lost})
    age(database, since)
    put_heartbeat(database, "crm")
    assert state(database, id) == "uncertain"
    row = queue_row(database, id)
    change(database, id, outcome='{"reason": "no answer"}', in_doubt_since=row.in_doubt_since)
    return id


def decide(database: Database, function: Any, *arguments: Any, reason: str = "asked them") -> None:
    with database.engine.begin() as connection:
        function(connection, TABLES, *arguments, actor="ada", reason=reason)


def sent_keys(database: Database, ob: outbox.Outbox, *, window: Any = DAY) -> list[str]:
    """The keys under which a dispatcher sends now, once no earlier sender can be running."""
    keys: list[str] = []

    def send(delivery: Delivery) -> Delivered:
        keys.append(delivery.key)
        return Delivered()

    service = MemoryAdapter(send, window=window)
    run_once(database, ob, adapters={"crm": service})
    age(database, timedelta(minutes=2))
    run_once(database, ob, adapters={"crm": service})
    return keys


def test_within_the_window_it_is_sent_again_under_the_same_key(database: Database, ob: outbox.Outbox) -> None:
    id = put_in_doubt(database, ob)
    key = ob.child_key("order:0", "crm.upsert")

    decide(database, send_again, id, "same")

    assert sent_keys(database, ob) == [key]
    assert state(database, id) == "delivered"


def test_after_the_window_it_is_sent_again_under_a_new_key(database: Database, ob: outbox.Outbox) -> None:
    id = put_in_doubt(database, ob, since=2 * DAY)
    key = ob.child_key("order:0", "crm.upsert")

    decide(database, send_again, id, "new")

    (sent,) = sent_keys(database, ob)
    assert sent != key
    assert state(database, id) == "delivered"


@pytest.mark.parametrize(
    ("since", "key", "why"),
    [(HOUR, "new", "the service still remembers its key"), (2 * DAY, "same", "may have forgotten the key")],
)
def test_the_key_that_is_not_safe_now_is_refused(
    database: Database, ob: outbox.Outbox, since: timedelta, key: Any, why: str
) -> None:
    id = put_in_doubt(database, ob, since=since)
    before = queue_row(database, id)

    with pytest.raises(DecisionRefused, match=why):
        decide(database, send_again, id, key)

    assert queue_row(database, id) == before


def test_without_a_live_dispatcher_only_a_decision_by_hand_is_safe(database: Database, ob: outbox.Outbox) -> None:
    id = put_in_doubt(database, ob)
    database.execute(TABLES.dispatcher.delete())

    for function, arguments in ((send_again, (id, "same")), (send_again, (id, "new")), (look_up, (id,))):
        with pytest.raises(DecisionRefused, match="no live dispatcher serves this operation"):
            decide(database, function, *arguments)


def test_a_window_that_closes_before_the_claim_leaves_it_uncertain(database: Database, ob: outbox.Outbox) -> None:
    """The operator allowed the same key only: a new one might make it happen twice."""
    id = put_in_doubt(database, ob)
    decide(database, send_again, id, "same")
    age(database, 2 * DAY)

    assert sent_keys(database, ob) == []

    row = queue_row(database, id)
    assert (row.state, row.key_epoch) == ("uncertain", 0)
    assert "the service may have forgotten its key since; decide again" in row.outcome


def test_a_longer_window_than_declared_leaves_a_new_key_unused(database: Database, ob: outbox.Outbox) -> None:
    id = put_in_doubt(database, ob, since=2 * DAY)
    decide(database, send_again, id, "new")

    assert sent_keys(database, ob, window=7 * DAY) == []
    assert "the service still remembers its key; decide again" in queue_row(database, id).outcome


@pytest.mark.parametrize(
    ("finding", "ends"), [(Found({"id": "c_1"}), "delivered"), (CannotTell("down"), "uncertain"), (Absent(), "retry")]
)
def test_it_is_looked_up_again_at_once(database: Database, ob: outbox.Outbox, finding: Any, ends: str) -> None:
    """Absence proves nothing yet: an earlier send may be in flight, so it is looked up once more."""
    id = put_in_doubt(database, ob)
    decide(database, look_up, id)

    run_once(database, ob, adapters={"crm": MemoryAdapter(window=DAY, find=lambda delivery: finding)})

    assert state(database, id) == ("uncertain" if ends == "retry" else ends)
    kinds = [row.kind for row in database.rows(TABLES.event) if row.entry_id == id]
    assert kinds == ["attempt", "decision", "lookup"]


def test_a_decision_needs_a_reason_and_is_in_the_audit_log(database: Database, ob: outbox.Outbox) -> None:
    id = put_in_doubt(database, ob)

    for function, arguments in ((send_again, (id, "same")), (look_up, (id,))):
        with pytest.raises(InvalidValue, match="must say why"):
            decide(database, function, *arguments, reason=" ")
    decide(database, look_up, id)

    (row,) = database.rows(TABLES.audit)
    assert (row.actor, row.action, row.target, row.reason) == ("ada", "look_up", str(id), "asked them")
