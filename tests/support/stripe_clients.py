"""Clients of the fake Stripe: the real SDK, and bare requests."""

from datetime import UTC, datetime
from typing import Any

import httpx
from stripe import StripeClient

from dispatchers.testing.stripe_core import API_KEY

CHARGE: Any = {"amount": 2000, "currency": "eur", "metadata": {"order_id": "o 1"}}


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 1, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def sdk(url: str, api_key: str = API_KEY) -> StripeClient:
    return StripeClient(api_key, base_addresses={"api": url}, max_network_retries=0)


def under(key: str, **options: Any) -> Any:
    return {"idempotency_key": key, **options}


def headers(thing: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in thing.last_response.headers.items()}


def post(http: httpx.Client, key: str | None = None, path: str = "/v1/payment_intents", **form: Any) -> httpx.Response:
    data = form or {"amount": "2000", "currency": "eur"}
    return http.post(path, data=data, headers={"Idempotency-Key": key} if key is not None else {})
