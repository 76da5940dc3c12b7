"""The transport under the HTTP adapters, over real sockets: bounded in time and size, and sparing with connections."""

import asyncio
import gc
import ssl
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
import respx
from support.loopback import Answer as Server
from support.loopback import answering, listening, say, say_without_end, whole_request
from support.transports import counting, over, post

import dispatchers.adapters.http_client.pool
from dispatchers.adapters.http_client.connection import Connection
from dispatchers.adapters.http_client.transport import Answer, Transport
from outbox.errors import ConfigurationError

SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.usefixtures("without_rest")


def send(server: Server, *, requests: int = 1, **settings: Any) -> list[Answer]:
    """The answers to requests that follow each other."""

    answers: list[Answer] = []

    async def each(transport: Transport, url: str) -> None:
        while len(answers) < requests:
            answers.append(await transport.send(httpx.Request("POST", f"{url}/x", content=b"{}")))

    over(server, each, **settings)
    return answers


# --- connections


def test_a_connection_that_has_waited_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be closing it; what meets that is in doubt."""
    monkeypatch.setattr(dispatchers.adapters.http_client.pool, "KEEP_SECONDS", 0.0)
    connections, server = counting(answering())

    send(server, requests=3)

    assert len(connections) == 3


def test_requests_at_the_same_time_have_a_connection_each() -> None:
    both_arrived = asyncio.Barrier(2)

    async def together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await both_arrived.wait()
        await say(writer, 200, b"")

    async def at_once(transport: Transport, url: str) -> list[Answer]:
        return await asyncio.gather(*(transport.send(httpx.Request("POST", url)) for _ in range(2)))

    assert [answer.status for answer in over(together, at_once)] == [200, 200]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what is left open is closed by the collector
def test_it_outlives_its_event_loop_and_its_own_closing(closed: bool) -> None:
    """Though the server would continue on a connection of the loop that is gone."""
    transport = Transport(timeout=SECOND)

    async def once(url: str, closed: bool = True) -> int:
        answer = await transport.send(httpx.Request("POST", url))
        if closed:
            await transport.aclose()
        return answer.status

    with ThreadingHTTPServer(("127.0.0.1", 0), KeepAlive) as server:
        Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        statuses = [asyncio.run(once(url, closed)), asyncio.run(once(url))]
        server.shutdown()
    gc.collect()

    assert statuses == [204, 204]


class KeepAlive(BaseHTTPRequestHandler):
    """Takes everything, and keeps its connections."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_what_is_handed_in_carries_everything_and_is_not_closed() -> None:
    class Given(httpx.MockTransport):
        async def aclose(self) -> None:
            raise AssertionError("it belongs to its creator")

    async def twice() -> list[int]:
        transport = Transport(timeout=SECOND, transport=Given(lambda request: httpx.Response(204)))
        statuses = [(await transport.send(httpx.Request("POST", "https://crm.test"))).status for _ in range(2)]
        await transport.aclose()
        return statuses

    assert asyncio.run(twice()) == [204, 204]


def test_the_trust_that_is_given_is_the_one_that_is_used() -> None:
    class IdentityCheck(ssl.SSLContext):
        used = False

        def wrap_bio(self, *args: Any, **settings: Any) -> ssl.SSLObject:
            self.used = True
            return super().wrap_bio(*args, **settings)

    async def in_clear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"not TLS")

    async def over_tls(transport: Transport, url: str) -> None:
        with pytest.raises(httpx.ConnectError):
            await transport.send(httpx.Request("POST", url.replace("http", "https", 1)))

    watched = IdentityCheck(ssl.PROTOCOL_TLS_CLIENT)
    over(in_clear, over_tls, tls=watched)

    assert watched.used


# --- proxies


