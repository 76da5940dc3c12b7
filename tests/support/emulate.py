"""Another team's imitation of Resend: `emulate` of npm, by Vercel. It remembers keys for 24 hours, as Resend does."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.daemons import wait_for
from support.free_ports import free_ports
from support.server_process import ServerProcess

INSTALL = "npm install --global emulate@0.12.2"  # npm's `latest` is an older package of another author
LEAST_NODE = (22, 15)  # the first with module.registerHooks()


@contextmanager
def emulated_resend(folder: Path) -> Iterator[str]:
    """The URL of the imitation; skips the test where it is not installed."""
    command, (port,) = _command(), free_ports(1)
    server = ServerProcess([*command, "start", "--service", "resend", "--port", str(port)], folder / "log")
    url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        wait_for(lambda: server.has_ended_by_itself or _answers(url), "emulate", 30)
        assert not server.has_ended_by_itself, server.log
        yield url
    finally:
        server.stop()


def _command() -> list[str]:
    script, node = shutil.which("emulate"), shutil.which("node")
    if script is None or node is None:
        pytest.skip(f"there is no emulate on PATH: {INSTALL}")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_NODE:
        pytest.skip(f"emulate needs Node.js {'.'.join(map(str, LEAST_NODE))}, and this is {version.strip()}")
    return [node, str(Path(script).resolve())]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False
