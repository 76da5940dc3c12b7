"""One connection for all sends of an adapter."""

import asyncio

import pytest

from dispatchers.adapters import one_connection
from dispatchers.adapters.one_connection import OneConnection

LIMIT_SECONDS = 20


class Hanging:
    """A connection whose client waits without end when it is closed."""

    is_usable = True
    is_awaited = False

    async def aclose(self) -> None:
        await asyncio.Event().wait()


def test_a_connection_that_cannot_be_closed_delays_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_connection, "CLOSE_SECONDS", 0.01)

    async def opened() -> Hanging:
        return Hanging()

    async def run() -> bool:
        one = OneConnection(opened)
        latest = asyncio.get_running_loop().time() + LIMIT_SECONDS
        first = await one.ready(latest)
        first.is_usable = False
        second = await one.ready(latest)
        await asyncio.wait_for(one.aclose(), LIMIT_SECONDS)
        return second is not first

    assert asyncio.run(run())
