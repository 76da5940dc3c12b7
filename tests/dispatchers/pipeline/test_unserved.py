"""What no dispatcher serves: it can be cancelled, its reason stays the one that counts, and slips in names are reported."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from support.cli_runner import document, succeeded
from support.database import Database
from support.entries import age, dispatcher, put_one, run_once, settlement_row, state

import outbox
from dispatchers import Adapter, Delivered, Delivery, Dispatcher, Limits, Operations, Settlement
from dispatchers.adapters import MemoryAdapter, StripeAdapter
from dispatchers.decide import CANCELLED_DELAY
from outbox.errors import ConfigurationError

MINUTES = timedelta(minutes=2)
TYPO = "stripe.payment_intent.create"


def others(database: Database, ob: outbox.Outbox) -> int:
    """A dispatcher that serves something else."""
    return run_once(database, ob, adapters={"mail": MemoryAdapter()})


def shown(database: Database, id: Any) -> Any:
    return document("show", str(id), database=database)


# --- cancelling


def test_what_no_dispatcher_has_served_for_a_minute_is_cancelled_at_once(database: Database, ob: outbox.Outbox) -> None:
    typo = put_one(database, ob, TYPO, ordering_key="order:1")
    follower = put_one(database, ob, "mail.send", ordering_key="order:1")
    others(database, ob)
    later = put_one(database, ob, TYPO)  # which that dispatcher does not claim any more
    served = put_one(database, ob, "mail.send")
    age(database, MINUTES)
    young = put_one(database, ob, TYPO)

    for id, at_once in ((later, True), (young, False), (served, False)):
        assert document("cancel", "--reason", "asked", str(id), database=database)["settled"] == at_once
    printed = succeeded("cancel", str(typo), "--reason", "a slip", database=database)

    assert printed == f"entry {typo} is cancelled: no dispatcher serves it\n"
    settled = settlement_row(database, typo)
    assert (settled.state, settled.reason, settled.deliveries, settled.attempts) == ("cancelled", "a slip", 0, 0)
    assert shown(database, typo)["events"][0]["reason"] == "a slip"
    assert others(database, ob) == 2  # and the cancellation of what it serves
    assert state(database, follower) == "delivered"


def test_a_cancellation_no_adapter_serves_is_settled_by_any_after_a_minute(
    database: Database, ob: outbox.Outbox
) -> None:
    id = put_one(database, ob, TYPO)

    printed = document("cancel", str(id), "--reason", "a slip", database=database)
    others(database, ob)
    waits = state(database, id)
    age(database, MINUTES)
    others(database, ob)

    assert (printed["settled"], waits, state(database, id)) == (False, "pending", "cancelled")
    assert settlement_row(database, id).reason == "a slip"


def test_the_process_that_serves_it_settles_a_cancel_with_its_callback(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    effects, ended = Operations(), []

    @effects.operation("crm.upsert")
    def upsert(delivery: Delivery) -> Delivered:
        return Delivered()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Settlement) -> None:
        ended.append(settlement.state)

    document("cancel", "--reason", "asked", str(id), database=database)
    others(database, ob)
    age(database, CANCELLED_DELAY)
    run_once(database, ob, include=[effects])

    assert (state(database, id), ended) == ("cancelled", ["cancelled"])


# --- its reason


def test_the_reason_stays_that_of_the_process_that_serves_the_entry(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    before = put_one(database, ob, TYPO)

    def answer(delivery: Delivery) -> Any:
        return {"no": "outcome"}

    run_once(database, ob, adapters={"crm": MemoryAdapter(answer)})
    served = shown(database, id)["reason"]
    age(database, MINUTES)
    others(database, ob)

    assert "dict" in served
    assert shown(database, id)["reason"] == served
    assert shown(database, before)["reason"] == "no adapter of this dispatcher serves it"


def test_while_it_is_sent_it_has_no_reason_of_a_process_that_could_not(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    others(database, ob)
    seen: list[Any] = []

    def answer(delivery: Delivery) -> Delivered:
        with database.session() as session:
            seen.append([(entry.state, entry.reason) for entry in ob.status(session, "order:0")])
        seen.append(shown(database, id)["reason"])
        return Delivered()

    waiting = shown(database, id)["reason"]
    age(database, MINUTES)
    run_once(database, ob, adapters={"crm": MemoryAdapter(answer)})

    assert waiting == "no adapter of this dispatcher serves it"
    assert seen == [[("sending", None)], None]


# --- names that fit nothing


class Knowing(MemoryAdapter):
    def nearest(self, operation: str) -> str | None:
        return "crm.contacts.upsert"

    def serves(self, operation: str) -> bool:
        return operation == "crm.contacts.upsert"


def started(database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "outbox.dispatcher"):
        dispatcher(database, ob, **{"adapters": {"x.y": MemoryAdapter(), "crm": Knowing()}} | settings)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("x.yy", "; did you mean 'x.y'?"), ("crm.contact", "; did you mean 'crm.contacts.upsert'?"), ("zebra", "")],
)
@pytest.mark.parametrize("kind", ["on_settled", "on_uncertain"])
def test_a_callback_that_fits_no_operation_is_reported_at_the_start(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, kind: str, name: str, meant: str
) -> None:
    effects = Operations()
    for fitting in ("x", "x.y", "x.y.z", "crm.contacts.upsert", name):
        getattr(effects, kind)(fitting)(lambda session, settlement: None)

    assert started(sqlite, ob, caplog, include=[effects]) == [
        f"{kind}({name!r}) matches no operation that this dispatcher serves, so this dispatcher never calls it"
        f"{meant or '.'} It stays recorded until you run `outbox callbacks forget '{kind} {name}'`"
    ]


@pytest.mark.parametrize(("name", "meant"), [("cmr", "; did you mean 'crm'?"), ("crm.contacts", ""), ("eu-bank", "")])
def test_a_limit_of_an_unserved_destination_is_reported_at_the_start(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, name: str, meant: str
) -> None:
    limits = dict.fromkeys(("crm", "crm:acct_1", name), Limits(rate=5))

    assert started(sqlite, ob, caplog, limits=limits) == [
        f"limits={{{name!r}: ...}} matches no destination of the operations that this dispatcher serves: it applies"
        f" only to entries that are enqueued with destination={name!r}{meant}"
    ]


def test_what_waits_unserved_is_reported_with_the_operation_that_was_meant(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put_one(sqlite, ob, TYPO)

    run_once(sqlite, ob, adapters={"stripe": StripeAdapter(api_key="sk_test_fake")})

    meant = "no adapter of this dispatcher serves it; did you mean 'stripe.payment_intents.create'?"
    assert caplog.messages[-1].endswith(f"({TYPO}) waits: {meant}")


@pytest.mark.parametrize(
    ("operation", "meant"),
    [
        ("stripe.payment_intent.create", "stripe.payment_intents.create"),
        ("stripe.checkout.session.create", "stripe.checkout.sessions.create"),
        ("stripe.refunds.creat", "stripe.refunds.create"),
        ("stripe.refunds.create", "stripe.refunds.create"),
        ("stripe.checkout", "stripe.checkout"),
        ("stripe.qqqq.create", None),
        ("stripe.refunds.create.more", None),
    ],
)
def test_stripes_operations_are_known_from_the_sdk(operation: str, meant: str | None) -> None:
    assert StripeAdapter(api_key="sk_test_fake").nearest(operation) == meant


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("pk_", "a publishable key"),
        ("whsec_", "the secret of a webhook"),
        ("ek_", "an ephemeral key"),
        ("sk_org_", "an organization's key"),
    ],
)
def test_a_key_of_stripe_that_cannot_send_is_refused_and_not_shown(prefix: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"begins with {prefix}: that is {kind}") as caught:
        StripeAdapter(api_key=f"{prefix}test_4242")

    assert "4242" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "is_odd"),
    [("2024", True), ("latest", True), ("2024-06-20", False), ("2025-03-31.basil", False), (None, False)],
)
def test_a_version_that_stripe_cannot_have_is_reported(
    caplog: pytest.LogCaptureFixture, version: str | None, is_odd: bool
) -> None:
    StripeAdapter(api_key="sk_test_fake", api_version=version)

    assert [
        f"StripeAdapter(api_version={version!r}) is not a Stripe API version" in line for line in caplog.messages
    ] == [True] * is_odd


def test_adapters_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"adapters must be a mapping from an operation's prefix .* not list"):
        Dispatcher("sqlite://", adapters=[MemoryAdapter()])  # type: ignore[arg-type]


def test_an_adapter_without_a_list_of_its_operations_has_no_suggestion() -> None:
    assert Adapter.nearest(MemoryAdapter(), "crm.upsert") is None
