"""What a dispatcher's process reports to systemd: ready, what it does, alive, stopping."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemons import daemon, wait_for, write_factory
from support.database import Database

from dispatchers.process.supervisor import Supervisor, supervised, supervisor_of

EFFECTS = """
def make():
    return Dispatcher(url, outbox=ob, adapters={"crm": MemoryAdapter()})
"""


@contextmanager
def listening(address: str) -> Iterator["Reports"]:
    """What is reported at this address, in lines."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind(address)
        reports.setblocking(False)
        yield Reports(reports)


class Reports(list[str]):
    def __init__(self, given: socket.socket) -> None:
        self._given = given

    def read(self) -> "Reports":
        while True:
            try:
                self.extend(self._given.recv(4096).decode().splitlines())
            except BlockingIOError:
                return self


def test_a_process_reports_that_it_is_ready_alive_and_stopping(postgresql: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, EFFECTS)
    address = str(tmp_path / "notify")
    variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000"}

    with listening(address) as reports, daemon(tmp_path, postgresql.url, **variables) as process:
        wait_for(lambda: "STATUS=sending" in reports.read(), "the first look", workers=[process])
        assert reports[0] == "READY=1"
        assert "WATCHDOG=1" in reports
        process.terminate()
        assert process.wait() == 0

        assert "STOPPING=1" in reports.read()
        assert "STATUS=draining" in reports


def test_a_process_that_waits_for_its_database_is_ready_and_says_so(postgresql: Database, tmp_path: Path) -> None:
    """It must not be ended meanwhile: when a machine starts, any of its services may come first."""
    write_factory(tmp_path, EFFECTS)
    address = str(tmp_path / "notify")
    nowhere = postgresql.url.set(host="127.0.0.1", port=1)

    with listening(address) as reports, daemon(tmp_path, nowhere, NOTIFY_SOCKET=address) as process:
        wait_for(lambda: len(reports.read()) > 1, "the status", workers=[process])
        assert reports[:2] == ["READY=1", "STATUS=starting: the database has not been checked yet"]
        process.terminate()
        assert process.wait() == 0

    assert "WATCHDOG=1" not in reports


def test_a_blocked_event_loop_sends_no_sign_of_life(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")

    async def work(reports: Reports) -> list[int]:
        counts = []
        async with supervised(Supervisor(address, watchdog=0.02), lambda: None, asyncio.Event()):
            for pause in (asyncio.sleep, time.sleep):
                before = len(reports.read())
                waiting = pause(0.2)
                if waiting is not None:
                    await waiting
                counts.append(len(reports.read()) - before)
        return counts

    with listening(address) as reports:
        while_free, while_blocked = asyncio.run(work(reports))

    assert while_free > 1
    assert while_blocked <= 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
        ({"NOTIFY_SOCKET": "/run/n"}, Supervisor("/run/n", None)),
        ({"NOTIFY_SOCKET": "@n"}, Supervisor("\0n", None)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1500000"}, Supervisor("/n", 1.5)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "0"}, Supervisor("/n", None)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, Supervisor("/n", None)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, Supervisor("/n", None)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid())}, Supervisor("/n", 1e-6)),
    ],
)
def test_the_variables_name_the_supervisor(variables: dict[str, str], expected: Supervisor | None) -> None:
    assert supervisor_of(variables) == expected


def test_a_supervisor_that_takes_no_reports_changes_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    Supervisor(str(tmp_path / "missing"), None).report("READY=1")

    assert "does not take reports: No such file or directory" in caplog.text
