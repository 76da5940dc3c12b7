"""A real Restate server on free ports and in a folder of its own, with a service that notes what it runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.daemons import wait_for
from support.database import IMPORT_PATH
from support.free_ports import free_ports
from support.server_process import ServerProcess

MAX_READY_SECONDS = 60


def find_restate_server() -> str:
    """The program itself, not npm's script that starts it; skips the test where there is none."""
    script = shutil.which("restate-server")
    if script is None:
        pytest.skip("there is no restate-server on PATH: npm install --global @restatedev/restate-server")
    package = Path(script).resolve().parent.parent
    return str(next(package.rglob("restate-server-*/bin/restate-server"), script))


class Restate(ServerProcess):
    """The server, and the process of its service. url: of its ingress."""

    def __init__(self, folder: Path) -> None:
        ingress, admin, fabric, self._service_port = free_ports(4)
        self.url = f"http://127.0.0.1:{ingress}"
        self._admin = f"http://127.0.0.1:{admin}"
        self._runs = folder / "runs"
        self._runs.touch()
        settings = folder / "restate.toml"
        settings.write_text(
            f'cluster-name = "test"\nbase-dir = "{folder}/data"\nlisten-mode = "tcp"\nbind-ip = "127.0.0.1"\n'
            f'bind-port = {fabric}\ndisable-telemetry = true\ndefault-num-partitions = 2\nrocksdb-total-memory-size = "64 MB"\n'
            f'[ingress]\nbind-address = "127.0.0.1:{ingress}"\n[admin]\nbind-address = "127.0.0.1:{admin}"\n'
        )
        super().__init__([find_restate_server(), "--no-logo", "-c", str(settings)], folder / "log")

    def start(self, *more: str) -> None:
        super().start(*more)
        wait_for(lambda: self._answers(f"{self._admin}/health"), "Restate's admin API", MAX_READY_SECONDS)
        wait_for(lambda: self._answers(f"{self.url}/restate/health"), "Restate's ingress", MAX_READY_SECONDS)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run the service, and register it."""
        command = [sys.executable, "-m", "uvicorn", "support.restate_service:app", "--log-level", "warning"]
        environment = os.environ | {"PYTHONPATH": IMPORT_PATH, "RUNS": str(self._runs)}
        with self._log.open("ab") as log:
            service = subprocess.Popen(
                [*command, "--port", str(self._service_port)], env=environment, stdout=log, stderr=log
            )
        try:
            url = f"http://127.0.0.1:{self._service_port}"
            wait_for(lambda: self._answers(f"{url}/restate/health"), "the service", MAX_READY_SECONDS)
            httpx.post(
                f"{self._admin}/deployments", json={"uri": url, "use_http_11": True}, timeout=60
            ).raise_for_status()
            yield
        finally:
            service.kill()
            service.wait(MAX_READY_SECONDS)

    def runs_of(self, handler: str, key: str, number: str) -> set[str]:
        """The invocations of a handler with this input. A handler may run several times in one invocation."""
        lines = [line.split("\t") for line in self._runs.read_text().splitlines()]
        return {id for *found, id in lines if found == [handler, key, number]}

    @staticmethod
    def _answers(url: str) -> bool:
        try:
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def running_restate(folder: Path) -> Iterator[Restate]:
    server = Restate(folder)
    server.start()
    try:
        with server.serving():
            yield server
    finally:
        server.kill()
