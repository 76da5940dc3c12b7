"""Several databases served by one process, of one engine or of three, and the file that names them: `Fleet`."""

import asyncio
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session
from support.daemons import daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import Blocking, put, run_once, states, until_true
from support.fleet import TICK, Slow, delivered, fleet, run_until, urls, write
from support.relays import Relay, relay

import outbox
from dispatchers import Breaker, Delivered, Delivery, Limits, Operations, Outcome, Settlement, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.databases_file import read_databases
from dispatchers.process.fleet_work import FleetWork
from dispatchers.store.connections.watchdog import DatabaseSilent
from dispatchers.telemetry import prometheus
from outbox.errors import ConfigurationError


@pytest.fixture
def databases(copies: Any) -> Iterator[list[Database]]:
    taken = [copies.take() for _ in range(3)]
    yield taken
    for each in taken:
        copies.give_back(each)


def test_it_sends_the_entries_of_every_database(databases: list[Database], ob: outbox.Outbox) -> None:
    put_ids = {id for each in databases for id in put(each, ob, count=10)}
    service = Slow()

    run_until(fleet(urls(databases), ob, service), delivered(databases, 10))

    assert {delivery.id for delivery in service.deliveries} == put_ids
    assert len(service.deliveries) == 30
    assert service.closed == 1


