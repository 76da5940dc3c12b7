"""Sends deliveries with one call of an adapter, as the dispatcher does."""

import asyncio
from collections.abc import Sequence
from typing import Any

from dispatchers import Delivery, Outcome, Unknown
from dispatchers.testing.attempts import due_in_time


async def sent_together(adapter: Any, deliveries: Sequence[Delivery]) -> list[Outcome]:
    """The outcome of each delivery. The call is cancelled at its deadline."""
    batch = tuple(due_in_time(adapter, delivery) for delivery in deliveries)
    outcomes: list[Outcome] = [Unknown("no answer")] * len(batch)
    try:
        async with asyncio.timeout_at(batch[0].deadline):
            await adapter.send_batch(batch, outcomes.__setitem__)
    except TimeoutError:
        pass
    return outcomes
