"""The profile of a service of payments that does not exist."""

from datetime import date, timedelta
from typing import Any

from dispatchers.adapters.providers import Header, Post, Profile, bearer


def profile(**given: Any) -> Profile:
    """The profile with the given fields in the place of its own."""
    fields: dict[str, Any] = {
        "name": "pay",
        "title": "Pay",
        "as_of": date(2026, 11, 1),
        "sources": ("https://pay.example.com/docs",),
        "base_url": "https://pay.example.com/v1",
        "auth": bearer(),
        "key": Header("Idempotency-Key"),
        "window": timedelta(days=1),
        "stores": "2xx",
        "operations": {"payments.create": Post("/payments"), "payments.capture": Post("/payments/{payment}/captures")},
        "result": ("id",),
    }
    return Profile(**fields | given)
