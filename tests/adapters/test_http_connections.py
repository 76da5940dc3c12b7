"""When a connection of the adapters is used again and when it is closed, over real sockets; and what is surely not sent."""

import asyncio
import gc
import resource
import socket
import ssl
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from support.loopback import GONE, answering, closed_port, listening, reset, say, serving, whole_request
from support.loopback import Answer as Server
from support.mail_servers import tls_contexts
from test_transport import counting, over

import dispatchers.adapters.connection_pool
from dispatchers.adapters.answer_reader import AnswerReader
from dispatchers.adapters.connection import Connection
from dispatchers.adapters.request_writer import Outgoing, Target
from dispatchers.adapters.transport import NEVER_SENT, Answer, Transport

SECOND = timedelta(seconds=1)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def post(transport: Transport, url: str, **request: Any) -> Answer:
    return await transport.send(httpx.Request("POST", f"{url}/x", **request))


def connections_of_two(first: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> int:
    """How many connections two requests need whose first is answered by `first`, after which the server continues."""
    done = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not done.is_set():
            await whole_request(reader)
            await first(reader, writer)
            done.set()
        await answering()(reader, writer)

    connections, counted = counting(server)

    async def two(transport: Transport, url: str) -> None:
        assert (await post(transport, url)).status == 200
        await done.wait()
        assert (await post(transport, url)).status == 200

    over(counted, two)
    return len(connections)


# --- used again


def test_after_a_plain_answer_the_connection_is_used_again() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    assert connections_of_two(plain) == 1


@pytest.mark.parametrize(
    "interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"]
)
def test_interim_answers_are_skipped(interim: bytes) -> None:
    async def hint(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(interim + OK)

    assert connections_of_two(hint) == 1


def test_one_timer_serves_all_connections_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []

    async def some(transport: Transport, url: str) -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def count(delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
            timers.append(callback)
            return call_later(delay, callback, *args)

        monkeypatch.setattr(loop, "call_later", count)
        for _ in range(3):
            await post(transport, url)

    over(answering(), some)

    assert timers.count(dispatchers.adapters.connection_pool._close_overdue) == 1


def test_a_connection_to_one_server_carries_no_request_to_another() -> None:
    seen: list[bytes] = []

    async def to_both(transport: Transport, url: str) -> None:
        async with listening(answering(seen=seen)) as other:
            for each in (url, other, url):
                await post(transport, each)

    connections, server = counting(answering())
    over(server, to_both)

    assert (len(connections), len(seen)) == (1, 1)


# --- never used again


@pytest.mark.parametrize("stray", [b"X", b"\r\n", OK])
def test_a_stray_byte_with_the_answer_ends_the_connection(stray: bytes) -> None:
    async def and_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + stray)

    assert connections_of_two(and_more) == 2


@pytest.mark.parametrize("stray", [b"X", b"\r\n", OK])
def test_a_stray_byte_after_the_answer_ends_the_connection(stray: bytes) -> None:
    async def and_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.05)  # the client has its answer, and waits for `done`
        writer.write(stray)
        await writer.drain()

    assert connections_of_two(and_later) == 2


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
def test_a_connection_that_the_server_closed_is_not_used(how: str) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.05)
        if how == "reset":
            reset(writer)
        elif how == "half-closed":
            writer.write_eof()
        else:
            writer.close()

    assert connections_of_two(close) == 2


def test_what_the_event_loop_has_not_reported_yet_is_seen_in_the_socket() -> None:
    """The server's close and the next request may meet in one turn of the loop."""
    closed = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall(OK)
            may_close.wait()
            connection.close()
            closed.set()

    may_close = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()

    async def twice() -> None:
        transport, url = Transport(timeout=60 * SECOND), f"http://127.0.0.1:{listener.getsockname()[1]}"
        await post(transport, url)
        may_close.set()
        closed.wait()  # the loop is blocked meanwhile
        assert (await post(transport, url)).status == 200
        await transport.aclose()

    asyncio.run(twice())
    thread.join()
    listener.close()


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b"Connection: x, Close\r\n"])
def test_a_server_that_will_close_is_not_asked_again(head: bytes) -> None:
    async def and_stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK.replace(b"\r\n\r\n", b"\r\n" + head + b"\r\n"))

    assert connections_of_two(and_stay) == 2


