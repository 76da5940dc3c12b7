"""Our fake Stripe, and localstripe, which others wrote: the adapter understands the same shapes of both."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.daemons import wait_for
from support.free_ports import free_ports
from support.server_process import ServerProcess
from support.stripe_sends import API_KEY, CHARGE, delivery, send

from dispatchers import Delivered, Rejected
from dispatchers.adapters import StripeAdapter
from dispatchers.testing.stripe_core import API_KEY as OUR_KEY
from dispatchers.testing.stripe_service import running_stripe

LOCALSTRIPE = Path(sys.executable).parent / "localstripe"


@pytest.fixture(params=["ours", "localstripe"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StripeAdapter]:
    if request.param == "ours":
        with running_stripe() as service:
            yield StripeAdapter(api_key=OUR_KEY, base_url=service.url)
        return
    (port,) = free_ports(1)
    server = ServerProcess([str(LOCALSTRIPE), "--port", str(port), "--from-scratch"], tmp_path / "log", cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        wait_for(lambda: answers(url), "localstripe", 30)
        yield StripeAdapter(api_key=API_KEY, base_url=url)
    finally:
        server.stop()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("operation", "payload", "prefix"),
    [("payment_intents.create", CHARGE, "pi_"), ("customers.create", {"email": "ada@example.com"}, "cus_")],
)
def test_what_was_made_is_delivered_with_its_id(
    adapter: StripeAdapter, operation: str, payload: Any, prefix: str
) -> None:
    outcome = send(adapter, delivery(f"stripe.{operation}", payload))

    assert isinstance(outcome, Delivered)
    assert outcome.result["id"].startswith(prefix)


def test_a_wrong_parameter_is_rejected(adapter: StripeAdapter) -> None:
    outcome = send(adapter, delivery(payload={"amount": -1, "currency": "eur"}))

    assert isinstance(outcome, Rejected)
