"""A shop under load whose processes are replaced one by one: the app and the dispatcher of support/rollout.py.

It runs in environments of their own, with releases that may be older than this checkout: so it imports nothing of the tests, and
uses only what every release has.
"""

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import HttpAdapter

PAUSE_SECONDS = 0.1


def make_dispatcher() -> Dispatcher:
    receiver = HttpAdapter(base_url=os.environ["RECEIVER"], window=timedelta(days=1))
    return Dispatcher(os.environ["DATABASE_URL"], adapters={"receiver": receiver})


def take_orders(orders: Path) -> None:
    """Commit orders until SIGTERM, note each in the file, and repeat earlier requests, which other processes have answered."""
    engine = connect(os.environ["DATABASE_URL"])
    outbox.check(engine)
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    rng = random.Random(orders.stem)
    number = 0
    while not ended:
        order = f"{orders.stem}-{number}"
        request(engine, order)
        with orders.open("a") as file:
            file.write(f"{order}\n")
        files = sorted(orders.parent.glob("*.orders"))
        earlier = rng.choice([order, *rng.choice(files).read_text().splitlines(keepends=True)]).strip()
        request(engine, earlier)
        number += 1
        time.sleep(PAUSE_SECONDS)


def connect(url: str) -> Engine:
    if not url.startswith("sqlite"):
        return create_engine(url, isolation_level="READ COMMITTED")  # MariaDB's default is another
    engine = create_engine(url)
    outbox.prepare_sqlite(engine)
    return engine


def request(engine: Engine, order: str) -> None:
    """As a client sends it: again, when its key is in use, which is also the answer of a locked SQLite."""
    while True:
        try:
            return answer(engine, order)
        except outbox.KeyInFlight:
            time.sleep(1)


def answer(engine: Engine, order: str) -> None:
    asked = {"order": order}
    with (
        Session(engine) as session,
        session.begin(),
        outbox.idempotent(session, order, scope="ada", content=asked) as claim,
    ):
        if not claim.replayed:
            outbox.enqueue(session, "receiver.place", {"url": "/", "json": asked})
            claim.respond(201, asked)
    assert claim.require_response().json() == asked


if __name__ == "__main__":
    take_orders(Path(sys.argv[1]))
