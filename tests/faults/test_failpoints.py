"""Processes killed at every named point: what the services did equals what the outbox says, each time."""

import os

import pytest
from support.crash import ROUNDS_IN_CI
from support.database import IMPORT_PATH, Database
from support.python_processes import run_python

from dispatchers.testing.failpoints import POINTS, failpoint
from outbox.errors import InvalidValue


def test_a_process_killed_at_any_point_leaves_nothing_untrue(postgresql: Database) -> None:
    kill_at_each_point(postgresql)


def test_a_process_killed_at_any_point_leaves_nothing_untrue_on_mysql(mysql: Database) -> None:
    kill_at_each_point(mysql)


def kill_at_each_point(database: Database) -> None:
    """All points in one test: what recovers is one process, which has prepared its statements after the first."""
    url = database.url.render_as_string(hide_password=False)
    done = run_python(
        *("-m", "support.crash", "--url", url, "--rounds", str(ROUNDS_IN_CI)),
        env=os.environ | {"PYTHONPATH": IMPORT_PATH},
    )

    expected = [f"{point}: {ROUNDS_IN_CI} killed, all is true" for point in POINTS]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stdout + done.stderr


def test_a_point_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidValue, match=r"failpoint 'settle.never': must be one of \['callback.after_commit', "):
        failpoint("settle.never").__enter__()


@pytest.mark.parametrize("point", POINTS)
def test_a_failpoint_leaves_nothing_active_when_its_block_ends(point: str) -> None:
    seam = POINTS[point]
    before = [getattr(owner, seam.name) for owner in seam.owners]

    with failpoint(point):
        assert [getattr(owner, seam.name) for owner in seam.owners] != before

    assert [getattr(owner, seam.name) for owner in seam.owners] == before
