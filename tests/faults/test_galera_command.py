"""What `python3 dev.py galera` leaves on the machine. dev.py itself could make the environment of this run again."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.database import IMPORT_PATH
from support.galera_cluster import missing_part, wait_until


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_starts_a_cluster_removes_it_when_it_ends(end: signal.Signals) -> None:
    """The signal reaches the command's own process only, as that of a supervisor."""
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    command = [sys.executable, "-m", "support.galera_cluster"]

    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's own folders are closed to the servers' user
        variables = os.environ | {"TMPDIR": folder, "PYTHONPATH": IMPORT_PATH}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables) as running:
            wait_until(lambda: any(Path(folder).glob("galera*/n0")), "its first node is being made")
            running.send_signal(end)
        left = list(Path(folder).iterdir())

    assert (running.returncode, left) == (0, [])