def test_the_proxy_that_is_asked_for_carries_the_request() -> None:
    seen: list[bytes] = []

    async def scenario() -> Answer:
        async with listening(answering(seen=seen)) as proxy:
            transport = Transport(timeout=SECOND, proxy=proxy)
            answer = await transport.send(httpx.Request("POST", "http://crm.test/x"))
            await transport.aclose()
            return answer

    assert asyncio.run(scenario()).status == 200
    assert seen[0].startswith(b"POST http://crm.test/x HTTP/1.1")


# --- time


def test_a_deadline_within_the_body_leaves_the_status_and_what_had_come() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 201 Made\r\nContent-Length: 99999\r\n\r\n", b"x", pause=0.01)

    answer = over(drip, post, timeout=2 * SECOND)

    assert (answer.status, answer.whole) == (201, False)
    assert answer.body
    assert set(answer.body) == set(b"x")


def test_it_ends_before_the_dispatcher_would_cancel_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled send returns no answer, and so the status would be lost."""
    left: list[float] = []

    async def broken(connection: Connection, request: bytes, reader: object, deadline: float) -> None:
        left.append(deadline - connection.loop.time())
        raise TimeoutError

    monkeypatch.setattr(Connection, "ask", broken)
    with pytest.raises(httpx.ReadTimeout):
        over(answering(), post, timeout=2 * SECOND)

    assert left[0] < 1.95


# --- the answer


@pytest.mark.parametrize(("max_bytes", "whole"), [(4, True), (3, False)])
def test_a_body_as_long_as_the_bound_is_whole(max_bytes: int, whole: bool) -> None:
    (answer,) = send(answering(200, None), max_answer_bytes=max_bytes)

    assert (answer.body, answer.whole) == (b"null"[:max_bytes], whole)


def test_a_body_that_breaks_whatever_way_leaves_the_status() -> None:
    class Breaking(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("a defect")

        async def aclose(self) -> None:
            raise RuntimeError("another")

    mock = httpx.MockTransport(lambda request: httpx.Response(200, stream=Breaking()))
    transport = Transport(timeout=SECOND, transport=mock)

    answer = asyncio.run(transport.send(httpx.Request("POST", "https://crm.test")))

    assert (answer.status, answer.body, answer.whole) == (200, b"half", False)


def test_an_answer_shows_its_status_and_neither_headers_nor_body() -> None:
    shown = repr(Answer(200, httpx.Headers({"Set-Cookie": "secret"}), b"secret"))

    assert shown == "Answer(status=200, whole=True)"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"timeout": 5}, "timeout must be a positive timedelta, not 5"),
        ({"timeout": timedelta(0)}, "timeout must be a positive timedelta, not datetime.timedelta(0)"),
        ({"max_answer_bytes": -1}, "max_answer_bytes must be a number of bytes, 0 or more, not -1"),
        (
            {"proxy": "socks5://u:p@h"},
            "proxy must be a URL http://HOST:PORT or https://HOST:PORT (it is not shown)",
        ),
        (
            {"proxy": "http://h", "transport": httpx.MockTransport(lambda request: httpx.Response(200))},
            "transport replaces all connections, so it goes with no proxy",
        ),
    ],
)
def test_settings_with_which_nothing_could_be_sent_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Transport(**{"timeout": SECOND, **settings})

    assert str(refusal.value) == text


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


def test_while_respx_is_active_it_answers_and_no_request_leaves() -> None:
    seen: list[bytes] = []

    async def teapot(transport: Transport, url: str) -> int:
        with respx.mock(base_url=url) as api:
            api.post("/x").respond(418)
            return (await post(transport, url)).status

    assert over(answering(seen=seen), teapot) == 418
    assert seen == []


def test_while_pytest_httpx_is_active_it_answers_and_no_request_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def answer(self: Any, request: httpx.Request) -> httpx.Response:
        return httpx.Response(418)

    answer.__module__ = "pytest_httpx"

    async def teapot(transport: Transport, url: str) -> int:
        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
        return (await post(transport, url)).status

    assert over(answering(seen=seen), teapot) == 418
    assert seen == []
