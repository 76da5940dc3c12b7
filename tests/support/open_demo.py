"""The demo's shop, kept open by `demo --stay` in a process forked from one that has the imports."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.database import IMPORT_PATH
from support.python_processes import forked_commands

ROOT = Path(__file__).parents[2]
LAST_LINE = "Ctrl-C stops"  # printed when its first customers are served


@contextmanager
def open_demo(folder: Path, *arguments: str) -> Iterator[str]:
    """What the demo has printed until it is open. At the block's end it is stopped by Ctrl-C, and must end without an error."""
    variables = {**os.environ}
    inherited = forked_commands(folder, [], variables)
    variables["PYTHONPATH"] = os.pathsep.join([IMPORT_PATH, str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "support.apps.forked_demo", "--stay", *arguments],
        cwd=ROOT,
        env=variables,
        pass_fds=[inherited],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = ""
        while LAST_LINE not in printed and (line := process.stdout.readline()):
            printed += line
        try:
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            printed += process.stdout.read()
    assert process.returncode == 0, printed
