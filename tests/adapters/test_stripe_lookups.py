"""StripeAdapter.find against the strict fake: what a list proves, and what none can."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
import stripe
from support.daemons import daemon as process
from support.daemons import write_factory
from support.database import TABLES, Database
from support.entries import age, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers import Absent, CannotTell, Delivery, Found, Operations
from dispatchers.adapters import StripeAdapter
from dispatchers.adapters.stripe import lookup as stripe_lookup
from dispatchers.adapters.stripe.adapter import _param_names
from dispatchers.adapters.stripe.lookup import LISTED
from dispatchers.testing.service_faults import ServiceFault
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import RunningStripe, running_stripe

ENTRY = UUID("019a0000-0000-8000-8000-000000000001")
OTHER = UUID("019a0000-0000-8000-8000-000000000002")
CHARGE = {"amount": 2000, "currency": "eur", "customer": "cus_1"}
CREATE = "stripe.payment_intents.create"
DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
QUIET = timedelta(minutes=2)


class Clock:
    """Stripe's, set by the test."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Iterator[RunningStripe]:
    with running_stripe(clock=clock, random=Random(1)) as running:
        yield running


def adapter_for(service: RunningStripe, **settings: Any) -> StripeAdapter:
    return StripeAdapter(api_key=API_KEY, base_url=service.url, **settings)


def delivery(operation: str = CREATE, payload: Any = CHARGE, *, id: UUID = ENTRY, **fields: Any) -> Delivery:
    given: dict[str, Any] = {"key": f"ck1_{id}", "attempt": 1, "options": {}, "headers": {}, "deadline": 0.0}
    return Delivery(id=id, operation=operation, payload_json=json.dumps(payload).encode(), **{**given, **fields})


def sent(adapter: StripeAdapter, *deliveries: Delivery) -> list[Any]:
    return _each(adapter, adapter.send, deliveries)


def found(adapter: StripeAdapter, *deliveries: Delivery) -> Any:
    return _each(adapter, adapter.find, deliveries or (delivery(age=MINUTE),))[-1]


def _each(adapter: StripeAdapter, ask: Any, deliveries: Any) -> list[Any]:
    async def main() -> list[Any]:
        try:
            return [await ask(each) for each in deliveries]
        finally:
            await adapter.aclose()

    return asyncio.run(main())


# --- what a list proves


@pytest.mark.parametrize(
    ("operation", "payload"),
    [
        (CREATE, CHARGE),
        (CREATE, {"amount": 5, "currency": "eur"}),
        (CREATE, {**CHARGE, "metadata": {"order": "7"}}),
        ("stripe.customers.create", {"name": "Ada"}),
        ("stripe.payouts.create", {"amount": 5, "currency": "eur"}),
        ("stripe.transfers.create", {"amount": 5, "currency": "eur", "destination": "acct_2"}),
    ],
)
def test_what_was_created_is_found_by_its_metadata(service: RunningStripe, operation: str, payload: Any) -> None:
    adapter = adapter_for(service)
    (outcome, _) = sent(adapter, delivery(operation, payload), delivery(operation, payload, id=OTHER))

    finding = found(adapter, delivery(operation, payload, age=MINUTE))

    assert isinstance(finding, Found)
    assert finding.result == {name: outcome.result[name] for name in finding.result}
    assert finding.result["id"]


def test_it_only_reads_a_list_on_behalf_of_the_same_account(service: RunningStripe) -> None:
    found(adapter_for(service), delivery(options={"account": "acct_7"}, age=MINUTE))

    (answer,) = service.ledger.answers
    assert (answer.method, answer.path, answer.account, answer.key) == ("GET", "/v1/payment_intents", "acct_7", None)


def test_it_reads_page_after_page(service: RunningStripe) -> None:
    adapter = adapter_for(service)
    others = [UUID(int=number) for number in range(230)]
    sent(adapter, delivery(), *(delivery(id=each) for each in others))
    before = service.ledger.count("method = 'GET'")

    finding = found(adapter)

    assert isinstance(finding, Found)
    assert service.ledger.count("method = 'GET'") - before == 3


def test_it_reads_no_further_back_than_the_entry_is_old(service: RunningStripe, clock: Clock) -> None:
    adapter = adapter_for(service)
    sent(adapter, *(delivery(id=UUID(int=number)) for number in range(120)))
    clock.ahead = DAY

    assert found(adapter, delivery(age=MINUTE)) == Absent()
    assert service.ledger.count("method = 'GET'") == 1


@pytest.mark.parametrize("ahead", [-365 * DAY, 365 * DAY], ids=["behind", "ahead"])
@pytest.mark.parametrize("was_made", [True, False])
def test_clocks_a_year_apart_do_not_matter(
    service: RunningStripe, clock: Clock, ahead: timedelta, was_made: bool
) -> None:
    adapter = adapter_for(service)
    clock.ahead = ahead
    ours = [delivery()] if was_made else []
    sent(adapter, *ours, *(delivery(id=UUID(int=number)) for number in range(120)))

    assert isinstance(found(adapter), Found if was_made else Absent)


# --- what none can


