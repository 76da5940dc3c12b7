"""Real Redis servers on free ports and in a folder of their own: alone, with a replica, or as a cluster of three."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from support.free_ports import free_ports
from support.server_process import ServerProcess

MAX_READY_SECONDS = 60
BUCKETS = 16_384  # of the hashes of names


def find_redis_server() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server on PATH: install your system's package")
    return found


class Server(ServerProcess):
    """One server. It appends every write to its file before it answers, so that a kill loses nothing."""

    def __init__(self, folder: Path, port: int, *settings: str) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}"
        own = folder / str(port)
        own.mkdir()
        durable = ("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0")
        command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", *durable, *settings]
        super().__init__(command, own / "log", cwd=own)

    def start(self, *more: str) -> None:
        super().start(*more)
        self.ask("PING")

    def ask(self, *command: Any) -> Any:
        """The answer; of a server that starts, when it is there."""
        patient = Retry(ConstantBackoff(0.02), MAX_READY_SECONDS * 50)
        with redis.Redis(port=self.port, retry=patient, decode_responses=True, socket_timeout=10) as client:
            return client.execute_command(*command)

    def messages(self, stream: str) -> list[dict[str, str]]:
        """The fields of each message, in the stream's order."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            return [fields for _, fields in client.xrange(stream)]


@contextmanager
def running_servers(folder: Path, count: int, *settings: str) -> Iterator[list[Server]]:
    """Servers that do not know each other."""
    servers = [Server(folder, port, *settings) for port in free_ports(count)]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        yield servers


@contextmanager
def running_cluster(folder: Path) -> Iterator[list[Server]]:
    """Three primaries with a third of the streams each. No node is a replica."""
    ports = free_ports(6)
    buses = dict(zip(ports[:3], ports[3:], strict=True))
    servers = [
        Server(folder, port, "--cluster-enabled", "yes", "--cluster-port", str(bus)) for port, bus in buses.items()
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for number, server in enumerate(servers):
            server.ask("CLUSTER", "ADDSLOTSRANGE", BUCKETS * number // 3, BUCKETS * (number + 1) // 3 - 1)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = servers[0].port
        for server in servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", first, buses[first])
        for server in servers:
            until_whole(server)
        yield servers


def until_whole(server: Server) -> None:
    """Until it sees all three nodes of its cluster."""
    while True:
        with suppress(redis.RedisError):
            about = server.ask("CLUSTER", "INFO")
            if "cluster_state:ok" in about and "cluster_known_nodes:3" in about:
                return
        time.sleep(0.02)
