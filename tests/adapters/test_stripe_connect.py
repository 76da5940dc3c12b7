"""One Stripe account that refuses us stops no other: each has a destination of its own, or waits by itself in a shared one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.cli_runner import document, succeeded
from support.database import CHARGE, PAYLOAD, TABLES, Database
from support.entries import put, run_once, states

import outbox
from dispatchers import Breaker, Deferred, Delivered, Delivery, Limits, Outcome
from dispatchers.adapters import MemoryAdapter, StripeAdapter
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import RunningStripe, running_stripe

BAD, GOOD = {"account": "acct_bad"}, {"account": "acct_good"}
REFUSED, SERVED = 30, 5


@pytest.fixture
def stripe() -> Iterator[RunningStripe]:
    with running_stripe() as running:
        running.fake.revoked.add("acct_bad")
        yield running


def adapters(stripe: RunningStripe, **settings: Any) -> dict[str, Any]:
    return {"stripe": StripeAdapter(api_key=API_KEY, base_url=stripe.url, **settings)}


def put_charges(database: Database, ob: outbox.Outbox, **settings: Any) -> None:
    """More for the account that refuses us than the breaker takes, before those of the others."""
    put(database, ob, CHARGE, payload=PAYLOAD, options=BAD, count=REFUSED, **settings)
    put(database, ob, CHARGE, payload=PAYLOAD, options=GOOD, count=SERVED, **settings)
    put(database, ob, CHARGE, payload=PAYLOAD, count=SERVED, **settings)


def throttled(database: Database) -> set[str]:
    """The destinations that wait, or count failures."""
    rows = database.rows(TABLES.destination)
    return {
        row.name for row in rows if row.breaker_failures or row.breaker != "closed" or row.cooldown_until is not None
    }


def test_an_account_that_refuses_us_stops_no_other(
    database: Database, ob: outbox.Outbox, stripe: RunningStripe
) -> None:
    put_charges(database, ob)

    run_once(database, ob, adapters=adapters(stripe))

    assert states(database) == {"delivered": 2 * SERVED, **states_of_refused(database)}
    assert throttled(database) == {"stripe:acct_bad"}
    assert {entry.destination for entry in database.entries} == {"stripe", "stripe:acct_good", "stripe:acct_bad"}


def test_in_a_shared_destination_only_the_account_s_entries_wait(
    database: Database, ob: outbox.Outbox, stripe: RunningStripe
) -> None:
    put_charges(database, ob, destination="stripe")

    run_once(database, ob, adapters=adapters(stripe), limits={"stripe": Limits(breaker=Breaker(failures=2))})

    assert states(database) == {"delivered": 2 * SERVED, **states_of_refused(database)}
    assert throttled(database) == set()
    assert {row.attempts for row in database.queue} <= {0, 1}


def states_of_refused(database: Database) -> dict[str, int]:
    """Tried, or suspended before that; none of them ended."""
    waiting = Counter(row.state for row in database.queue)
    assert waiting.keys() <= {"pending", "retry"}
    assert waiting.total() == REFUSED
    return dict(waiting)


def test_a_refusal_of_the_adapter_s_own_account_still_stops_all_of_it(
    database: Database, ob: outbox.Outbox, stripe: RunningStripe
) -> None:
    put(database, ob, CHARGE, payload=PAYLOAD, count=REFUSED)

    run_once(database, ob, adapters=adapters(stripe, account="acct_bad"), concurrency=1)

    assert throttled(database) == {"stripe"}
    assert len(stripe.ledger.answers) < REFUSED


@pytest.mark.parametrize(
    ("given", "destination"),
    [
        ({"options": GOOD}, "stripe:acct_good"),
        ({"options": {"account": None}}, "stripe"),
        ({"options": {"api_version": "2026-06-30"}}, "stripe"),
        ({}, "stripe"),
        ({"options": GOOD, "destination": "shop"}, "shop"),
    ],
)
def test_an_entry_that_names_an_account_has_the_account_s_destination(
    database: Database, ob: outbox.Outbox, given: dict[str, Any], destination: str
) -> None:
    put(database, ob, CHARGE, **given)

    assert [row.destination for row in (*database.entries, *database.queue)] == [destination] * 2


def test_an_account_too_long_for_a_destination_is_refused_before_any_write(
    database: Database, ob: outbox.Outbox
) -> None:
    with pytest.raises(outbox.InvalidValue, match=r"destination .* has 307 bytes"):
        put(database, ob, CHARGE, options={"account": "a" * 300})

    assert database.entries == []


def test_each_account_has_the_limits_of_its_service(database: Database, ob: outbox.Outbox) -> None:
    for account in "ab":
        put(database, ob, CHARGE, options={"account": account}, count=5)
    service = MemoryAdapter()
    limits = {"stripe": Limits(rate=0.001, burst=2), "stripe:b": Limits(rate=0.001, burst=3)}

    run_once(database, ob, adapters={"stripe": service}, limits=limits)

    assert Counter(delivery.options["account"] for delivery in service.deliveries) == {"a": 2, "b": 3}


def test_who_pauses_a_service_pauses_its_accounts(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, CHARGE, options=GOOD)
    put(database, ob, "crm.upsert")
    service = MemoryAdapter()

    succeeded("pause", "stripe", "--reason", "audit", database=database)
    run_once(database, ob, adapters={"stripe": service, "crm": MemoryAdapter()})
    shown = {row["name"]: row["paused"] for row in document("destinations", database=database)["destinations"]}
    paused = list(service.deliveries)
    succeeded("resume", "--reason", "asked", "stripe", database=database)
    run_once(database, ob, adapters={"stripe": service, "crm": MemoryAdapter()})

    assert paused == []
    assert shown == {"stripe": True, "stripe:acct_good": True}
    assert len(service.deliveries) == 1


def test_an_adapter_of_one_s_own_may_refuse_one_account(database: Database, ob: outbox.Outbox) -> None:
    def answer(delivery: Delivery) -> Outcome:
        account = delivery.options["account"]
        return Deferred("no access", cooldown=True, account=account) if account == "bad" else Delivered()

    for account in ("bad", "good"):
        put(database, ob, "crm.upsert", destination="crm", options={"account": account}, count=12)

    run_once(database, ob, adapters={"crm": MemoryAdapter(answer)})

    assert states(database)["delivered"] == 12
    assert throttled(database) == set()