@pytest.mark.parametrize(
    ("value", "connections"), [("timeout=1, max=9", 2), ("max=9, Timeout=0", 2), ("timeout=15", 1)]
)
def test_a_server_that_keeps_connections_for_a_moment_is_not_asked_again(value: str, connections: int) -> None:
    """Its close would cross the next request, which were in doubt then."""

    async def briefly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: " + value.encode() + b"\r\n\r\n"))

    assert connections_of_two(briefly) == connections


def test_after_a_request_that_asks_for_a_close_it_is_not_used() -> None:
    async def two(transport: Transport, url: str) -> None:
        for _ in range(2):
            await post(transport, url, headers={"Connection": "close"})

    connections, server = counting(answering())
    over(server, two)

    assert len(connections) == 2


def test_an_early_answer_counts_and_ends_the_connection() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await say(writer, 413, b"")
        await asyncio.Event().wait()  # it reads nothing more

    async def send_much(transport: Transport, url: str) -> Answer:
        return await post(transport, url, content=bytes(50_000_000))

    connections, server = counting(refuse)

    async def twice(transport: Transport, url: str) -> list[int]:
        return [(await send_much(transport, url)).status for _ in range(2)]

    assert over(server, twice) == [413, 413]
    assert len(connections) == 2


# --- closed


def closed_by_the_client(
    use: Callable[[Transport, str, asyncio.Event], Awaitable[Any]], first: bytes = b"", **settings: Any
) -> None:
    """Returns when the server's connection was closed; fails if it stays open. `use` gets an event: a request has arrived."""
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(first)
        arrived.set()
        with suppress(*GONE):
            await reader.read()
        closed.set()

    async def used(transport: Transport, url: str) -> None:
        await use(transport, url, arrived)
        async with asyncio.timeout(60):
            await closed.wait()

    over(server, used, **settings)