@pytest.mark.parametrize(
    ("operation", "payload", "shown"),
    [
        ("stripe.payment_intents.capture", {"intent": "pi_1"}, "Stripe has no list that could prove the outcome of"),
        ("stripe.subscriptions.create", {"customer": "cus_1"}, "Stripe has no list that could prove the outcome of"),
        (CREATE, {**CHARGE, "metadata": {"outbox_id": "mine"}}, "its payload left no room for metadata.outbox_id"),
        (CREATE, {**CHARGE, "metadata": dict.fromkeys(map(str, range(50)), "x")}, "its payload left no room for"),
        (CREATE, ["no object"], "its payload left no room for"),
    ],
)
def test_what_cannot_be_listed_is_not_looked_up(
    service: RunningStripe, operation: str, payload: Any, shown: str
) -> None:
    finding = found(adapter_for(service), delivery(operation, payload))

    assert isinstance(finding, CannotTell)
    assert finding.reason.startswith(shown)
    assert service.ledger.answers == []


def test_more_than_can_be_read_proves_nothing(service: RunningStripe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe_lookup, "MAX_PAGES", 2)
    monkeypatch.setattr(stripe_lookup, "MAX_PAGE_OBJECTS", 3)
    adapter = adapter_for(service)
    sent(adapter, *(delivery(id=UUID(int=number)) for number in range(7)))

    assert found(adapter) == CannotTell("Stripe lists more than 6 payment_intents since then")


@pytest.mark.parametrize("kind", LISTED)
def test_the_sdk_can_list_what_is_looked_up(kind: str) -> None:
    service: Any = stripe.StripeClient(API_KEY).v1
    for word in kind.split("."):
        service = getattr(service, word)

    assert {"created", "limit", "starting_after", *LISTED[kind]} <= _param_names(service.list_async)
    assert "metadata" in _param_names(service.create_async)


# --- the whole way: a charge whose process was killed, and whose key Stripe has forgotten

FACTORY = """
import signal

class Dying(StripeAdapter):
    async def send(self, delivery):
        await super().send(delivery)
        os.kill(os.getpid(), signal.SIGKILL)

def make():
    stripe = Dying(api_key="sk_test_fake", base_url=os.environ["STRIPE_URL"])
    return Dispatcher(url, outbox=ob, adapters={"stripe": stripe})
"""


def pass_time(database: Database, clock: Clock, by: timedelta) -> None:
    age(database, by)
    clock.ahead += by


@pytest.mark.parametrize("was_executed", [True, False])
def test_a_charge_in_doubt_past_its_window_ends_charged_once(
    database: Database,
    ob: outbox.Outbox,
    service: RunningStripe,
    clock: Clock,
    tmp_path: Path,
    was_executed: bool,
) -> None:
    shown: list[tuple[str, Any]] = []
    effects = Operations()

    @effects.on_settled("stripe.payment_intents.create")
    def charged(session: Any, settlement: Any) -> None:
        shown.append((settlement.state, settlement.result["id"]))
        ob.enqueue(session, "crm.receipt", {})

    id = put_one(database, ob, CREATE, payload=CHARGE)
    service.force(ServiceFault.LOSE_RESPONSE if was_executed else ServiceFault.LOSE_REQUEST)
    write_factory(tmp_path, FACTORY)
    with process(tmp_path, database.url, STRIPE_URL=service.url) as killed:
        assert killed.wait() == -9
    states = []

    for passes in (DAY, QUIET, QUIET):  # the window is over; the status lookup; what was absent is sent again
        pass_time(database, clock, passes)
        run_once(database, ob, adapters={"stripe": adapter_for(service)}, include=[effects])
        states.append(state(database, id))

    (charge,) = service.ledger.charges
    assert states == ["retry", "delivered" if was_executed else "pending", "delivered"]
    assert shown == [("delivered", charge.parent)]
    assert settlement_row(database, id).key_epoch == (0 if was_executed else 1)
    assert (charge.key == ob.child_key("order:0", CREATE)) == was_executed
    assert {(row.operation, row.parent) for row in database.entries} == {
        (CREATE, "order:0"),
        ("crm.receipt", "order:0"),
    }
    assert "lookup" in {row.kind for row in database.rows(TABLES.event)}


def test_while_stripe_is_out_of_reach_the_charge_is_uncertain(
    database: Database, ob: outbox.Outbox, service: RunningStripe, clock: Clock
) -> None:
    id = put_one(database, ob, CREATE, payload=CHARGE)
    service.force(ServiceFault.LOSE_RESPONSE)
    adapters = {"stripe": adapter_for(service)}
    run_once(database, ob, adapters=adapters)
    for passes in (DAY, QUIET):
        pass_time(database, clock, passes)
        service.force(ServiceFault.UNAVAILABLE)
        run_once(database, ob, adapters=adapters)
    uncertain = queue_row(database, id)
    service.fake._forced.clear()

    pass_time(database, clock, QUIET)
    run_once(database, ob, adapters=adapters)

    assert uncertain.state == "uncertain"
    assert "status lookup inconclusive: api_error: HTTP 503" in json.loads(uncertain.outcome)["reason"]
    assert (state(database, id), len(service.ledger.charges)) == ("delivered", 1)
