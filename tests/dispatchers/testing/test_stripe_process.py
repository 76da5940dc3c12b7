"""The fake Stripe as a process of its own, and a restart that continues its ledger."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import stripe
from support.stripe_clients import CHARGE, sdk, under

from dispatchers.testing.service_faults import ServiceFault
from dispatchers.testing.stripe_core import FakeStripe
from dispatchers.testing.stripe_ledger import StripeLedger
from dispatchers.testing.stripe_service import running_stripe


@contextmanager
def stripe_process(*arguments: str) -> Iterator[str]:
    """The imitation as a process of its own; yields its URL."""
    command = [sys.executable, "-m", "dispatchers.testing.stripe_service", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_as_a_process_it_prints_its_port_and_others_read_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with stripe_process("--lose", "1", "--seed", "1", "--ledger", str(path)) as url:
        for _ in range(3):
            with pytest.raises(stripe.APIConnectionError):
                sdk(url).v1.payment_intents.create(CHARGE, under("k1"))

        with closing(StripeLedger(path)) as ledger:
            assert [charge.key for charge in ledger.charges] == ["k1"]
            assert ledger.count("replayed") == 2
            assert ledger.count("lost") == 3
            assert ledger.count("object = 'charge'", table="effect") == 1


def test_a_restart_with_its_ledger_still_knows_keys_and_objects(tmp_path: Path) -> None:
    arguments = ("--ledger", str(tmp_path / "ledger.sqlite"), "--seed", "1")
    with stripe_process(*arguments) as url:
        first = sdk(url).v1.payment_intents.create(CHARGE, under("k1"))
        customer = sdk(url).v1.customers.create({"name": "Ada"})
        sdk(url).v1.customers.update(customer.id, {"name": "Ada L."})
        gone = sdk(url).v1.customers.create({"name": "Bob"})
        sdk(url).v1.customers.delete(gone.id)

    with stripe_process(*arguments) as url:
        again = sdk(url).v1.payment_intents.create(CHARGE, under("k1"))
        with pytest.raises(stripe.IdempotencyError):
            sdk(url).v1.payment_intents.create({**CHARGE, "amount": 1}, under("k1"))
        refund = sdk(url).v1.refunds.create({"payment_intent": first.id}, under("k2"))
        customers = sdk(url).v1.customers.list()

    assert again.id == first.id
    assert again.last_response is not None
    assert again.last_response.headers["idempotent-replayed"] == "true"
    assert refund.amount == CHARGE["amount"]
    assert [each.name for each in customers.data] == ["Ada L."]
    with closing(StripeLedger(tmp_path / "ledger.sqlite")) as ledger:
        assert len(ledger.charges) == 1


def test_a_restart_replays_a_500_and_forgets_a_key_after_its_window() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    ledger = StripeLedger()
    first = FakeStripe(ledger=ledger, clock=lambda: now)
    with running_stripe(first) as service:
        service.force(ServiceFault.FAIL_AFTER)
        with pytest.raises(stripe.APIError):
            sdk(service.url).v1.payment_intents.create(CHARGE, under("k1"))

    with running_stripe(FakeStripe(ledger=ledger, clock=lambda: now)) as service:
        with pytest.raises(stripe.APIError) as replayed:
            sdk(service.url).v1.payment_intents.create(CHARGE, under("k1"))
        now += timedelta(hours=25)
        sdk(service.url).v1.payment_intents.create(CHARGE, under("k1"))

    assert (replayed.value.headers or {})["Idempotent-Replayed"] == "true"
    assert len(ledger.charges) == 2
    assert [key.since for key in ledger.keys] == [now]
    ledger.close()
