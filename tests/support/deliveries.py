"""Deliveries, and an adapter's answers to them, as the dispatcher asks: with a deadline, one after the other or together."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from dispatchers import Delivery, Outcome, Unknown
from dispatchers.testing.attempts import close, due_in_time

ORDER = {"amount": 2000}


def delivery(key: str = "ck1_a", payload: Any = ORDER, *, operation: str = "orders.placed", **fields: Any) -> Delivery:
    given: dict[str, Any] = {"attempt": 1, "options": {}, "headers": {}, "deadline": 0.0} | fields
    payload_json = given.pop("payload_json", None) or json.dumps(payload).encode()
    return Delivery(uuid4(), operation, payload_json, key, **given)


async def ask(adapter: Any, verb: str = "send", *arguments: Any, **fields: Any) -> Any:
    """The answer of `send` or `find` to this delivery."""
    return await getattr(adapter, verb)(due_in_time(adapter, delivery(*arguments, **fields)))


def asked(adapter: Any, verb: str = "send", *arguments: Any, **fields: Any) -> Any:
    """The answer in an event loop of its own, after which the adapter is closed."""

    async def main() -> Any:
        answer = await ask(adapter, verb, *arguments, **fields)
        await close(adapter)
        return answer

    return asyncio.run(main())


async def sent_together(adapter: Any, deliveries: Sequence[Delivery]) -> list[Outcome]:
    """The outcome of each delivery of one call. The call is cancelled at its deadline."""
    batch = tuple(due_in_time(adapter, delivery) for delivery in deliveries)
    outcomes: list[Outcome] = [Unknown("no answer")] * len(batch)
    try:
        async with asyncio.timeout_at(batch[0].deadline):
            await adapter.send_batch(batch, outcomes.__setitem__)
    except TimeoutError:
        pass
    return outcomes


def batch_sent(adapter: Any, *deliveries: Delivery) -> list[Outcome]:
    """The outcomes of one batch, in an event loop of its own, after which the adapter is closed."""

    async def main() -> list[Outcome]:
        outcomes = await sent_together(adapter, deliveries)
        await close(adapter)
        return outcomes

    return asyncio.run(main())
