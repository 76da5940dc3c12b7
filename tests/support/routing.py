"""Adapters without a service, and routes to them."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from dispatchers.delivery import NATIVE, Adapter, Delivered, Delivery, Outcome
from dispatchers.pipeline.routing import Routes
from dispatchers.time_limits import RetryPolicy

SECOND = timedelta(seconds=1)
LEASE, MARGIN = 60 * SECOND, 5 * SECOND

DEFAULTS: dict[str, Any] = {
    "window": None,
    "timeout": 30 * SECOND,
    "key_format": NATIVE,
    "replays_errors": "none",
    "at_least_once": False,
    "retry": RetryPolicy(max_attempts=20, max_age=timedelta(days=3)),
    "pinned": "",
}
"""What docs/how-it-works.md says of a declaration that is left out."""


class Sender(Adapter):
    """An adapter that declares what the test gives it and delivers."""

    def __init__(self, **declared: Any) -> None:
        for name, value in declared.items():
            setattr(self, name, value)

    async def send(self, delivery: Delivery) -> Outcome:
        return Delivered(delivery.operation)


def routes(**adapters: Adapter) -> Routes:
    """Written with `__` for the dots."""
    return routes_of({name.replace("__", "."): adapter for name, adapter in adapters.items()})


def routes_of(adapters: Mapping[str, Adapter]) -> Routes:
    return Routes(adapters, lease=LEASE, margin=MARGIN)


def delivery(operation: str = "mail.send") -> Delivery:
    return Delivery(
        id=UUID(int=1),
        operation=operation,
        payload_json=b"{}",
        key="ck1_a",
        attempt=1,
        options={},
        headers={},
        deadline=0.0,
    )


async def send_async(delivery: Delivery, note: str = "async") -> Outcome:
    return Delivered(note)


def send_sync(delivery: Delivery, note: str = "sync") -> Outcome:
    return Delivered(note)
