"""An operator's decision to send an uncertain entry again: under which key, when, and what its answer then proves."""

from datetime import timedelta

import pytest
from support.database import Database
from support.decisions import decide, in_doubt, send_again, uncertain
from support.entries import HOUR, age, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers import FOREVER, KeyConflict, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.errors import DecisionRefused
from dispatchers.time_limits import RetryPolicy, Window
from outbox.keys import derive_tag, encode_native, key_fields

DAY = 24 * HOUR


def later_key(database: Database, ob: outbox.Outbox, epoch: int) -> str:
    entry = database.entries[0]
    fields = key_fields("test", outbox.ParentKey(entry.parent), entry.operation, entry.discriminator)
    return encode_native(derive_tag(ob.configuration.keyring, "k1", fields, epoch))


@pytest.mark.parametrize("window", [DAY, FOREVER])
def test_inside_the_window_it_is_sent_again_under_the_same_key(
    database: Database, ob: outbox.Outbox, window: Window
) -> None:
    id = in_doubt(database, ob)
    doubt = queue_row(database, id).in_doubt_since
    adapter = MemoryAdapter(window=window)

    row = send_again(database, ob, id, adapter)
    assert (row.state, row.key_epoch, row.attempts, row.maybe_sent, row.in_doubt_since) == (
        "pending",
        0,
        0,
        True,
        doubt,
    )
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": adapter})

    assert [delivery.key for delivery in adapter.deliveries] == [ob.child_key("invoice:42", "crm.upsert")]
    assert (state(database, id), settlement_row(database, id).key_epoch) == ("delivered", 0)


@pytest.mark.parametrize(
    ("answer", "window", "aged"),
    [
        (None, DAY, DAY),
        (None, DAY, DAY - timedelta(seconds=70)),  # the fencing delay would outlast what is left of it
        (KeyConflict("other"), FOREVER, timedelta(0)),
        (Unknown("500", final=True), FOREVER, timedelta(0)),
        (None, None, timedelta(0)),
    ],
    ids=["past the window", "nearly past", "another request is stored", "an answer is stored", "no keys"],
)
def test_where_the_same_key_is_worth_nothing_the_next_epoch_is_really_sent(
    database: Database, ob: outbox.Outbox, answer: Outcome | None, window: Window, aged: timedelta
) -> None:
    id = in_doubt(database, ob) if answer is None else uncertain(database, ob, answer, parent="invoice:42")
    age(database, aged)
    adapter = MemoryAdapter(window=window)

    row = send_again(database, ob, id, adapter)
    assert (row.state, row.key_epoch, row.attempts, row.maybe_sent, row.in_doubt_since) == ("pending", 1, 0, True, None)
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": adapter})

    (delivery,) = adapter.deliveries
    assert delivery.key == later_key(database, ob, 1) != ob.child_key("invoice:42", "crm.upsert")
    assert (delivery.attempt, state(database, id), settlement_row(database, id).key_epoch) == (1, "delivered", 1)


def test_the_key_of_epoch_one_is_the_one_in_the_documentation(database: Database) -> None:
    prod = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="prod")
    parent = outbox.ParentKey("8e03978e-40d5-43e8-bc93-6894a57f9324", scope="acct_1", source="http")
    id = put_one(database, prod, "stripe.payment_intents.create", parent=parent)
    adapter = MemoryAdapter([KeyConflict("other")])
    for _ in range(3):
        run_once(database, prod, adapters={"stripe": adapter})
        age(database, HOUR)
        if state(database, id) == "uncertain":
            decide(database, decisions.resolve, id, "send_again")
    age(database, HOUR)
    run_once(database, prod, adapters={"stripe": adapter})

    keys = [delivery.key for delivery in adapter.deliveries]  # docs/keys.md, its first vector and that one's epoch 1
    assert keys == ["ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ", "ck1_0WP0qKVUWerrxcJoC-o5Cw7TIxISsOs3"]


def test_retry_is_refused_while_an_entry_waits_for_an_earlier_sender(database: Database, ob: outbox.Outbox) -> None:
    id = in_doubt(database, ob)
    adapter = MemoryAdapter()
    send_again(database, ob, id, adapter)

    with pytest.raises(DecisionRefused, match="when no earlier send is in flight any more"):
        decide(database, decisions.retry, id)

    assert run_once(database, ob, adapters={"crm": adapter}) == 0
    assert adapter.deliveries == []


def test_its_attempts_and_its_age_are_counted_again(database: Database, ob: outbox.Outbox) -> None:
    id = in_doubt(database, ob)
    adapter = MemoryAdapter([Unknown("no answer")] * 3)
    adapter.retry = RetryPolicy(max_attempts=2, max_age=3 * HOUR)
    age(database, 2 * HOUR)
    send_again(database, ob, id, adapter)

    found = []
    for _ in range(2):
        age(database, 2 * HOUR)
        run_once(database, ob, adapters={"crm": adapter})
        found.append((state(database, id), queue_row(database, id).attempts))

    assert found == [("retry", 1), ("uncertain", 2)]
    assert [delivery.attempt for delivery in adapter.deliveries] == [1, 2]


def test_a_new_epoch_may_go_out_in_another_form(database: Database, ob: outbox.Outbox) -> None:
    same, new = in_doubt(database, ob), uncertain(database, ob, KeyConflict("other"), destination="eu")
    adapter = MemoryAdapter()
    adapter.pinned = "version=2"
    for id in (same, new):
        decide(database, decisions.resolve, id, "send_again")
    assert run_once(database, ob, adapters={"crm": adapter}) == 2
    age(database, HOUR)

    assert run_once(database, ob, adapters={"crm": adapter}) == 1

    assert [delivery.id for delivery in adapter.deliveries] == [new]
    assert (state(database, same), queue_row(database, same).sent_as) == ("retry", "native")
