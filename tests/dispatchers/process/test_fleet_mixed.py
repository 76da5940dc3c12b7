"""A fleet of databases that differ: engines, clocks, revisions, rights, and trust. Each one's trouble is its own."""

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import put, run_once, states
from support.fleet import Slow, delivered, fleet, run_until

import outbox
from dispatchers import Breaker, Delivery, Limits, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.fleet_work import FleetWork


@pytest.fixture
def three(copies: Any) -> Iterator[list[Database]]:
    taken = [copies.take() for _ in range(3)]
    yield taken
    for each in taken:
        copies.give_back(each)


def fleet_of(databases: dict[str, Database], ob: outbox.Outbox, adapter: MemoryAdapter, **settings: Any) -> FleetWork:
    return fleet({name: each.url for name, each in databases.items()}, ob, adapter, **settings)


def suspend(database: Database, ob: outbox.Outbox) -> None:
    """As after a restore from a dump: the stored identity is of another server."""
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    database.execute(sa.update(TABLES.meta).values(system_identifier="1"))


def test_databases_of_three_engines_share_one_limit(
    postgresql: Database, mariadb: Database, sqlite: Database, ob: outbox.Outbox
) -> None:
    databases, service = {"postgresql": postgresql, "mariadb": mariadb, "sqlite": sqlite}, Slow()
    for each in databases.values():
        put(each, ob, count=20)

    run_until(fleet_of(databases, ob, service, concurrency=4), delivered([*databases.values()], 20))

    assert service.most == 4


def test_each_databases_trouble_is_its_own(
    three: list[Database], sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    restored, alien, good = three
    suspend(restored, ob)
    run_once(alien, outbox.Outbox(ob.configuration.keyring, env="other"), adapters={"crm": MemoryAdapter()})
    databases = {"restored": restored, "alien": alien, "outdated": sqlite, "good": good}
    for each in databases.values():
        put(each, ob, count=20)
    sqlite.execute(sa.text("ALTER TABLE outbox_dispatcher RENAME COLUMN in_flight TO of_another_release"))

    run_until(
        fleet_of(databases, ob, MemoryAdapter(), concurrency=1),
        lambda: states(good) == {"delivered": 20} and "sending suspended" in caplog.text,
    )

    assert [states(each) for each in (restored, alien, sqlite)] == [{"pending": 20}] * 3
    assert caplog.text.count("not served: ") == 2


def test_a_suspended_database_does_not_keep_the_probe(three: list[Database], ob: outbox.Outbox) -> None:
    restored, good, _ = three
    suspend(restored, ob)
    for each in (restored, good):
        put(each, ob, count=20)
    calls = 0

    class Mended(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            nonlocal calls
            calls += 1
            return Unknown("no answer") if calls <= 3 else await super().send(delivery)

    wait = timedelta(milliseconds=50)
    limits = {"crm": Limits(concurrency=1, breaker=Breaker(failures=3, wait=wait, max_wait=wait))}
    run_until(
        fleet_of({"restored": restored, "good": good}, ob, Mended(), limits=limits),
        lambda: states(good)["delivered"] >= 17,
    )

    assert states(restored) == {"pending": 20}


def test_a_read_only_database_costs_the_others_nothing(
    three: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    standby, good, _ = three
    for each in (standby, good):
        put(each, ob, count=20)
    read_only = standby.url.update_query_dict({"options": "-c default_transaction_read_only=on"})

    run_until(
        fleet({"standby": read_only, "good": good.url}, ob, MemoryAdapter(), concurrency=1),
        lambda: states(good) == {"delivered": 20} and "read-only" in caplog.text,
    )

    assert states(standby) == {"pending": 20}
