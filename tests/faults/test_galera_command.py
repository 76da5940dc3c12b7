"""`python3 dev.py galera` as a process: what it leaves on the machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.galera_cluster import missing_part

DEV = Path(__file__).parents[2] / "dev.py"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_starts_a_cluster_removes_it_when_it_ends(end: signal.Signals, tmp_path: Path) -> None:
    """The signal reaches the command's own process only, as that of a supervisor."""
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    command = [sys.executable, str(DEV), "galera"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}) as running:
        assert running.stdout is not None
        running.stdout.readline()  # it has begun
        running.send_signal(end)

    assert (running.returncode, list(tmp_path.iterdir())) == (0, [])
