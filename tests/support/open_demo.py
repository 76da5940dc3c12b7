"""The demo, and its shop that `demo --stay` keeps open, in processes forked from one that has the imports."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from support.database import IMPORT_PATH
from support.python_processes import PIPE, STDOUT, PythonProcess, fork_server_socket

ROOT = Path(__file__).parents[2]
LAST_LINE = "Ctrl-C stops"  # printed when its first customers are served


def demo_process(*arguments: str, stdout: IO[str] | int) -> PythonProcess:
    """`python -m examples.demo ARGUMENTS`. The processes that it starts are forked too."""
    variables = {
        **os.environ,
        "FORK_SERVER": str(fork_server_socket().fileno()),
        "PYTHONPATH": os.pathsep.join([IMPORT_PATH, str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
    }
    program = ["-m", "support.apps.forked_demo", *arguments]
    return PythonProcess(*program, cwd=ROOT, env=variables, stdout=stdout, stderr=STDOUT)


@contextmanager
def open_demo(*arguments: str) -> Iterator[str]:
    """What the demo has printed until it is open. At the block's end it is stopped by Ctrl-C, and must end without an error."""
    with demo_process("--stay", *arguments, stdout=PIPE) as process:
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
