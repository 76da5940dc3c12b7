"""Status lookups for what may have been executed: each way out of doubt, on a real database."""

import asyncio
import json
import logging
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import (
    HOUR,
    LEASE,
    age,
    change,
    put_one,
    queue_row,
    run_once,
    settlement_row,
    state,
)
from support.lookups import DAY, QUIET, Losing, decide_on, events, keyless, look_up, sent_and_looked_up

import outbox
from dispatchers import Absent, CannotTell, Delivery, Found, KeyConflict, Operations, Rejected, Unknown
from dispatchers.admin.decide import decisions
from dispatchers.stored_outcome import read_outcome
from dispatchers.time_limits import RetryPolicy
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb


# --- each way out


def test_what_is_found_is_delivered_and_never_sent_again(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer")

    id = sent_and_looked_up(database, ob, adapter)

    settled = settlement_row(database, id)
    assert (settled.state, settled.attempts, settled.reason) == ("delivered", 1, "found at the service")
    assert json.loads(settled.result) == {"id": str(id)}
    assert adapter.effects.total() == len(adapter.deliveries) == 1
    assert events(database, id) == [
        ("attempt", "no answer; the service keeps no keys"),
        ("lookup", "found at the service"),
    ]


def test_what_is_absent_is_sent_again_once(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("request")

    id = sent_and_looked_up(database, ob, adapter)
    waits = queue_row(database, id)
    run_once(database, ob, adapters={"crm": adapter})

    assert (waits.state, waits.maybe_sent, waits.in_doubt_since, waits.attempts) == ("pending", False, None, 1)
    assert waits.first_leased_at is not None  # its age continues to count
    assert (state(database, id), adapter.effects.total()) == ("delivered", 1)
    assert events(database, id)[1] == ("lookup", "not at the service: it will be sent again, under the same key")


def test_past_the_window_what_is_absent_is_sent_again_under_a_new_key(database: Database, ob: outbox.Outbox) -> None:
    adapter = Losing("request", window=DAY)
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter})
    age(database, DAY)

    for _ in range(3):  # the window is found to have passed; the status lookup; the send
        look_up(database, ob, adapter)

    settled = settlement_row(database, id)
    assert (settled.state, settled.attempts, settled.key_epoch) == ("delivered", 2, 1)
    assert adapter.effects.total() == 1
    assert list(adapter.effects) != [ob.child_key("order:0", "crm.upsert")]


def test_an_inconclusive_lookup_leaves_it_uncertain_and_is_made_again(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=[CannotTell("unreachable"), CannotTell("unreachable"), Found({"id": 7})])

    id = sent_and_looked_up(database, ob, adapter)
    first = queue_row(database, id)
    look_up(database, ob, adapter)
    second = queue_row(database, id)
    look_up(database, ob, adapter, HOUR)

    why = "no answer; the service keeps no keys; status lookup inconclusive: unreachable"
    assert first.state == second.state == "uncertain"
    assert json.loads(first.outcome)["reason"] == json.loads(second.outcome)["reason"] == why
    assert timedelta(minutes=1) <= second.due_at - second.first_leased_at - 2 * QUIET  # later and later
    assert (state(database, id), json.loads(settlement_row(database, id).result)) == ("delivered", {"id": 7})
    assert [kind for kind, _ in events(database, id)] == ["attempt", "lookup", "lookup", "lookup"]
    assert len(adapter.deliveries) == 1


async def hang(delivery: Delivery) -> Found:
    await asyncio.Event().wait()
    return Found()


@pytest.mark.parametrize(
    ("finds", "shown"),
    [
        ([KeyError("secret")], "the adapter raised KeyError"),
        ([None], "the adapter answered with None: is its `return` missing?"),
        (hang, "no answer within 0.1 s"),
    ],
    ids=["raises", "None", "hangs"],
)
def test_a_find_that_fails_is_inconclusive(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, finds: Any, shown: str
) -> None:
    adapter = keyless("answer", finds=finds, timeout=timedelta(seconds=0.1))

    with caplog.at_level(logging.ERROR, "outbox.dispatcher"):
        id = sent_and_looked_up(database, ob, adapter)

    assert state(database, id) == "uncertain"
    assert events(database, id)[1][1] == f"no answer; the service keeps no keys; status lookup inconclusive: {shown}"
    assert ("raised for entry" in caplog.text) == ("raised" in shown)


