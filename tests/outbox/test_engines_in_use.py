"""The first use of the outbox on an engine whose pool other threads are using at this moment."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import Database
from support.entries import dispatcher

import outbox
from dispatchers.adapters import MemoryAdapter


def enqueue(engine: sa.Engine, ob: outbox.Outbox) -> None:
    with Session(engine) as session, session.begin():
        ob.enqueue(session, "mail.send", {}, parent="order:1")


def check(engine: sa.Engine, ob: outbox.Outbox) -> None:
    ob.check(engine)


def dispatch(engine: sa.Engine, ob: outbox.Outbox) -> None:
    async def run() -> None:
        working = dispatcher(engine, ob, adapters={"mail": MemoryAdapter()})
        await working.run_once()
        await working.close()

    asyncio.run(run())


@pytest.mark.parametrize("use", [enqueue, check, dispatch])
@pytest.mark.parametrize("moment", ["connect", "checkout"])
def test_the_first_use_disturbs_no_thread_that_connects(
    postgresql: Database, ob: outbox.Outbox, moment: str, use: Callable[[sa.Engine, outbox.Outbox], None]
) -> None:
    engine = postgresql.new_engine()
    first = engine.connect()  # SQLAlchemy lets one thread alone open the first connection
    used: list[threading.Thread] = []

    def use_elsewhere(*given: object) -> None:
        if not used:
            used.append(threading.Thread(target=use, args=(engine, ob)))
            used[0].start()
            used[0].join()

    sa.event.listen(engine, moment, use_elsewhere)
    sa.event.listen(engine, moment, lambda *given: None)  # the pool has more listeners to call

    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1

    assert used
    first.close()
    engine.dispose()
