"""Child processes that never outlive the demo."""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_START_SECONDS = 120
LOOK_EVERY_SECONDS = 0.05
GRACE_SECONDS = 3
LOG_TAIL_LINES = 15


class ChildDied(RuntimeError):
    """A process ended that should not have; the text has the end of its log."""


class Child:
    """One running process. Its output goes to a log of its own, but for the first line of one that has an address."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self._log = log

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL: it cannot clean up."""
        self.process.kill()
        self.process.wait()

    def first_line(self) -> str:
        """Wait for the first line that it prints."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], MAX_START_SECONDS)
        line = self.process.stdout.readline().decode().strip() if ready else ""
        if not line:
            self.process.kill()
            raise self.died()
        return line

    def logged(self, pattern: str) -> str | None:
        """Wait until its log has the pattern, and return the group in it; None if the process has ended."""
        deadline = time.monotonic() + MAX_START_SECONDS
        while not (found := re.search(pattern, self._log.read_text(errors="replace"))):
            if not self.running:
                return None
            if time.monotonic() > deadline:
                self.process.kill()
            time.sleep(LOOK_EVERY_SECONDS)
        return found[1]

    def died(self) -> ChildDied:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ChildDied("\n".join([f"{self.name} ended with status {self.process.wait()}:", *lines]))


class Children:
    """Starts processes; `children()` makes one and sees to it that they end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Child] = []

    def start(
        self, name: str, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Child:
        """Run `python -m module` with `environment` on top of our own."""
        log = self._folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                # A Ctrl-C at the terminal is for the demo alone; it then ends them in order.
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
            )
        child = Child(name, process, log)
        self._started.append(child)
        return child

    def stop_all(self) -> None:
        living = [child.process for child in reversed(self._started) if child.running]
        for process in living:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        for child in self._started:
            if child.process.stdout is not None:
                child.process.stdout.close()


@contextlib.contextmanager
def children(folder: Path) -> Iterator[Children]:
    """Processes for as long as the block lasts. If the demo itself is killed, the kernel (Linux) kills them."""
    made = Children(folder)
    try:
        yield made
    finally:
        made.stop_all()


def die_with(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)

    return before_exec