def test_at_least_once_is_sent_again_only_if_a_lookup_says_so(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=[CannotTell("down"), Absent()])
    adapter.at_least_once = True

    id = sent_and_looked_up(database, ob, adapter)
    first = state(database, id), len(adapter.deliveries)
    look_up(database, ob, adapter, HOUR)
    run_once(database, ob, adapters={"crm": adapter})

    assert first == ("uncertain", 1)
    assert (state(database, id), len(adapter.deliveries)) == ("delivered", 2)


def test_a_lookup_is_given_the_delivery_of_the_attempts_before_it(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=[CannotTell("down")])
    id = put_one(database, ob, options={"account": "a"})
    run_once(database, ob, adapters={"crm": adapter})

    look_up(database, ob, adapter, HOUR)

    (sent,), (by_lookup,) = adapter.deliveries, adapter.lookup
    assert (by_lookup.id, by_lookup.key, by_lookup.payload_json, by_lookup.options) == (
        id,
        sent.key,
        sent.payload_json,
        sent.options,
    )
    assert by_lookup.attempt == sent.attempt == 1
    assert by_lookup.due_at == database.entries[0].due_at == sent.due_at - HOUR  # as `look` has aged it
    assert HOUR <= by_lookup.age < HOUR + QUIET


# --- when a lookup counts


def test_an_early_look_is_no_proof_of_absence(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("request", finds=[Absent(), Absent()])
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter})

    decide_on(database, id, decisions.retry)  # now
    run_once(database, ob, adapters={"crm": adapter})
    early = queue_row(database, id)
    look_up(database, ob, adapter)

    assert (early.state, early.maybe_sent, len(adapter.lookup)) == ("retry", True, 2)
    assert "an earlier send may still be in flight" in json.loads(early.outcome)["reason"]
    assert state(database, id) == "pending"


def test_lookups_end_by_age(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=[CannotTell("down")] * 2)
    id = sent_and_looked_up(database, ob, adapter)

    look_up(database, ob, adapter, adapter.retry.max_age)
    last = queue_row(database, id)
    look_up(database, ob, adapter, DAY)  # nor does reconciling begin again

    assert (last.state, last.due_at) == ("uncertain", NEVER)
    assert queue_row(database, id).due_at == NEVER


@pytest.mark.parametrize("limit", ["attempts", "age"])
def test_what_is_absent_at_a_limit_is_failed(database: Database, ob: outbox.Outbox, limit: str) -> None:
    adapter = keyless("request")
    if limit == "attempts":
        adapter.retry = RetryPolicy(max_attempts=1)
    else:
        adapter.retry = RetryPolicy(max_age=QUIET)

    id = sent_and_looked_up(database, ob, adapter)

    limited = "the limit of 1 attempts is reached" if limit == "attempts" else "the age limit of 0:02:00 is reached"
    assert (state(database, id), len(adapter.deliveries)) == ("failed", 0)
    assert settlement_row(database, id).reason == f"not at the service, and {limited}"
    assert events(database, id)[1] == ("lookup", f"not at the service, and {limited}")


def test_absence_under_a_new_key_is_no_proof_for_the_old_one(database: Database, ob: outbox.Outbox) -> None:
    """A find may search for the present key only."""
    adapter = keyless("answer", "request", finds=[CannotTell("down"), Absent()])
    adapter.retry = RetryPolicy(max_attempts=2)
    id = sent_and_looked_up(database, ob, adapter)
    decide_on(database, id, decisions.resolve, "send_again")
    run_once(database, ob, adapters={"crm": adapter})
    look_up(database, ob, adapter)

    look_up(database, ob, adapter, HOUR)
    again = queue_row(database, id)

    assert (again.key_epoch, again.state, again.maybe_sent, again.in_doubt_since) == (1, "pending", True, None)


def test_an_answer_that_the_service_has_stored_needs_a_new_key(database: Database, ob: outbox.Outbox) -> None:
    adapter = Losing(Unknown("500", final=True), finds=[Absent()], window=DAY)

    id = sent_and_looked_up(database, ob, adapter)

    row = queue_row(database, id)
    assert (row.state, row.key_epoch, row.maybe_sent) == ("pending", 1, False)


def test_a_key_that_the_service_has_for_another_request_is_never_looked_up(
    database: Database, ob: outbox.Outbox
) -> None:
    """A status lookup finds the other request's effect, and its absence proves nothing of this request."""
    adapter = Losing(KeyConflict("other parameters"), finds=[Found(), Absent()], window=DAY)
    id = put_one(database, ob)

    for _ in range(4):
        run_once(database, ob, adapters={"crm": adapter})
        age(database, QUIET)

    row = queue_row(database, id)
    assert (row.state, row.key_epoch, row.due_at) == ("uncertain", 0, NEVER)
    assert len(adapter.finds) == 2


