"""A server program as a child of the test, which starts it, kills it, and makes it hang."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_END_SECONDS = 60


class ServerProcess:
    """log: a file, to which the program writes. settings: of the process."""

    def __init__(self, command: Sequence[str], log: Path, **settings: Any) -> None:
        self._command = command
        self._log = log
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """more: arguments for this start alone."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._command, *more], stdout=log, stderr=log, **self._settings)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Returns when all threads are stopped: until then, one of them may still answer. Connections stay open."""
        self._running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._running.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    @property
    def has_ended_by_itself(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            with suppress(subprocess.TimeoutExpired):
                process.wait(MAX_END_SECONDS)
            process.kill()
            process.wait()
