"""What several tests of the HTTP adapters, and of the one for Stripe, need."""

from collections.abc import Iterator

import pytest
import respx
from support.stripe_sends import INTENT

import dispatchers.adapters.http_client.pool
from dispatchers.testing.faulty_http import FaultyHttp, faulty_http


@pytest.fixture
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections be used again at once, in tests that count them."""
    monkeypatch.setattr(dispatchers.adapters.http_client.pool, "REST_SECONDS", 0.0)


@pytest.fixture
def api() -> Iterator[respx.MockRouter]:
    """Stripe's API; what a test does not expect is an error."""
    with respx.mock(base_url="https://api.stripe.com", assert_all_called=False) as router:
        yield router


@pytest.fixture
def charges(api: respx.MockRouter) -> respx.Route:
    route: respx.Route = api.post("/v1/payment_intents").respond(json=INTENT, headers={"Request-Id": "req_1"})
    return route


@pytest.fixture
def remote() -> Iterator[FaultyHttp]:
    with faulty_http() as running:
        yield running
