"""Holds back one answer, so that it arrives after those of later calls."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest


async def begun_and_held(
    work: Callable[[], Coroutine[Any, Any, None]], owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Awaitable[None]]:
    """Begin `work`, and hold back the answer to its call of the method. What is returned gives the answer and awaits the end."""
    method = getattr(owner, name)
    has_answered, is_released = asyncio.Event(), asyncio.Event()

    async def held(*arguments: Any) -> Any:
        answer = await method(*arguments)
        has_answered.set()
        await is_released.wait()
        return answer

    monkeypatch.setattr(owner, name, held)
    working = asyncio.create_task(work())
    await has_answered.wait()
    monkeypatch.setattr(owner, name, method)

    async def release() -> None:
        is_released.set()
        await working

    return release
