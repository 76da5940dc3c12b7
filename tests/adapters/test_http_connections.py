"""When a connection of the adapters is used again and when it is closed, over real sockets."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.loopback import GONE, answering, listening, reset, say, serving, whole_request
from support.mail_servers import tls_contexts
from support.transports import counting, over, post

import dispatchers.adapters.http_client.pool
from dispatchers.adapters.http_client.answer_reader import AnswerReader
from dispatchers.adapters.http_client.transport import NEVER_SENT, Answer, Transport

SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.usefixtures("without_rest")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


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
    monkeypatch.setattr(dispatchers.adapters.http_client.pool, "KEEP_SECONDS", 0.05)

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
