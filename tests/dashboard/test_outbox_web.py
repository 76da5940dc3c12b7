"""`outbox web` as a process: it serves the dashboard until SIGTERM."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.cli_runner import put_uncertain
from support.database import IMPORT_PATH, Database
from support.python_processes import DEVNULL, PIPE, STDOUT, PythonProcess

import outbox

OUTBOX = Path(sys.executable).parent / "outbox"


@contextmanager
def serving(database: Database, folder: Path, *options: str) -> Iterator[str]:
    """The address of `outbox web`, which must then end well at a SIGTERM."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    variables = ours | {"DATABASE_URL": database.url.render_as_string(hide_password=False), "PYTHONPATH": IMPORT_PATH}
    command = (OUTBOX, "web", "--port", "0", *options)
    with PythonProcess(*command, cwd=folder, env=variables, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                try:
                    yield found[0]
                finally:
                    process.terminate()
                process.wait()
                break
    assert process.returncode in (0, -signal.SIGTERM), seen


def test_without_a_sign_in_it_serves_this_machine_and_decides_nothing(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    id = put_uncertain(database, ob)

    with serving(database, tmp_path) as address:
        page = httpx.get(address)
        refusal = httpx.post(
            f"{address}/api/entries/{id}/decide",
            json={"decision": "happened", "reason": "x"},
            headers={"Authorization": "Bearer t"},
        )
        foreign = httpx.get(address, headers={"Host": "evil.example"})

    assert "no answer within 30 s" in page.text
    assert (refusal.status_code, refusal.json()["code"]) == (403, "role")
    assert foreign.status_code == 421


def test_it_asks_the_app_s_own_function_who_sends_a_request(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put_uncertain(database, ob)
    (tmp_path / "ops.py").write_text(
        "from dispatchers.dashboard import Identity\n"
        "def who(request):\n"
        "    return Identity('ada', ['operator']) if request.headers.get('x-key') == 's3cret' else None\n"
    )

    with serving(database, tmp_path, "--authenticate", "ops:who", "--root-path", "/tools") as address:
        known, unknown = httpx.get(address, headers={"X-Key": "s3cret"}), httpx.get(address)

    assert (known.status_code, unknown.status_code) == (200, 401)
    assert 'href="/tools/entries"' in known.text


@pytest.mark.parametrize("line", ["", "import nothing_of_that_name"])
def test_a_wrong_function_ends_it_at_once(sqlite: Database, tmp_path: Path, line: str) -> None:
    (tmp_path / "ops.py").write_text(line)
    variables = {**os.environ, "DATABASE_URL": str(sqlite.url), "PYTHONPATH": IMPORT_PATH}
    command = (OUTBOX, "web", "--authenticate", "ops:who")

    with PythonProcess(*command, cwd=tmp_path, env=variables, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        process.wait()

    assert process.returncode != 0
    assert "ops" in printed or "nothing_of_that_name" in printed
