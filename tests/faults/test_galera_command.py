"""What `python3 dev.py galera` leaves on the machine. dev.py itself could make the environment of this run again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.database import IMPORT_PATH
from support.galera_cluster import missing_part


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_starts_a_cluster_removes_it_when_it_ends(end: signal.Signals, tmp_path: Path) -> None:
    """The signal reaches the command's own process only, as that of a supervisor."""
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    command = [sys.executable, "-m", "support.galera_cluster"]
    variables = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": IMPORT_PATH}

    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables) as running:
        assert running.stdout is not None
        running.stdout.readline()  # it has begun
        running.send_signal(end)

    assert (running.returncode, list(tmp_path.iterdir())) == (0, [])