@pytest.mark.parametrize("answered", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_cancelled_send_closes_its_connection(answered: bytes) -> None:
    async def cancel(transport: Transport, url: str, arrived: asyncio.Event) -> None:
        sending = asyncio.ensure_future(post(transport, url))
        await arrived.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    closed_by_the_client(cancel, answered)


def test_a_send_that_runs_out_of_time_closes_its_connection() -> None:
    async def wait(transport: Transport, url: str, arrived: asyncio.Event) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await post(transport, url)

    closed_by_the_client(wait, timeout=SECOND)


def test_a_connection_that_no_send_needs_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the server does, and without another request."""
    monkeypatch.setattr(dispatchers.adapters.connection_pool, "KEEP_SECONDS", 0.05)

    async def once(transport: Transport, url: str, arrived: asyncio.Event) -> None:
        await post(transport, url)

    closed_by_the_client(once, OK)


@pytest.mark.parametrize(("how", "whole"), [("closed", True), ("reset", False)])
def test_a_body_that_only_a_close_ends_is_not_whole_after_a_reset(
    how: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = asyncio.Event()
    feed = AnswerReader.feed

    def feed_and_note(reader: AnswerReader, data: bytes) -> None:
        feed(reader, data)
        arrived.set()

    monkeypatch.setattr(AnswerReader, "feed", feed_and_note)

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n{}")
        await arrived.wait()
        if how == "reset":
            reset(writer)

    async def once(transport: Transport, url: str) -> Answer:
        return await post(transport, url)

    answer = over(break_off, once)

    assert (answer.status, answer.body, answer.whole) == (200, b"{}", whole)


def test_a_body_that_only_a_close_ends_is_not_whole_over_tls(tmp_path: Path) -> None:
    """A proxy can close the connection too."""
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:localhost")

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n[1")

    async def scenario() -> Answer:
        async with serving(close, server_tls) as port:
            return await post(Transport(timeout=60 * SECOND, tls=client_tls), f"https://localhost:{port}")

    answer = asyncio.run(scenario())

    assert (answer.status, answer.body, answer.whole) == (200, b"[1", False)


# --- never sent twice


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_request_is_never_repeated_on_another_connection(method: str, how: str) -> None:
    """Though HTTP clients like to, where the connection was used before: the server has read it."""
    seen: list[bytes] = []

    async def lose_the_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await whole_request(reader))
            if len(seen) == 2:
                if how == "reset":
                    reset(writer)
                return
            writer.write(OK)

    async def two(transport: Transport, url: str) -> None:
        await transport.send(httpx.Request(method, url))
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)) as lost:
            await transport.send(httpx.Request(method, url))
        assert not isinstance(lost.value, NEVER_SENT)

    over(lose_the_second, two)

    assert len(seen) == 2


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_close_before_the_answer_ends_the_wait_at_once(interim: bytes) -> None:
    async def half_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(interim)
        writer.write_eof()
        await reader.read()

    async def lost(transport: Transport, url: str) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await post(transport, url)

    over(half_close, lost)


# --- surely not sent


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


@pytest.mark.parametrize("name", ["DNS:localhost", "DNS:another.test"])
def test_a_certificate_for_another_host_means_that_nothing_was_sent(tmp_path: Path, name: str) -> None:
    server_tls, client_tls = tls_contexts(tmp_path, name)
    seen: list[bytes] = []

    async def scenario() -> None:
        async with serving(answering(seen=seen), server_tls) as port:
            transport = Transport(timeout=60 * SECOND, tls=client_tls)
            if name == "DNS:localhost":
                statuses = [(await post(transport, f"https://localhost:{port}")).status for _ in range(2)]
                assert statuses == [200, 200]
            else:
                with pytest.raises(httpx.ConnectError):
                    await post(transport, f"https://localhost:{port}")
            await transport.aclose()

    asyncio.run(scenario())

    assert len(seen) == (2 if name == "DNS:localhost" else 0)


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
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_REQUIRED"):
            asyncio.run(post(transport, f"https://localhost:{listener.getsockname()[1]}"))
        answered.set()
        thread.join()


def test_an_untrusted_certificate_means_that_nothing_was_sent(tmp_path: Path) -> None:
    server_tls, _ = tls_contexts(tmp_path, "DNS:localhost")
    seen: list[bytes] = []

    async def scenario() -> None:
        async with serving(answering(seen=seen), server_tls) as port:
            transport = Transport(timeout=60 * SECOND)
            with pytest.raises(httpx.ConnectError):
                await post(transport, f"https://localhost:{port}")

    asyncio.run(scenario())

    assert seen == []


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


@pytest.mark.parametrize(("method", "length"), [("POST", b"Content-Length: 0\r\n"), ("GET", b"")])
def test_a_request_without_content_is_framed_as_its_method_needs(method: str, length: bytes) -> None:
    seen: list[bytes] = []

    async def once(transport: Transport, url: str) -> None:
        await transport.send(Outgoing(method, Target.of(httpx.URL(url))._replace(host="crm.test"), [("X-A", "ü")]))

    over(answering(seen=seen), once)

    expected = b"%b / HTTP/1.1\r\nHost: crm.test\r\nX-A: \xfc\r\nAccept-Encoding: identity\r\n%b\r\n"
    assert seen == [expected % (method.encode(), length)]


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


# --- proxies


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


def tunnelling(port: int, asked: list[bytes]) -> Server:
    """A proxy whose tunnels all lead to `port`. asked: where what it was asked for is put."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await whole_request(reader))
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.0 200 Connection established\r\n\r\n")
        await asyncio.gather(pour(reader, far_writer), pour(far_reader, writer), return_exceptions=True)

    return tunnel


# --- event loops and tests


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what is left open is closed by the collector
def test_threads_with_event_loops_of_their_own_share_a_transport() -> None:
    transport = Transport(timeout=60 * SECOND)
    both = threading.Barrier(2)
    statuses: list[int] = []

    async def send(url: str) -> None:
        for _ in range(20):
            both.wait()
            statuses.append((await post(transport, url)).status)

    async def scenario() -> None:
        async with listening(answering()) as url:
            threads = [asyncio.to_thread(asyncio.run, send(url)) for _ in range(2)]
            await asyncio.gather(*threads)

    asyncio.run(scenario())
    gc.collect()

    assert statuses == [200] * 40


@pytest.mark.parametrize("using", ["httpcore", "httpx.AsyncHTTPTransport.handle_async_request"])
def test_what_replaces_httpx_in_a_test_answers_and_no_request_leaves(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As respx does by default, and pytest-httpx."""
    seen: list[bytes] = []

    async def answer(self: Any, request: httpx.Request) -> httpx.Response:
        return httpx.Response(418)

    async def teapot(transport: Transport, url: str) -> int:
        if using != "httpcore":
            monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
            return (await post(transport, url)).status
        with respx.mock(base_url=url) as api:
            api.post("/x").respond(418)
            return (await post(transport, url)).status

    assert over(answering(seen=seen), teapot) == 418
    assert seen == []
