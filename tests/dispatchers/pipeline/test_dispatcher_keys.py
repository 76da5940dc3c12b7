"""The key of every send: the same in each process, of one epoch, never used after its window, and of one content."""

from typing import Any

import pytest
import sqlalchemy as sa
from support.database import CHARGE, TABLES, Database
from support.entries import (
    HOUR,
    age,
    change,
    claim,
    put,
    put_one,
    queue_row,
    reasons,
    run_once,
    settlement_row,
    state,
    states,
)

import outbox
from dispatchers import Deferred, Delivered, Unknown
from dispatchers.adapters import MemoryAdapter, StripeAdapter
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue.claim_request import Forms
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import running_stripe

pytestmark = pytest.mark.sends_hints

DAY = 24 * HOUR
SECRET = bytes(range(32))
SLOW = Unknown("no answer")


def test_the_key_is_the_same_in_every_process_even_after_a_rotation(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, parent="invoice:42")
    rotated = outbox.Outbox(outbox.Keyring({"k1": SECRET, "k2": SECRET[::-1]}, current="k2"), env="test")
    adapter = MemoryAdapter([SLOW, SLOW])

    for process in (ob, rotated, rotated):
        run_once(database, process, adapters={"crm": adapter})
        age(database, HOUR)

    assert [delivery.key for delivery in adapter.deliveries] == [ob.child_key("invoice:42", "crm.upsert")] * 3
    assert states(database) == {"delivered": 1}


def test_a_later_key_epoch_has_a_key_of_its_own(database: Database) -> None:
    # The first vector of docs/keys, and its epoch 1.
    prod = outbox.Outbox(outbox.Keyring({"k1": SECRET}, current="k1"), env="prod")
    parent = outbox.ParentKey("8e03978e-40d5-43e8-bc93-6894a57f9324", scope="acct_1", source="http")
    id = put_one(database, prod, CHARGE, parent=parent)
    adapter = MemoryAdapter([SLOW])

    run_once(database, prod, adapters={"stripe": adapter})
    age(database, HOUR)
    change(database, id, key_epoch=1, maybe_sent=False, in_doubt_since=None)
    run_once(database, prod, adapters={"stripe": adapter})

    keys = [delivery.key for delivery in adapter.deliveries]
    assert keys == ["ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ", "ck1_0WP0qKVUWerrxcJoC-o5Cw7TIxISsOs3"]
    assert settlement_row(database, id).key_epoch == 1


def test_an_epoch_whose_secret_is_not_here_is_not_sent_and_not_counted(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    change(database, id, key_epoch=1)
    other = outbox.Keyring({"k2": SECRET}, current="k2")
    adapter = MemoryAdapter()

    run_once(database, ob, keyring=other, adapters={"crm": adapter})

    row = queue_row(database, id)
    assert adapter.deliveries == []
    assert (row.state, row.attempts, row.maybe_sent) == ("retry", 0, False)


def crash(database: Database, ob: outbox.Outbox, form: str = "native") -> None:
    """A sender claims everything and is never heard of again."""
    claim(DatabaseStore(database.engine, ob.configuration), forms=Forms({"crm": form}))


def test_a_key_past_its_window_is_never_sent_again(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    adapter = MemoryAdapter([SLOW, SLOW, SLOW], window=DAY)
    for aged in (20 * HOUR, 3 * HOUR, 2 * HOUR):
        run_once(database, ob, adapters={"crm": adapter})
        age(database, aged)

    assert run_once(database, ob, adapters={"crm": adapter}) == 1

    assert [delivery.attempt for delivery in adapter.deliveries] == [1, 2, 3]
    assert (state(database, id), queue_row(database, id).attempts) == ("uncertain", 3)
    age(database, DAY)
    assert run_once(database, ob, adapters={"crm": adapter}) == 0


@pytest.mark.parametrize("at_least_once", [False, True])
def test_without_keys_only_who_asked_for_it_sends_again(
    database: Database, ob: outbox.Outbox, at_least_once: bool
) -> None:
    crashed = put_one(database, ob)
    crash(database, ob)
    age(database, HOUR)
    unanswered = put_one(database, ob)
    adapter = MemoryAdapter(
        lambda delivery: SLOW if delivery.id == unanswered and delivery.attempt == 1 else Delivered()
    )
    adapter.window, adapter.at_least_once = None, at_least_once

    for _ in range(2):
        run_once(database, ob, adapters={"crm": adapter})
        age(database, HOUR)

    expected = "delivered" if at_least_once else "uncertain"
    assert (state(database, crashed), state(database, unanswered)) == (expected, expected)
    assert len(adapter.deliveries) == (3 if at_least_once else 1)


def test_an_adapter_pinned_otherwise_sends_only_what_was_never_sent(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = MemoryAdapter(), MemoryAdapter()
    old.pinned, new.pinned = "version=1", "version=2"
    doubtful = put_one(database, ob)
    crash(database, ob, "native version=1")
    age(database, HOUR)
    clean = put_one(database, ob)

    assert run_once(database, ob, adapters={"crm": new}) == 1

    assert [delivery.id for delivery in new.deliveries] == [clean]
    assert (state(database, doubtful), queue_row(database, doubtful).sent_as) == ("retry", "native version=1")
    assert f"entry {doubtful} (crm.upsert) waits: it was sent as 'native version=1'" in caplog.text
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": old}) == 1
    assert [delivery.id for delivery in old.deliveries] == [doubtful]


def test_an_entry_ages_from_its_first_attempt_unless_no_dispatcher_works(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    adapter = MemoryAdapter([Deferred("busy")] * 2)
    age(database, 10 * DAY)  # the dispatcher was switched off

    run_once(database, ob, adapters={"crm": adapter})
    assert state(database, id) == "retry"
    age(database, 10 * DAY)
    run_once(database, ob, adapters={"crm": adapter})

    assert state(database, id) == "failed"
    assert "busy" in settlement_row(database, id).reason


# --- the service knows better


def test_a_lost_row_enqueued_again_with_other_content_meets_its_old_key(database: Database, ob: outbox.Outbox) -> None:
    with running_stripe() as stripe:
        adapter = StripeAdapter(api_key=API_KEY, base_url=stripe.url)
        put(database, ob, CHARGE, parent="invoice:42", payload=charge(2000))
        run_once(database, ob, adapters={"stripe": adapter})
        for table in (TABLES.entry, TABLES.queue, TABLES.settlement):
            database.execute(sa.delete(table))  # as a restore from last night's backup would

        id = put_one(database, ob, CHARGE, parent="invoice:42", payload=charge(3000))
        assert run_once(database, ob, adapters={"stripe": adapter}) == 1

        assert [effect.amount for effect in stripe.ledger.charges] == [2000]
    assert state(database, id) == "uncertain"
    assert "holds this key for another request" in (reasons(database, id)[0] or "")


def test_a_lost_row_enqueued_again_is_delivered_without_a_second_charge(database: Database, ob: outbox.Outbox) -> None:
    with running_stripe() as stripe:
        adapter = StripeAdapter(api_key=API_KEY, base_url=stripe.url)
        for _ in range(2):
            for table in (TABLES.entry, TABLES.queue, TABLES.settlement):
                database.execute(sa.delete(table))
            put(database, ob, CHARGE, parent="invoice:42", payload=charge(2000))
            run_once(database, ob, adapters={"stripe": adapter})

        assert len(stripe.ledger.charges) == 1
    assert states(database) == {"delivered": 1}
    assert adapter.replays == 1


def charge(amount: int) -> dict[str, Any]:
    return {"amount": amount, "currency": "eur", "payment_method": "pm_card_visa", "confirm": True}
