"""Metrics and health over HTTP: of a running dispatcher, and for clients that are slow, hang or ask for something else."""

import asyncio
import http.client
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.daemons import Daemon, GatedService, daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import put, states, until_true

import outbox
from dispatchers.telemetry import http_server
from dispatchers.telemetry.http_server import Address, HttpServer, address_of
from outbox.errors import ConfigurationError

SERVING = """
from support.daemons import GatedService

def make():
    return Dispatcher(
        url, outbox=ob, adapters={"crm": GatedService(here)}, concurrency=2, poll=timedelta(milliseconds=50)
    )
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def asked(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()


def patiently_asked(port: int, path: str) -> tuple[int, str]:
    """To be asked again and again, without hurry."""
    time.sleep(0.1)
    return asked(port, path)


# --- of a dispatcher's process


@contextmanager
def serving(database: Database, directory: Path) -> Iterator[tuple[Daemon, int]]:
    """A dispatcher's process that serves HTTP, and its port, once it answers."""
    write_factory(directory, SERVING)
    with daemon(directory, database.url, "factory:make", "--http", "127.0.0.1:0") as process:
        wait_for(lambda: "serving /metrics" in process.output, "the server", workers=[process])
        line = next(line for line in process.output.splitlines() if "serving /metrics" in line)
        yield process, int(line.rpartition(":")[2])


