"""Transports of the HTTP adapters, used against a server of the test's own."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx

from dispatchers.adapters.http_client.transport import Answer, Transport
from support.loopback import Answer as Server
from support.loopback import listening


def over(server: Server, use: Callable[[Transport, str], Awaitable[Any]], **settings: Any) -> Any:
    async def scenario() -> Any:
        async with listening(server) as url:
            transport = Transport(**{"timeout": timedelta(minutes=1), **settings})
            try:
                return await use(transport, url)
            finally:
                await transport.aclose()

    return asyncio.run(scenario())


def counting(server: Server) -> tuple[list[Any], Server]:
    """`server`, and a list that grows with each of its connections."""
    connections: list[Any] = []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await server(reader, writer)

    return connections, counted


async def post(transport: Transport, url: str, **request: Any) -> Answer:
    return await transport.send(httpx.Request("POST", f"{url}/x", **request))
