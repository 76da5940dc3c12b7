"""Record, order and entries are all there or none, wherever in the transaction the app is killed; and a retry heals."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.apps.crashing_shop import place_order
from support.database import ALL, NOTHING
from support.python_processes import PIPE, PythonProcess

TESTS = Path(__file__).parents[2]
KILLED = -signal.SIGKILL


class CrashingShop:
    """The process of crashing_shop.py."""

    def __init__(self, process):
        self._process = process

    def request(self, moment):
        """Handle one request and be killed at that moment of it; how it ended."""
        self._process.stdin.write(f"{moment}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def crashing_shop(database) -> Iterator[CrashingShop]:
    url = database.url.render_as_string(hide_password=False)
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    with PythonProcess(
        TESTS / "support" / "apps" / "crashing_shop.py",
        url,
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        yield CrashingShop(process)


def rows_of(database, moment):
    """What there is of the request that was killed at this moment."""
    ids = {entry.id for entry in database.entries if entry.parent == f"retry-{moment}"}
    return {
        "orders": sum(order.customer == f"customer {moment}" for order in database.orders),
        "records": sum(record.parent == f"retry-{moment}" for record in database.records),
        "entries": len(ids),
        "queue": sum(row.id in ids for row in database.queue),
    }


def test_a_request_killed_at_any_moment_and_its_retry_make_one_order(database):
    found = []

    with crashing_shop(database) as shop:
        moment = 1
        while shop.request(moment) == KILLED:
            found.append(rows_of(database, moment))
            response = place_order(database.engine, moment)
            assert response.json() == {"order": moment}
            assert rows_of(database, moment) == ALL, f"after the retry of what was killed at moment {moment}"
            moment += 1
    survived = rows_of(database, moment)

    # Each statement has two moments, and only after the commit is there anything.
    assert len(found) > 12
    assert found == [NOTHING] * (len(found) - 1) + [ALL]
    assert survived == ALL
    assert len(database.queue) == moment
