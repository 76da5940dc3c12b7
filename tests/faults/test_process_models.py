"""The outbox in the servers that apps run in, which load an app and then fork, or run all requests on one thread."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.daemons import wait_for
from support.database import IMPORT_PATH, Database
from support.entries import states
from support.free_ports import free_ports

from dispatchers.testing.faulty_http import faulty_http

ORDERS = 24
SHOP = "support.apps.preloaded_shop"
BIN = Path(sys.executable).parent

SERVERS = {
    "gunicorn preload": ("gunicorn", "--preload", "-w", "3", "-b", "{address}", f"{SHOP}:app"),
    "gunicorn gevent": ("gunicorn", "-k", "gevent", "-w", "2", "-b", "{address}", f"{SHOP}:app"),
    "uwsgi": (
        *("uwsgi", "--master", "--processes", "3", "--enable-threads", "--die-on-term", "--need-app"),
        *("--http-socket", "{address}", "--module", f"{SHOP}:app"),
    ),
}


@contextmanager
def running(
    command: Sequence[str], database: Database, log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process, which must end soon after SIGTERM."""
    if not (BIN / command[0]).exists():
        pytest.skip(f"{command[0]} is not installed in this environment")
    shown = database.url.render_as_string(hide_password=False)
    environment = os.environ | {"SHOP_URL": shown, "PYTHONPATH": IMPORT_PATH} | variables
    with log.open("wb") as output:
        process = subprocess.Popen([BIN / command[0], *command[1:]], env=environment, stdout=output, stderr=output)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()
        process.wait()


def test_a_dispatcher_in_the_lifespan_of_an_app_sends_and_ends_with_it(postgresql: Database, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "uvicorn.log"
    command = ["uvicorn", "--loop", "uvloop", "--port", str(port), "support.apps.lifespan_app:app"]

    with faulty_http() as remote, running(command, postgresql, log, REMOTE=remote.url):
        wait_for(lambda: is_listening(url), "the server")
        loop = httpx.get(f"{url}/loop").json()
        for number in range(3):
            httpx.post(f"{url}/orders/{number}")
        wait_for(lambda: states(postgresql) == {"delivered": 3}, "the sends")

    assert (loop, len(remote.requests)) == ("uvloop", 3), log.read_text()
    assert "Application shutdown complete" in log.read_text()


def is_listening(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 404
    except httpx.TransportError:
        return False


def no_connection_is_shared(lines: Sequence[str]) -> bool:
    """Whether each connection was used by one process only."""
    pairs = {tuple(line.split()) for line in lines}
    return len({backend for _, backend in pairs}) == len(pairs)


@pytest.mark.parametrize("server", list(SERVERS))
def test_an_app_that_is_loaded_before_the_fork_loses_no_order(
    server: str, postgresql: Database, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [word.format(address=address) for word in SERVERS[server]]
    log = tmp_path / "server.log"

    with running(command, postgresql, log):
        wait_for(lambda: is_listening(f"http://{address}/"), "the server")
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda n: httpx.post(f"http://{address}/orders/{n}", timeout=30), range(ORDERS)))

    assert [answer.status_code for answer in answers] == [200] * ORDERS, log.read_text()
    assert no_connection_is_shared([answer.text for answer in answers])
    assert len(postgresql.orders) == len(postgresql.entries) == len(postgresql.records) == ORDERS


def test_celery_loads_the_app_before_it_forks_and_loses_no_order(postgresql: Database, tmp_path: Path) -> None:
    broker, placed, log = tmp_path / "broker", tmp_path / "placed", tmp_path / "celery.log"
    broker.mkdir()
    command = [
        "celery",
        "-A",
        f"{SHOP}:worker",
        "worker",
        "-P",
        "prefork",
        "-c",
        "3",
        "--without-mingle",
        "--without-gossip",
    ]
    variables = {"BROKER": str(broker), "PLACED": str(placed)}
    send = f"from {SHOP} import place_in_task\nfor n in range({ORDERS}): place_in_task.delay(n)"
    shown = postgresql.url.render_as_string(hide_password=False)

    with running(command, postgresql, log, **variables):
        environment = os.environ | {"SHOP_URL": shown, "PYTHONPATH": IMPORT_PATH} | variables
        subprocess.run([sys.executable, "-c", send], env=environment, check=True)
        wait_for(lambda: placed.exists() and len(placed.read_text().splitlines()) == ORDERS, "the tasks")

    assert no_connection_is_shared(placed.read_text().splitlines()), log.read_text()
    assert len(postgresql.orders) == len(postgresql.entries) == ORDERS
