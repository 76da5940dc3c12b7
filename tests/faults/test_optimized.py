"""`python -O`, which leaves out every `assert` of the product."""

import os
import subprocess
import sys
from pathlib import Path

import sqlalchemy as sa

TESTS = Path(__file__).parents[1]
PART = (
    *("adapters/test_connection.py", "adapters/test_memory_adapter.py", "dispatchers/pipeline/test_run_once.py"),
    "outbox/enqueue/test_enqueue.py",
)


def test_a_part_of_the_tests_passes_without_asserts_in_the_product(server_url: sa.URL) -> None:
    """Those of the tests are kept: pytest has rewritten them."""
    options = ["-q", "-p", "no:cacheprovider", "-n0", "--one-case", "-W", "ignore::pytest.PytestConfigWarning"]
    server = {"OUTBOX_TEST_DATABASE_URL": server_url.render_as_string(hide_password=False)}
    command = [sys.executable, "-O", "-m", "pytest", *options, *(str(TESTS / part) for part in PART)]

    done = subprocess.run(command, cwd=TESTS.parent, env=os.environ | server, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