def test_a_process_serves_its_metrics_and_is_ready_until_it_drains(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put(database, ob, count=3)

    with serving(database, tmp_path) as (process, port):
        wait_for(lambda: GatedService(tmp_path).waiting == 2, "two to be sent", workers=[process])
        wait_for(
            lambda: 'outbox_sends_in_flight{destination="crm"} 2.0' in patiently_asked(port, "/metrics")[1], "the gauge"
        )
        assert asked(port, "/livez") == (200, "alive\n")
        assert asked(port, "/readyz") == (200, "ready\n")

        process.terminate()
        wait_for(lambda: patiently_asked(port, "/readyz") == (503, "draining\n"), "the drain", workers=[process])
        assert asked(port, "/livez") == (200, "alive\n")
        GatedService(tmp_path).open()

        assert process.wait() == 0, process.output

    assert states(database) == {"delivered": 2, "pending": 1}


def test_a_process_whose_sending_is_suspended_is_not_ready(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    with serving(postgresql, tmp_path) as (process, port):
        wait_for(lambda: patiently_asked(port, "/readyz")[0] == 200, "the start", workers=[process])

        postgresql.execute(sa.update(TABLES.meta).values(suspended_reason="restored"))
        wait_for(lambda: patiently_asked(port, "/readyz")[0] == 503, "the reason", workers=[process])

        assert asked(port, "/readyz") == (503, "sending is suspended: restored\n")
        postgresql.execute(sa.update(TABLES.meta).values(suspended_reason=None))
        wait_for(lambda: patiently_asked(port, "/readyz")[0] == 200, "the end", workers=[process])


def test_a_process_is_not_ready_until_its_database_answers(tmp_path: Path) -> None:
    write_factory(tmp_path, SERVING)
    nowhere = sa.URL.create("postgresql+psycopg", "shop", host="127.0.0.1", port=free_port(), database="shop")

    with daemon(tmp_path, nowhere, "factory:make", "--http", "127.0.0.1:0") as process:
        wait_for(lambda: "database unavailable" in process.output, "the outage", workers=[process])
        line = next(line for line in process.output.splitlines() if "serving /metrics" in line)
        port = int(line.rpartition(":")[2])

        assert asked(port, "/readyz") == (503, "starting: the database has not been checked yet\n")
        assert asked(port, "/livez") == (200, "alive\n")


def test_a_port_in_use_is_an_error_before_the_start(sqlite: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, SERVING)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with daemon(tmp_path, sqlite.url, "factory:make", "--http", f"127.0.0.1:{port}") as process:
            assert process.wait() == 1

    assert process.output == f"outbox: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_bad_address_is_an_error_of_the_command_line(sqlite: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, SERVING)

    with daemon(tmp_path, sqlite.url, "factory:make", "--http", "9464") as process:
        assert process.wait() == 2

    assert "'9464' is not an address: write HOST:PORT, such as 127.0.0.1:9464" in " ".join(process.output.split())


# --- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", Address("127.0.0.1", 9464)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:9464", Address("::1", 9464)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert address_of(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9464", ":9464", "localhost", "localhost:", "::1:9464", "h:65536", "h:-1", "h:²", "[]:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an address: write HOST:PORT"):
        address_of(text)


# --- clients


def served(
    talk: Callable[[int], Awaitable[Any]],
    *,
    page: Callable[[], tuple[bytes, str]] = lambda: (b"metric 1\n", "text/x-metrics"),
    reason: str | None = None,
) -> Any:
    """The result of `talk`, which gets the port of a server on the same event loop."""

    async def main() -> Any:
        server = HttpServer(Address("127.0.0.1", 0), page=page, unready=lambda: reason)
        await server.start()
        assert server._server is not None
        try:
            return await talk(server._server.sockets[0].getsockname()[1])
        finally:
            server.close()

    return asyncio.run(main())


async def exchanged(port: int, request: bytes) -> str:
    """All that the server sends after these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            return (await reader.read()).decode()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /metrics?x=1 HTTP/1.1", "200 OK", "metric 1\n"),
        ("HEAD /metrics HTTP/1.0", "200 OK", ""),
        ("GET /readyz HTTP/1.1", "503 Service Unavailable", "away\n"),
        ("HEAD /readyz HTTP/1.1", "503 Service Unavailable", ""),
        ("GET / HTTP/1.1", "404 Not Found", "served are /metrics, /livez and /readyz\n"),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed", "only GET and HEAD are served\n"),
        ("DELETE /livez HTTP/1.1", "405 Method Not Allowed", "only GET and HEAD are served\n"),
        ("GET /metrics HTTP/2", "400 Bad Request", "only HTTP/1 is served\n"),
        ("nonsense", "400 Bad Request", "not a request that this server understands\n"),
        (f"GET /{'x' * 9000} HTTP/1.1", "400 Bad Request", "not a request that this server understands\n"),
    ],
)
def test_only_get_and_head_of_three_paths_are_served(request_line: str, status: str, body: str) -> None:
    answer = served(lambda port: exchanged(port, f"{request_line}\r\nHost: x\r\n\r\n".encode()), reason="away")

    head, _, rest = answer.partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}\r\n")
    assert rest == body
    assert ("\r\nAllow: GET, HEAD" in head) == status.startswith("405")
    assert "\r\nConnection: close" in head


def test_metrics_have_the_content_type_of_their_page() -> None:
    answer = served(lambda port: exchanged(port, b"GET /metrics HTTP/1.1\r\n\r\n"))

    assert "\r\nContent-Type: text/x-metrics\r\nContent-Length: 9\r\n" in answer


def test_a_client_that_sends_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.1)

    assert served(lambda port: exchanged(port, b"GET /livez HTTP/1.1\r\n")) == ""


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.1)

    asked = list[int]()

    def page() -> tuple[bytes, str]:
        asked.append(1)
        return bytes(20_000_000), "text/plain"

    async def talk(port: int) -> int:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await until_true(lambda: bool(asked))
            await until_true(lambda: len(asyncio.all_tasks()) == 1)
            client.setblocking(False)
            received = 0
            while part := await loop.sock_recv(client, 1_000_000):
                received += len(part)
            return received

    assert 0 < served(talk, page=page) < 20_000_000


def test_hanging_clients_keep_no_other_client_from_its_answer() -> None:
    async def talk(port: int) -> str:
        hanging = [await asyncio.open_connection("127.0.0.1", port) for _ in range(http_server.MAX_CLIENTS + 5)]
        answer = await exchanged(port, b"GET /livez HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            assert await hanging[0][0].read() == b""
        for _, writer in hanging:
            writer.close()
        return answer

    assert served(talk).endswith("alive\n")


def test_metrics_that_hang_take_one_thread_and_keep_nothing_from_ending() -> None:
    released, calls = threading.Event(), list[int]()

    def page() -> tuple[bytes, str]:
        calls.append(1)
        released.wait(60)
        return b"", "text/plain"

    async def talk(port: int) -> str:
        scrapes = [asyncio.ensure_future(exchanged(port, b"GET /metrics HTTP/1.1\r\n\r\n")) for _ in range(3)]
        await until_true(lambda: bool(calls))
        answer = await exchanged(port, b"GET /livez HTTP/1.1\r\n\r\n")
        for scrape in scrapes:
            scrape.cancel()
        return answer

    try:
        assert served(talk, page=page).endswith("alive\n")
        assert not released.is_set()
    finally:
        released.set()
    assert len(calls) == 1


def test_metrics_that_cannot_be_collected_are_an_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def page() -> tuple[bytes, str]:
        raise ValueError("a defect of a collector")

    with caplog.at_level(logging.ERROR):
        answer = served(lambda port: exchanged(port, b"GET /metrics HTTP/1.1\r\n\r\n"), page=page)

    assert answer.startswith("HTTP/1.1 500 ")
    assert "a defect" not in answer
    assert "a defect of a collector" in caplog.text
