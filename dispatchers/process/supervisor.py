"""Reports to systemd that the process is ready, alive and stopping, by the protocol of sd_notify(3)."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

log = logging.getLogger("outbox.daemon")

LOOK_SECONDS = 1.0  # between two looks at whether the process is ready


class Supervisor(NamedTuple):
    """address: the socket that takes the reports. watchdog: how many seconds may pass between two reports; None: any number."""

    address: str
    watchdog: float | None

    def report(self, *lines: str) -> None:
        """Send one report. A report that cannot be sent is logged, and changes nothing else."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as reports:
                reports.setblocking(False)  # a supervisor that does not read must not block the sends
                reports.connect(self.address)
                reports.send("\n".join(lines).encode())
        except OSError as error:
            log.warning("the supervisor at NOTIFY_SOCKET does not take reports: %s", error.strerror or error)


def supervisor_of(variables: Mapping[str, str]) -> Supervisor | None:
    """The supervisor that the process's variables name; None if none waits for reports.

    `WATCHDOG_PID` names the process that must report, so that a child does not report for its parent.
    """
    address = variables.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    microseconds = variables.get("WATCHDOG_USEC", "")
    is_ours = variables.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog = int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) and is_ours else None
    return Supervisor("\0" + address[1:] if address.startswith("@") else address, watchdog)


@asynccontextmanager
async def supervised(
    supervisor: Supervisor | None, unready: Callable[[], str | None], stopping: asyncio.Event
) -> AsyncIterator[None]:
    """Report to the supervisor until the end of the block.

    unready: returns why the process sends nothing, None if it sends. This is only the status: the process is ready from the
    start, because it must not be ended while it waits for its database, or for an operator who resumes sending. The reports
    come from the event loop. So they stop when it is blocked for too long, and the watchdog ends the process.
    """
    if supervisor is None:
        yield
        return
    reports = asyncio.get_running_loop().create_task(_report(supervisor, unready, stopping))
    try:
        yield
    finally:
        reports.cancel()


async def _report(supervisor: Supervisor, unready: Callable[[], str | None], stopping: asyncio.Event) -> None:
    seconds = LOOK_SECONDS if supervisor.watchdog is None else min(LOOK_SECONDS, supervisor.watchdog / 2)
    told = ""
    supervisor.report("READY=1")
    while True:
        is_stopping = stopping.is_set()
        status = "draining" if is_stopping else unready() or "sending"
        lines = ["WATCHDOG=1"] if supervisor.watchdog is not None else []
        if status != told:
            lines += [f"STATUS={status}", *(["STOPPING=1"] if is_stopping else [])]
            told = status
        if lines:
            supervisor.report(*lines)
        with suppress(TimeoutError):  # a stop is reported immediately
            await asyncio.wait_for(asyncio.Event().wait() if is_stopping else stopping.wait(), seconds)
