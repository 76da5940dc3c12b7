"""Requests through a proxy: its refusals prove that nothing was sent, and a tunnel shows it nothing."""

import asyncio
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from support.loopback import answering, closed_port, listening, serving, tunnelling, whole_request
from support.mail_servers import tls_contexts
from support.transports import post

from dispatchers.adapters.http_client.transport import Transport

SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.usefixtures("without_rest")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://else.test\r\n\r\n",
        b"\x05\x00",
        b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_whatever_a_proxy_answers_but_a_tunnel_means_that_nothing_was_sent(answer: bytes) -> None:
    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(answer)

    async def scenario() -> None:
        async with listening(proxy) as url:
            transport = Transport(timeout=SECOND, proxy=url)
            with pytest.raises(httpx.ProxyError):
                await post(transport, "https://crm.test")

    asyncio.run(scenario())


def test_a_proxy_that_refuses_connections_means_that_nothing_was_sent() -> None:
    transport = Transport(timeout=SECOND, proxy=closed_port())

    with pytest.raises(httpx.ConnectError):
        asyncio.run(post(transport, "https://crm.test"))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_tunnel_carries_requests_and_the_proxy_sees_none_of_them(tmp_path: Path, scheme: str) -> None:
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:crm.test", "DNS:localhost")
    seen: list[bytes] = []
    asked: list[bytes] = []

    async def scenario() -> None:
        async with (
            serving(answering(seen=seen), server_tls) as port,
            serving(tunnelling(port, asked), server_tls if scheme == "https" else None) as proxy_port,
        ):
            proxy = f"{scheme}://localhost:{proxy_port}"
            transport = Transport(timeout=60 * SECOND, tls=client_tls, proxy=proxy.replace("//", "//ada:p%40ss@"))
            for _ in range(2):
                assert (await post(transport, "https://crm.test:8443", content=b"secret")).status == 200
            await transport.aclose()

    asyncio.run(scenario())

    assert len(seen) == 2
    assert b"Proxy-Authorization" not in b"".join(seen)
    credentials = b"YWRhOnBAc3M="  # of ada:p@ss
    assert asked == [
        b"CONNECT crm.test:8443 HTTP/1.1\r\nHost: crm.test:8443\r\nProxy-Authorization: Basic "
        + credentials
        + b"\r\n\r\n"
    ]
