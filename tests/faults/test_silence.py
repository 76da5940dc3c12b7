"""A connection to the database that a proxy has forgotten is dropped, and the dispatcher continues with another one."""

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from support.database import Database
from support.entries import dispatcher, put, put_one, settlement_row, until_true
from support.relays import Relay, relay

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.connections import watchdog
from dispatchers.store.connections.transactions import Transactions
from dispatchers.store.connections.watchdog import DatabaseSilent, Silence, Timeouts

LEASE = timedelta(seconds=8)


def engine_of(driver: str, url: sa.URL, **settings: Any) -> Any:
    make = sa.create_engine if driver == "psycopg" else create_async_engine
    return make(url.set(drivername=f"postgresql+{driver.removesuffix(' async')}"), **settings)


@pytest.mark.parametrize("pings", [True, False], ids=["pinged", "not pinged"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg async", "asyncpg"])
def test_a_dispatcher_continues_with_new_connections_when_its_own_are_lost(
    postgresql: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, driver: str, pings: bool
) -> None:
    service = MemoryAdapter(timeout=timedelta(seconds=1))
    first = put_one(postgresql, ob)

    async def main(url: sa.URL, forget: Any) -> None:
        engine = engine_of(driver, url, pool_pre_ping=pings)
        working = dispatcher(engine, ob, adapters={"crm": service}, lease=LEASE, margin=timedelta(seconds=1))
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: settlement_row(postgresql, first) is not None)
        forget()
        later = put(postgresql, ob, count=3)
        await until_true(lambda: all(settlement_row(postgresql, id) is not None for id in later), 60)
        stopping.set()
        await pump
        await working.close()
        await asyncio.to_thread(engine.dispose) if driver == "psycopg" else await engine.dispose()

    with caplog.at_level(logging.WARNING), relay(postgresql.url) as (between, url):
        asyncio.run(main(url, between.forget))

    assert set(service.effects.values()) == {1}
    assert "the database has not answered for 1.6 s" in caplog.text
    assert "the database has not answered for 3.2 s" in caplog.text


def test_work_that_was_given_up_does_not_begin_when_the_database_answers(postgresql: Database) -> None:
    """A claim would lease entries that no dispatcher sends: they would be in doubt."""
    begun: list[sa.Connection] = []

    async def main(url: sa.URL, carrying: Relay) -> None:
        carrying.swallow()
        engine = sa.create_engine(url)
        working = Transactions(engine, None, timedelta(seconds=2))
        with pytest.raises(DatabaseSilent):
            await working.run(begun.append)
        carrying.resume()
        await until_true(lambda: engine.pool.checkedin() and not engine.pool.checkedout())  # type: ignore[attr-defined]
        await working.close(dispose=True)

    with relay(postgresql.url) as (carrying, url):
        asyncio.run(main(url, carrying))

    assert begun == []


def test_silence_is_over_before_half_a_lease_is_gone() -> None:
    for seconds in (4, 60, 3600):
        timeouts = Timeouts(timedelta(seconds=seconds))
        assert timeouts.report < timeouts.drop < timeouts.give_up < seconds / 2
        assert timeouts.report <= 15


def test_the_log_of_a_silent_database_names_no_function(postgresql: Database, caplog: pytest.LogCaptureFixture) -> None:
    async def main(url: sa.URL) -> None:
        working = Transactions(sa.create_engine(url), None, timedelta(seconds=2))
        with pytest.raises(DatabaseSilent):
            await working.run(lambda connection: None)
        await working.close(dispose=True)

    with relay(postgresql.url) as (carrying, url):
        carrying.swallow()
        asyncio.run(main(url))

    assert "has not answered for 0.8 s (a query); after 1.6 s this process drops the connection" in caplog.text


@pytest.mark.parametrize("limits", [(0.02, 0.03, 0.04), (0.17, 0.18, 0.19)], ids=["far over", "just over"])
def test_a_blocked_event_loop_is_not_taken_for_a_silent_database(
    postgresql: Database,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[float, float, float],
) -> None:
    timeouts = Timeouts(timedelta(seconds=60))
    timeouts.report, timeouts.drop, timeouts.give_up = limits
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "MAX_PART_SECONDS", 0.05)
    silence = Silence(postgresql.engine, timeouts, "a query")
    answered, given_up = threading.Event(), list[bool]()

    def answer() -> int:
        answered.set()
        return 7

    async def main() -> int:
        waiting = asyncio.ensure_future(silence.wait(working(), lambda: given_up.append(True)))
        await asyncio.sleep(0)
        answered.wait(30)
        time.sleep(0.2)  # noqa: ASYNC251  # the event loop is blocked, although the database has answered
        result: int = await waiting
        return result

    def working() -> "asyncio.Future[int]":
        return asyncio.wrap_future(pool.submit(answer))

    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(main()) == 7

    assert (given_up, caplog.messages) == ([], [])