def test_ordering_groups_of_each_database_are_sent_in_order(databases: list[Database], ob: outbox.Outbox) -> None:
    sent: dict[str, list[int]] = {}

    class Ordered(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            sent.setdefault(delivery.ordering_key or "", []).append(delivery.payload)
            return Delivered()

    for number, each in enumerate(databases):
        with each.begin() as session:
            for step in range(6):
                for group in range(3):
                    key = f"{number}:{group}"
                    ob.enqueue(session, "crm.upsert", step, parent=f"{key}:{step}", ordering_key=key)

    run_until(fleet(urls(databases), ob, Ordered(), concurrency=2), delivered(databases, 18))

    assert len(sent) == 9
    assert all(steps == list(range(6)) for steps in sent.values())


def test_a_callback_commits_in_the_database_of_its_entry(databases: list[Database], ob: outbox.Outbox) -> None:
    effects = Operations()

    @effects.on_settled("crm.upsert")
    def follow_up(session: Session, settlement: Settlement) -> None:
        ob.enqueue(session, "crm.follow_up", {}, parent=outbox.ParentKey(str(settlement.entry.id)))

    for each in databases:
        put(each, ob, count=10)
    working = FleetWork(
        urls(databases), adapters={"crm": Slow()}, include=[effects], outbox=ob, poll=TICK, concurrency=3
    )
    run_until(working, delivered(databases, 20))

    assert [Counter(each.operations()) for each in databases] == [{"crm.upsert": 10, "crm.follow_up": 10}] * 3


def test_what_every_database_would_refuse_is_refused_at_once(ob: outbox.Outbox) -> None:
    effects = Operations()

    @effects.on_settled("crm")
    async def follow_up(session: Any, settlement: Settlement) -> None: ...

    with pytest.raises(
        outbox.ConfigurationError, match=r"on_settled\('crm'\) is async: a fleet has synchronous drivers"
    ):
        FleetWork({}, include=[effects], adapters={"crm": MemoryAdapter()}, outbox=ob)
    with pytest.raises(outbox.ConfigurationError, match="include must be a list"):
        FleetWork({}, include=effects, outbox=ob)  # type: ignore[arg-type]


# --- databases that do not work


@pytest.mark.parametrize("break_down", [Relay.refuse, Relay.swallow])
def test_a_database_that_breaks_down_holds_no_permit_from_the_others(
    databases: list[Database], ob: outbox.Outbox, break_down: Callable[[Relay], None]
) -> None:
    """Its sends in flight end, and then the only permit is for the others."""
    put(databases[0], ob, count=500)
    service = Slow(0.002)
    service.timeout = timedelta(seconds=2)

    async def then() -> None:
        await until_true(lambda: service.deliveries)
        break_down(carrying)
        for each in databases[1:]:
            put(each, ob, count=30)

    with relay(databases[0].url) as (carrying, url):
        named = {**urls(databases), "shard0": url}
        spans = {"lease": timedelta(seconds=6), "margin": timedelta(seconds=1), "grace": timedelta(seconds=1)}
        working = fleet(named, ob, service, concurrency=1, **spans)
        with suppress(sa.exc.OperationalError, DatabaseSilent):  # of the outcomes that the first one did not take
            run_until(working, delivered(databases[1:], 30), then)

    assert service.most == 1
    assert states(databases[0])["delivered"] < 500


def test_a_database_that_comes_back_is_served_again(databases: list[Database], ob: outbox.Outbox) -> None:
    service = MemoryAdapter()

    async def away_for_a_while() -> None:
        carrying.refuse()
        put(databases[0], ob, count=5)
        put(databases[1], ob, count=5)
        await until_true(delivered(databases[1:2], 5))
        carrying.accept()

    with relay(databases[0].url) as (carrying, url):
        working = fleet({**urls(databases), "shard0": url}, ob, service)
        run_until(working, delivered(databases[:2], 5), away_for_a_while)


def test_a_database_that_is_refused_is_tried_again(
    databases: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.process.fleet_work.AGAIN_SECONDS", (0.05, 0.05))
    service = MemoryAdapter()
    for each in databases:
        put(each, ob)
    rename(databases[0], "outbox_queue", "misnamed")

    async def mend() -> None:
        await until_true(lambda: "not served: " in caplog.text and len(service.deliveries) == 2)
        rename(databases[0], "misnamed", "outbox_queue")

    run_until(fleet(urls(databases), ob, service), delivered(databases, 1), mend)


def rename(database: Database, table: str, name: str) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO {name}")


def test_outcomes_that_a_database_does_not_take_are_an_error_at_the_end(
    databases: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = Blocking()
    for each in databases[:2]:
        put(each, ob)

    async def stop_with_one_unreachable() -> None:
        await until_true(lambda: service.waiting == 2)
        carrying.refuse()
        asyncio.get_running_loop().call_later(0.05, service.released.set)

    with relay(databases[0].url) as (carrying, url):
        working = fleet({"shard0": url, "shard1": databases[1].url}, ob, service, grace=timedelta(seconds=0.3))
        with pytest.raises(sa.exc.OperationalError):
            run_until(working, lambda: True, stop_with_one_unreachable)

    assert states(databases[1]) == {"delivered": 1}
    assert states(databases[0]) == {"sending": 1}
    assert caplog.text.count("not drained: ") == 1


def test_a_fleet_that_is_cancelled_ends_all_its_tasks(databases: list[Database], ob: outbox.Outbox) -> None:
    """An app that owns the event loop may cancel it, for example by the failure of another task of a group."""
    service = Slow()
    for each in databases:
        put(each, ob)

    async def main() -> None:
        pump = asyncio.create_task(fleet(urls(databases), ob, service).pump(asyncio.Event()))
        await until_true(lambda: len(service.deliveries) == 3)
        pump.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pump
        await asyncio.sleep(0)  # what was cancelled last ends
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert service.closed == 1


# --- SIGHUP


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def test_a_database_that_leaves_is_drained_and_may_come_back(
    databases: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    service, path, named = Blocking(), tmp_path / "databases.conf", urls(databases[:2])
    write(path, named)
    put(databases[0], ob)

    async def leave_and_return() -> None:
        await until_true(lambda: service.waiting == 1)
        for names in (["shard1"], ["shard0", "shard1"], ["shard1"]):  # it returns and leaves again before it is drained
            write(path, {name: named[name] for name in names})
            hang_up()
            await until_true(lambda: f"names {len(names)} databases" in caplog.text)  # noqa: B023
            caplog.clear()
        service.released.set()
        await until_true(lambda: "drained" in caplog.text)
        assert states(databases[0]) == {"delivered": 1}
        put(databases[0], ob)
        write(path, named)
        hang_up()

    run_until(fleet(path, ob, service), delivered(databases[:1], 2), leave_and_return)


def test_a_hangup_lets_a_refused_database_be_tried_at_once(
    databases: list[Database], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.process.fleet_work.AGAIN_SECONDS", (3600.0, 3600.0))
    monkeypatch.setattr("dispatchers.pipeline.activity_log.REPORT_SECONDS", 0.02)
    registry = prometheus_client.CollectorRegistry()
    put(databases[0], ob)
    rename(databases[0], "outbox_queue", "misnamed")

    def served() -> dict[str, float]:
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {each.labels["database"]: each.value for each in samples if each.name == "outbox_database_served"}

    async def mend() -> None:
        await until_true(lambda: "not served: " in caplog.text and served() == {"shard0": 0, "shard1": 1})
        rename(databases[0], "misnamed", "outbox_queue")
        hang_up()
        await until_true(lambda: served() == {"shard0": 1, "shard1": 1})

    observe = prometheus.observers(registry)
    working = fleet(urls(databases[:2]), ob, MemoryAdapter(), observe=observe)
    run_until(working, delivered(databases[:1], 1), mend)


SIGNALLED = """
import signal
from support.daemons import FileService

def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)

class Signalling(FileService):
    async def send(self, delivery):
        os.kill(os.getpid(), signal.SIGTERM)
        return await super().send(delivery)

    async def aclose(self):
        hang_up()

hang_up()

def make():
    return Fleet(adapters={"crm": Signalling(here)}, outbox=ob, poll=timedelta(seconds=0.05))
"""


def test_a_hangup_ends_no_fleet_that_starts_or_stops(
    databases: list[Database], ob: outbox.Outbox, tmp_path: Path
) -> None:
    write_factory(tmp_path, SIGNALLED)
    path = tmp_path / "databases.conf"
    write(path, urls(databases[:1]))
    put(databases[0], ob)

    with daemon(tmp_path, databases[0].url, "factory:make", "--databases", str(path)) as process:
        assert process.wait() == 0, process.output

    assert states(databases[0]) == {"delivered": 1}
    assert "outbox.daemon [fleet]: SIGTERM: draining" in process.output  # although it came in a task of the database


# --- metrics


def test_metrics_have_the_database_as_a_label(
    databases: list[Database], ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.activity_log.REPORT_SECONDS", 0.02)
    registry = prometheus_client.CollectorRegistry()
    for each, count in zip(databases, (1, 2, 3), strict=True):
        put(each, ob, count=count)
    seen: list[dict[str, float]] = []

    def by_database(metric: str) -> dict[str, float]:
        families = text_string_to_metric_families(prometheus.page(registry)[0].decode())
        samples = (sample for family in families for sample in family.samples if sample.name == metric)
        return {sample.labels["database"]: sample.value for sample in samples}

    async def then() -> None:
        await until_true(lambda: by_database("outbox_claimed_total") == {"shard0": 1, "shard1": 2, "shard2": 3})
        seen.append(by_database("outbox_unsettled"))

    run_until(fleet(urls(databases), ob, MemoryAdapter(), observe=prometheus.observers(registry)), lambda: True, then)

    assert seen[0].keys() == {"shard0", "shard1", "shard2"}
    assert by_database("outbox_unsettled") == {}  # a database that is not served has no levels
    assert by_database("outbox_claimed_total").keys() == seen[0].keys()


# --- A fleet of databases that differ: engines, clocks, revisions, rights, and trust. Each one's trouble is its own.


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


# --- The file that names a fleet's databases: what is refused in it, and that a hangup makes the fleet read it again.


FLEET = """
from support.daemons import FileService

def make():
    return Fleet(adapters={"crm": FileService(here)}, outbox=ob, poll=timedelta(seconds=0.05))
"""


def test_a_hangup_makes_it_read_the_file_again(databases: list[Database], ob: outbox.Outbox, tmp_path: Path) -> None:
    write_factory(tmp_path, FLEET)
    path, named = tmp_path / "databases.conf", urls(databases)
    write(path, {name: named[name] for name in ("shard0", "shard1")})
    for each in databases:
        put(each, ob)

    with daemon(tmp_path, databases[0].url, "factory:make", "--databases", str(path)) as process:
        wait_for(delivered(databases[:2], 1), "the first two", workers=[process])
        write(path, {name: named[name] for name in ("shard1", "shard2")})
        process.process.send_signal(signal.SIGHUP)
        wait_for(delivered(databases[2:], 1), "the third", workers=[process])
        wait_for(lambda: not databases[0].rows(TABLES.dispatcher), "the end of the first", workers=[process])
        put(databases[0], ob)

        path.write_text("shard1 = postgresql://user:secret@/x\nshard1 = sqlite://\n")
        process.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "databases.conf, line 2: the name 'shard1' occurs twice" in process.output, "the error")
        put(databases[1], ob)
        wait_for(delivered(databases[1:2], 2), "the last one", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    assert states(databases[0]) == {"delivered": 1, "pending": 1}
    assert "outbox.daemon [shard2]: started: " in process.output
    assert "secret" not in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shard", "write `name = url`"),
        ("shard =", "write `name = url`"),
        ("shard = postgresql+psycopg://u:secret@host/x # ours", "a comment needs a line of its own"),
        ("a b = sqlite:///x.db", "'a b' is not a name"),
        ("shard = oracle://secret@host/x", "the outbox runs on"),
        ("shard = secret", "needs a SQLAlchemy URL"),
        ("shard = postgresql+asyncpg://u:secret@host/x", "is asynchronous"),
        ("first = sqlite:///other.db", "the name 'first' occurs twice"),
        ("shard = sqlite:///one.db", "'shard' is the same database as 'first'"),
    ],
)
def test_a_wrong_line_is_named_without_its_url(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "databases.conf"
    path.write_text(f"# comment\nfirst = sqlite:///one.db\n\n{line}\n")

    with pytest.raises(ConfigurationError, match=re.escape(f"{path}, line 4: ") + f".*{re.escape(says)}") as raised:
        read_databases(path)

    assert "secret" not in str(raised.value)


def test_a_url_may_contain_the_signs_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "databases.conf"
    path.write_text("tenant-a.eu=postgresql+psycopg://u:p%23=1@h/db?application_name=x#y")

    (url,) = read_databases(path).values()

    assert url.password == "p#=1"


@pytest.mark.parametrize(
    "url",
    [
        "mariadb+pymysql://u@/x?unix_socket=/run/",
        "postgresql+psycopg://?service=shard",
        "postgresql+psycopg://u@host/x?options=-csearch_path%3Dtenant",
    ],
)
def test_databases_of_two_sockets_services_or_schemas_are_two(tmp_path: Path, url: str) -> None:
    path = tmp_path / "databases.conf"
    path.write_text("".join(f"shard{number} = {url}{number}\n" for number in range(2)), encoding="utf-8-sig")

    assert len(read_databases(path)) == 2


def test_a_file_that_names_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "databases.conf"

    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_databases(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigurationError, match="names no database"):
        read_databases(path)
