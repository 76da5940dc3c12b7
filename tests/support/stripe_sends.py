"""Sends of the StripeAdapter, and what its SDK raises."""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

import httpx
import respx

from dispatchers.adapters import StripeAdapter
from dispatchers.delivery import Delivery, Outcome

API_KEY = "sk_test_4eC39HqLyjWDarjtT1zdp7dc"
KEY = "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
ENTRY = UUID("019a0000-0000-8000-8000-000000000001")
CHARGE = {"amount": 2000, "currency": "eur"}
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "client_secret": "pi_1_secret_x"}


def delivery(operation: str = "stripe.payment_intents.create", payload: Any = CHARGE, **fields: Any) -> Delivery:
    given = {"key": KEY, "attempt": 1, "options": {}, "headers": {}, "deadline": 0.0}
    return Delivery(id=ENTRY, operation=operation, payload_json=json.dumps(payload).encode(), **{**given, **fields})


def send(adapter: StripeAdapter, *deliveries: Delivery) -> Outcome:
    """The outcome of the last of `deliveries`."""

    async def each() -> list[Outcome]:
        try:
            return [await adapter.send(each) for each in deliveries or (delivery(),)]
        finally:
            await adapter.aclose()

    return asyncio.run(each())[-1]


def raised(cls: Any, *args: Any, **fields: Any) -> Exception:
    """An exception of the SDK, whose constructors are untyped."""
    made: Exception = cls(*args, **fields)
    return made


def error(status: int, type: str = "invalid_request_error", headers: Any = None, **details: Any) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"error": {"type": type, "message": "said", **details}})


def form(request: httpx.Request) -> dict[str, str]:
    return dict(parse_qsl(request.content.decode(), keep_blank_values=True))


def answered(adapter: StripeAdapter, route: respx.Route, response: httpx.Response) -> Outcome:
    route.mock(return_value=response)
    return send(adapter)
