"""Which failures prove that nothing was sent, over real sockets: refused connections, certificates that fail, no request."""

import asyncio
import resource
import socket
import ssl
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from support.loopback import answering
from support.mail_servers import tls_contexts
from support.transports import over, post

from dispatchers.adapters.http_client.connection import Connection
from dispatchers.adapters.http_client.transport import Transport

SECOND = timedelta(seconds=1)


def test_no_file_for_another_connection_means_that_nothing_was_sent() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def without_files(transport: Transport, url: str) -> None:
        with socket.socket() as highest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, hard))
        try:
            with socket.socket(), pytest.raises(httpx.ConnectError):
                await post(transport, url)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await post(transport, url)).status == 200

    over(answering(), without_files)


def test_a_refused_client_certificate_means_that_nothing_was_sent(tmp_path: Path) -> None:
    """In TLS 1.3 the client has finished its handshake by then, and the request is on its way."""
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:localhost")
    server_tls.verify_mode = ssl.CERT_REQUIRED
    answered = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with server_tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as tls:
            with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
                tls.do_handshake()
            answered.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(timeout=60 * SECOND, tls=client_tls)
        with pytest.raises(httpx.ConnectError, match="tls: client certificate refused"):
            asyncio.run(post(transport, f"https://localhost:{listener.getsockname()[1]}"))
        answered.set()
        thread.join()


@pytest.mark.parametrize(
    "request_",
    [
        httpx.Request("POST", "http://crm.test", headers={"X-A": "1\r\nX-B: 2"}),
        httpx.Request("POST", "http://crm.test", headers=[(b"X-A\r\nX-B", b"2")]),
        httpx.Request("POST /x HTTP/1.1\r\nX:", "http://crm.test"),
        httpx.Request("POST", "http://crm.test", headers={"Host": "a\r\nX-B: 2"}),
        httpx.Request("PÖST\r\nX-B", "http://crm.test"),
    ],
)
def test_nothing_in_a_request_begins_another_header(request_: httpx.Request) -> None:
    seen: list[bytes] = []

    async def smuggle(transport: Transport, url: str) -> None:
        request_.url = httpx.URL(url)
        with pytest.raises(httpx.LocalProtocolError) as refused:
            await transport.send(request_)
        assert "X-B" not in "".join(traceback.format_exception(refused.value))

    over(answering(seen=seen), smuggle)

    assert seen == []


@pytest.mark.parametrize("url", ["ftp://crm.test/x", "crm.test/x", "https:///x"])
def test_a_url_of_no_http_server_means_that_nothing_was_sent(url: str) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        asyncio.run(Transport(timeout=SECOND).send(httpx.Request("POST", url)))


def test_a_server_that_closes_at_once_means_that_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a load balancer does that has no server left."""
    closed = threading.Event()
    made = Connection.connection_made

    def made_and_closed(self: Connection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        closed.wait()  # the loop is blocked meanwhile

    monkeypatch.setattr(Connection, "connection_made", made_and_closed)

    def serve() -> None:
        connection, _ = listener.accept()
        connection.close()
        closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(timeout=60 * SECOND)
        with pytest.raises(httpx.ConnectError):
            asyncio.run(post(transport, f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()


def test_the_next_address_of_a_host_is_tried_where_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_two_addresses(transport: Transport, url: str) -> None:
        port = httpx.URL(url).port
        found = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
        assert (await post(transport, f"http://crm.test:{port}")).status == 200

    over(answering(), at_two_addresses)
