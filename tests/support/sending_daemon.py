"""A daemon that hangs in its sends until a test lets it end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import outbox
from support.database import Database
from support.entries import Daemon, GatedService, daemon, put, wait_for, write_factory

GATED = """
from support.entries import GatedService

def make():
    grace = timedelta(seconds=float(os.environ.get("GRACE", "30")))
    return Dispatcher(url, outbox=ob, adapters={"crm": GatedService(here)}, concurrency=2, grace=grace)
"""


@contextmanager
def sending_two(
    database: Database, ob: outbox.Outbox, directory: Path, body: str, **environment: str
) -> Iterator[Daemon]:
    """A daemon that has five entries to send, two at once, and hangs in the first two."""
    put(database, ob, count=5)
    write_factory(directory, body)
    with daemon(directory, database.url, **environment) as process:
        wait_for(lambda: GatedService(directory).waiting == 2, "two to be sent", workers=[process])
        yield process
