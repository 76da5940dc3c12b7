"""A temporary folder that is deleted when the process that made it ends, in any way.

python folder.py PATH        removes PATH once its standard input has ended
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 50
PAUSE_SECONDS = 0.1


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """The folder for as long as the block lasts.

    Another process removes it, at the end of a pipe that only this one holds: so it is removed after a SIGKILL too.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # A session of its own, so that a Ctrl-C at the terminal does not reach it; it needs nothing but the standard library.
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield folder


def remove(folder: Path) -> None:
    """Remove it, though processes that are being killed may still write to it for a moment."""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    sys.stdin.read()
    remove(Path(sys.argv[1]))