def test_within_the_window_the_same_key_is_good_enough(database: Database, ob: outbox.Outbox) -> None:
    adapter = Losing("request", Rejected("no such customer"), finds=[Absent()], window=DAY)
    id = put_one(database, ob)
    for _ in range(2):
        run_once(database, ob, adapters={"crm": adapter})
        age(database, QUIET)

    look_up(database, ob, adapter)

    row = queue_row(database, id)
    assert (row.state, row.key_epoch, row.maybe_sent) == ("pending", 0, False)


# --- what became uncertain when no adapter could look it up


def test_what_became_uncertain_without_a_find_is_looked_up_with_one(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=None)
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter})
    before = queue_row(database, id)
    adapter.find = adapter._in_the_books

    run_once(database, ob, adapters={"crm": adapter})  # begins it
    begun = queue_row(database, id)
    look_up(database, ob, adapter)

    assert (before.state, before.due_at, begun.state) == ("uncertain", NEVER, "uncertain")
    assert begun.due_at - begun.first_leased_at > LEASE
    assert (state(database, id), adapter.effects.total()) == ("delivered", 1)


@pytest.mark.parametrize("spared", ["suspended", "decided", "of another form", "not served"])
def test_some_entries_are_not_looked_up(database: Database, ob: outbox.Outbox, spared: str) -> None:
    adapter = keyless("answer", finds=None)
    id = put_one(database, ob, "crm.other" if spared == "not served" else "crm.upsert")
    run_once(database, ob, adapters={"crm": adapter})
    if spared == "suspended":
        change(database, id, suspended_reason="by decision")
    elif spared == "of another form":
        change(database, id, sent_as="uuid8 acct_2")
    elif spared == "decided":
        decide_on(database, id, decisions.resolve, "did_not_happen")
        change(database, id, due_at=NEVER)
    watching = keyless(finds=[Found()])

    serving = {"crm.upsert" if spared == "not served" else "crm": watching}
    for _ in range(2):
        run_once(database, ob, adapters=serving)
        age(database, QUIET)

    assert read_outcome(queue_row(database, id).outcome).lookup is None
    assert (state(database, id), watching.lookup) == ("uncertain", [])


def test_nothing_is_looked_up_under_another_account(database: Database, ob: outbox.Outbox) -> None:
    """It would not be there, and that would be taken for proof."""
    adapter = keyless("answer", finds=[Absent()])
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter})
    adapter.pinned = "acct_2"

    look_up(database, ob, adapter)
    waits = queue_row(database, id)
    look_up(database, ob, adapter, adapter.retry.max_age)

    assert (waits.state, adapter.lookup) == ("retry", [])
    assert (queue_row(database, id).state, queue_row(database, id).due_at) == ("uncertain", NEVER)
    assert "would be looked up as 'native acct_2'" in json.loads(queue_row(database, id).outcome)["reason"]


def test_an_adapter_that_lost_its_find_leaves_it_to_an_operator(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer")
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter})

    adapter.find = None
    look_up(database, ob, adapter)

    assert (state(database, id), len(adapter.deliveries)) == ("uncertain", 1)


def test_a_released_entry_is_looked_up_at_once(database: Database, ob: outbox.Outbox) -> None:
    adapter = keyless("answer", finds=[CannotTell("down"), Found()])
    id = sent_and_looked_up(database, ob, adapter)
    change(database, id, suspended_reason="by decision", due_at=NEVER)

    decide_on(database, id, decisions.release)
    run_once(database, ob, adapters={"crm": adapter})

    assert state(database, id) == "delivered"


# --- callbacks


def test_callbacks_hear_of_it_once(database: Database, ob: outbox.Outbox) -> None:
    heard: list[tuple[str, str | None]] = []
    effects = Operations()
    effects.on_uncertain("crm")(lambda session, settlement: heard.append((settlement.state, settlement.reason)))
    effects.on_settled("crm")(lambda session, settlement: heard.append((settlement.state, settlement.reason)))
    adapter = keyless("answer", finds=[CannotTell("down"), CannotTell("down"), Found()])

    sent_and_looked_up(database, ob, adapter, include=[effects])
    for _ in range(2):
        look_up(database, ob, adapter, HOUR, include=[effects])

    why = "no answer; the service keeps no keys; status lookup inconclusive: down"
    assert heard == [("uncertain", why), ("delivered", "found at the service")]
