"""What goes out is what was enqueued, whatever is deployed in between: the real Stripe SDK against the strict imitation."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import document
from support.database import CHARGE, TABLES, Database
from support.entries import HOUR, age, put_one, run_once, state

import outbox
from dispatchers.adapters import MemoryAdapter, StripeAdapter
from dispatchers.delivery import Delivery
from dispatchers.pipeline import triage
from dispatchers.testing.service_faults import ServiceFault
from dispatchers.testing.stripe_core import API_KEY, Answer, Execution, FakeStripe, Request
from dispatchers.testing.stripe_service import RunningStripe, running_stripe
from outbox.sql.schema.tables import ENCRYPTED_VERSION

OLD, NEW = "2025-10-29.clover", "2026-10-28.endive"
PAYLOAD = {
    "amount": 2000,
    "currency": "eur",
    "description": "Zoë's ☕",
    "payment_method": "pm_card_visa",
    "confirm": True,
}
PINNED = {"api_version": OLD, "account": "acct_shop"}


class RecordingStripe(FakeStripe):
    """Keeps every request as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def receive(self, request: Request) -> Execution | Answer:
        self.requests.append(request)
        return super().receive(request)


@pytest.fixture
def stripe() -> Iterator[tuple[RunningStripe, list[Request]]]:
    fake = RecordingStripe()
    with running_stripe(fake) as running:
        yield running, fake.requests


def deployed(stripe: RunningStripe, api_version: str, account: str | None = None) -> dict[str, StripeAdapter]:
    """The adapters of a deploy with these defaults."""
    timeout = timedelta(seconds=10)
    return {
        "stripe": StripeAdapter(
            api_key=API_KEY, base_url=stripe.url, api_version=api_version, account=account, timeout=timeout
        )
    }


def test_a_deploy_between_two_attempts_changes_neither_a_byte_nor_a_header(
    database: Database, ob: outbox.Outbox, stripe: tuple[RunningStripe, list[Request]]
) -> None:
    service, requests = stripe
    id = put_one(database, ob, CHARGE, payload=PAYLOAD, options=PINNED)
    service.force(ServiceFault.LOSE_RESPONSE)

    run_once(database, ob, adapters=deployed(service, OLD))
    assert state(database, id) == "retry"
    age(database, HOUR)
    run_once(database, ob, adapters=deployed(service, NEW, account="acct_another"))

    first, second = requests
    assert (first.method, first.path, first.query, first.body) == (
        second.method,
        second.path,
        second.query,
        second.body,
    )
    assert dict(first.headers) == dict(second.headers)
    assert (second.headers["stripe-version"], second.headers["stripe-account"]) == (OLD, "acct_shop")
    assert (state(database, id), len(service.ledger.charges)) == ("delivered", 1)


def test_what_waits_while_a_deploy_changes_defaults_is_sent_as_enqueued(
    database: Database, ob: outbox.Outbox, stripe: tuple[RunningStripe, list[Request]]
) -> None:
    service, requests = stripe
    payload = dict(PAYLOAD)
    with database.begin() as session:
        ob.enqueue(session, CHARGE, payload, parent="order:1", options=PINNED)
        ob.enqueue(session, CHARGE, PAYLOAD, parent="order:2")
        payload["amount"] = 9999

    run_once(database, ob, adapters=deployed(service, NEW, account="acct_another"))

    versions = {request.headers["idempotency-key"]: request.headers["stripe-version"] for request in requests}
    assert versions == {ob.child_key("order:1", CHARGE): OLD, ob.child_key("order:2", CHARGE): NEW}
    assert {charge.amount for charge in service.ledger.charges} == {2000}


def test_in_doubt_under_a_changed_default_it_waits_for_an_old_process(
    database: Database, ob: outbox.Outbox, stripe: tuple[RunningStripe, list[Request]]
) -> None:
    service, requests = stripe
    id = put_one(database, ob, CHARGE, payload=PAYLOAD, options={"account": "acct_shop"})
    service.force(ServiceFault.LOSE_RESPONSE)
    run_once(database, ob, adapters=deployed(service, OLD))

    age(database, HOUR)
    run_once(database, ob, adapters=deployed(service, NEW))

    assert (state(database, id), len(requests)) == ("retry", 1)
    assert "the adapter would now send it as" in document("show", str(id), database=database)["reason"]
    age(database, HOUR)
    run_once(database, ob, adapters=deployed(service, OLD, account="acct_another"))
    assert (state(database, id), len(service.ledger.charges)) == ("delivered", 1)
    assert requests[0].body == requests[1].body
    assert dict(requests[0].headers) == dict(requests[1].headers)


@pytest.mark.parametrize(
    ("pinned", "options", "alike"),
    [
        (f"stripe version={OLD} account=- mode=test", {}, False),
        (f"stripe version={OLD} account=- mode=test", {"api_version": OLD}, True),
        (f"stripe version={OLD} account=acct_1 mode=test", {"api_version": OLD}, False),
        (f"stripe version={OLD} account=acct_1 mode=test", {"api_version": OLD, "account": None}, True),
        (f"stripe version={OLD} account=- mode=live", {"api_version": OLD, "account": None}, False),
        ("something else", {"api_version": OLD, "account": None}, False),
    ],
)
def test_only_what_the_options_name_may_differ(pinned: str, options: dict[str, Any], alike: bool) -> None:
    assert StripeAdapter(api_key=API_KEY, api_version=NEW).sends_alike(pinned, options) == alike


# --- what only a newer process can send


def test_an_unknown_operation_waits_listed_for_a_newer_dispatcher(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, "crm.tenants.merge")

    class Older(MemoryAdapter):
        def serves(self, operation: str) -> bool:
            return operation == "crm.upsert"

    run_once(database, ob, adapters={"crm": Older()})

    (listed,) = document("list", database=database)["entries"]
    assert (listed["state"], listed["attempts"], listed["reason"]) == (
        "pending",
        0,
        "no adapter of this dispatcher serves it",
    )
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    assert state(database, id) == "delivered"


def test_a_newer_releases_entry_waits_listed_for_a_newer_dispatcher(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = put_one(database, ob, payload={"amount": 1})
    database.execute(sa.update(TABLES.entry).values(schema_version=ENCRYPTED_VERSION + 1))
    service = MemoryAdapter()

    run_once(database, ob, adapters={"crm": service})

    (listed,) = document("list", database=database)["entries"]
    assert (listed["state"], listed["attempts"], listed["reason"]) == ("pending", 0, "a newer release wrote it")
    age(database, HOUR)
    monkeypatch.setattr(triage, "SCHEMA_VERSION", ENCRYPTED_VERSION + 1)
    run_once(database, ob, adapters={"crm": service})
    (delivery,) = service.deliveries
    assert (state(database, id), delivery.payload_json) == ("delivered", b'{"amount":1}')
    assert isinstance(delivery, Delivery)


def test_a_stored_decision_is_kept_while_no_adapter_here_serves_the_entry(
    database: Database, ob: outbox.Outbox
) -> None:
    from dispatchers.admin.decide import decisions

    id = put_one(database, ob, "crm.tenants.merge")
    with database.engine.begin() as connection:
        decisions.cancel(connection, TABLES, id, actor="ada", reason="not wanted")

    class Older(MemoryAdapter):
        def serves(self, operation: str) -> bool:
            return False

    run_once(database, ob, adapters={"crm": Older()})
    assert document("show", str(id), database=database)["known"] == "cancelled"
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert state(database, id) == "cancelled"
