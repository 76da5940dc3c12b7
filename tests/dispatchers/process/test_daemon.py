"""The dispatcher as a process: signals, what it logs, what keeps it from starting, and a database that is unavailable."""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.daemons import GATED, Daemon, FileService, GatedService, daemon, sending_two, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import HOUR, Blocking, age, change, put, put_one, run_once, state, states, until_true
from support.python_processes import new_process

import outbox
from dispatchers import Dispatcher, Fleet
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.jobs import report_gauges
from dispatchers.process.daemon import COLLECTOR_THRESHOLD, REPEAT_SECONDS, SWITCH_SECONDS
from dispatchers.process.dispatcher import work_of
from dispatchers.store.database import DatabaseStore
from dispatchers.store.records.gauges import Gauge
from outbox.times import NEVER

pytestmark = pytest.mark.sends_hints

SYNC = """
effects = Operations()

@effects.operation("crm")
def wait(delivery):
    (here / f"{delivery.key}.waiting").touch()
    time.sleep(30)
    return Delivered()

def make():
    return Dispatcher(url, outbox=ob, include=[effects], concurrency=2)
"""


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_finish_what_is_in_flight_and_claim_nothing_more(
    database: Database, ob: outbox.Outbox, tmp_path: Path, number: signal.Signals
) -> None:
    with sending_two(database, ob, tmp_path, GATED) as process:
        process.process.send_signal(number)
        wait_for(lambda: "draining; sends in flight" in process.output, "the drain")
        assert states(database) == {"sending": 2, "pending": 3}
        GatedService(tmp_path).open()

        assert process.wait() == 0, process.output

    assert states(database) == {"delivered": 2, "pending": 3}
    assert "Traceback" not in process.output


@pytest.mark.parametrize("body", [GATED, SYNC], ids=["async", "sync"])
def test_a_second_signal_stops_it_at_once_and_leaves_its_leases(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, body: str
) -> None:
    with sending_two(postgresql, ob, tmp_path, body) as process:
        process.terminate()
        wait_for(lambda: "draining; sends in flight" in process.output, "the drain")

        time.sleep(REPEAT_SECONDS)
        process.terminate()
        assert process.wait(seconds=60) == 1

    assert "stopping at once" in process.output
    assert states(postgresql) == {"sending": 2, "pending": 3}
    age(postgresql, HOUR)
    assert run_once(postgresql, ob, adapters={"crm": FileService(tmp_path)}) == 5
    assert sorted(row.attempts for row in postgresql.rows(TABLES.settlement)) == [1, 1, 1, 2, 2]


def test_a_signal_that_is_sent_twice_in_a_row_still_drains(postgresql: Database, ob: outbox.Outbox) -> None:
    """As timeout(1) sends it: to the process, and to the process's group."""

    async def main() -> bool:
        service = Blocking()
        working = Dispatcher(postgresql.engine, outbox=ob, adapters={"crm": service})
        serving = asyncio.create_task(working.serve())
        await until_true(lambda: service.waiting == 1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        service.released.set()
        return await serving

    put_one(postgresql, ob)

    assert asyncio.run(main())
    assert states(postgresql) == {"delivered": 1}


@pytest.mark.parametrize("body", [GATED, SYNC.replace("concurrency=2", "concurrency=2, grace=timedelta(seconds=0.3)")])
def test_what_does_not_finish_within_the_grace_is_left_to_its_lease(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, body: str
) -> None:
    with sending_two(postgresql, ob, tmp_path, body, GRACE="0.3") as process:
        process.terminate()
        process.wait(seconds=60)

    assert states(postgresql) == {"sending": 2, "pending": 3}
    assert "grace period over: 2 sends in flight cancelled; " in process.output


def test_an_idle_one_stops_at_a_signal(postgresql: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, GATED)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for(lambda: "started: " in process.output, "its start", workers=[process])
        process.terminate()

        assert process.wait() == 0
    (logged,) = [line for line in process.output.splitlines() if "started: " in line]
    assert "started: env test, database postgresql" in logged
    assert f"/{postgresql.url.database}" in logged
    assert logged.endswith("; operations or prefixes: 1, callbacks: 0")


WAITS_FOR_A_THREAD = """
import threading

def work():
    threading.main_thread().join()  # not before the interpreter's own end begins
    (here / "ending").touch()
    time.sleep(600)
"""
WAITS_FOR_A_MODULE = """
class Late:
    def __del__(self, open=os.open, path=str(here / "ending"), flags=os.O_CREAT, sleep=time.sleep):
        open(path, flags)
        sleep(1)

late = Late()
"""


@pytest.mark.parametrize(("slow_end", "status"), [(WAITS_FOR_A_THREAD, 1), (WAITS_FOR_A_MODULE, 0)])
def test_a_signal_after_the_drain_never_kills_the_process(
    postgresql: Database, tmp_path: Path, slow_end: str, status: int
) -> None:
    """At both stages of Python's own end: while it waits for threads, and when no handler can run any more."""
    thread = "    threading.Thread(target=work).start()\n" if "work" in slow_end else ""
    write_factory(tmp_path, slow_end + GATED.replace("def make():\n", "def make():\n" + thread))

    with daemon(tmp_path, postgresql.url, start=new_process) as process:
        wait_for(lambda: "started: " in process.output, "its start", workers=[process])
        process.terminate()
        wait_for((tmp_path / "ending").exists, "its end", workers=[process])
        assert "stopped" in process.output
        process.terminate()

        assert process.wait() == status, process.output


def test_what_it_says_of_its_database_at_the_start_holds_no_password(ob: outbox.Outbox) -> None:
    url = "postgresql+psycopg://shop:hunter2@db.internal/orders?password=hunter2&host=elsewhere"

    working = Dispatcher(url, outbox=ob, adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter()})
    logged = work_of(working).described

    assert logged == (
        "env test, database postgresql+psycopg://shop:***@db.internal/orders?host=elsewhere;"
        " operations or prefixes: 2, callbacks: 0"
    )


def one(database: Database, **settings: Any) -> Dispatcher:
    return Dispatcher(database.dispatchers_engine, **settings)


def fleet_of_one(database: Database, **settings: Any) -> Fleet:
    return Fleet({"shop": database.url}, **settings)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("made", [one, fleet_of_one])
def test_on_a_loop_of_ones_own_it_leaves_everything_as_it_found_it(
    postgresql: Database, ob: outbox.Outbox, made: Callable[..., Dispatcher | Fleet], signals: int
) -> None:
    """The host process continues: with its signal handlers, its interpreter settings and no task of the dispatcher's."""
    put_one(postgresql, ob)

    def settings() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return [handlers, gc.get_threshold(), gc.get_freeze_count() > 0, sys.getswitchinterval()]

    async def main() -> bool:
        before, service = settings(), Blocking()
        working = made(postgresql, outbox=ob, adapters={"crm": service}, grace=timedelta(seconds=30))
        serving = asyncio.create_task(working.serve())
        await until_true(lambda: service.waiting == 1)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(REPEAT_SECONDS * 1.1)
        if signals == 1:
            service.released.set()
        is_drained = await serving
        await asyncio.sleep(0)  # what was cancelled at the end
        assert settings() == before
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return is_drained

    assert asyncio.run(main()) == (signals == 1)


REPORTS = """
import gc
import sys

effects = Operations()

@effects.operation("crm")
def report(delivery):
    print(f"<{gc.get_threshold()[0]} {gc.get_freeze_count() > 0} {sys.getswitchinterval():g}>", flush=True)
    return Delivered()

def make():
    return Dispatcher(url, outbox=ob, include=[effects])
"""


def test_its_process_collects_seldom_and_switches_threads_often(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put_one(postgresql, ob)
    write_factory(tmp_path, REPORTS)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for(lambda: ">" in process.output, "the send", workers=[process])

    assert f"<{COLLECTOR_THRESHOLD} True {SWITCH_SECONDS:g}>" in process.output


RAISES = """
def make():
    class Broken(MemoryAdapter):
        async def send(self, delivery):
            raise ValueError("my own mistake")

    return Dispatcher(url, outbox=ob, adapters={"crm": Broken()})
"""


def test_for_programs_each_line_of_the_log_is_a_document(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    id = put_one(postgresql, ob)
    write_factory(tmp_path, RAISES)

    with daemon(tmp_path, postgresql.url, "factory:make", "--json") as process:
        wait_for(lambda: "my own mistake" in process.output, "the send", workers=[process])
        process.terminate()
        assert process.wait() == 0

    logged = [json.loads(line) for line in process.output.splitlines()]
    (raised,) = [line for line in logged if "trace" in line]
    assert all(datetime.fromisoformat(line["at"]).tzinfo == UTC for line in logged)
    assert (raised["level"], raised["logger"]) == ("error", "outbox.dispatcher")
    assert raised["message"] == f"the adapter of 'crm' raised for entry {id}: this counts as no answer"
    assert raised["trace"].endswith("ValueError: my own mistake")


# --- what keeps it from starting


def refused(directory: Path, url: sa.URL, reference: str = "factory:make") -> tuple[int, str]:
    with daemon(directory, url, reference) as process:
        return process.wait(), process.output


def test_without_its_tables_it_names_the_command_that_makes_them(database: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, GATED)
    database.execute(sa.text("ALTER TABLE outbox_queue RENAME TO elsewhere"))

    status, text = refused(tmp_path, database.url)
    database.execute(sa.text("ALTER TABLE elsewhere RENAME TO outbox_queue"))

    assert status == 1
    assert "outbox db upgrade" in text
    assert "Traceback" not in text


def test_an_entry_of_an_unknown_secret_keeps_it_from_starting(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put(database, ob)
    database.execute(sa.update(TABLES.entry).values(kid="k0"))
    write_factory(tmp_path, GATED)

    status, text = refused(tmp_path, database.url)

    assert status == 1
    assert "'k0'" in text
    assert "Traceback" not in text


def test_a_dispatcher_that_could_not_keep_its_invariants_is_refused(postgresql: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, GATED.replace("concurrency=2", "lease=timedelta(seconds=20)"))

    status, text = refused(tmp_path, postgresql.url)

    assert status == 1
    assert "do not fit into the lease" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("factory", "is not MODULE:FUNCTION"),
        ("factory:", "is not MODULE:FUNCTION"),
        (":make", "is not MODULE:FUNCTION"),
        ("nowhere:make", "module 'nowhere' is neither in the working directory nor installed"),
        ("factory.inside:make", "module 'factory.inside' is neither"),
        ("factory:absent", "has no function 'absent'"),
        ("factory:url", "'factory:url' must be a function"),
    ],
)
def test_a_factory_that_is_not_there_is_named(tmp_path: Path, reference: str, says: str) -> None:
    write_factory(tmp_path, GATED)

    status, text = refused(tmp_path, sa.make_url("sqlite://"), reference)

    assert status == 2
    assert says in text
    assert "Traceback" not in text


def test_a_factory_that_cannot_import_something_shows_what(tmp_path: Path) -> None:
    write_factory(tmp_path, "import no_such_package\n")

    status, text = refused(tmp_path, sa.make_url("sqlite://"))

    assert status == 1
    assert "No module named 'no_such_package'" in text


# --- maintenance


def test_gauges_are_logged_and_uncertain_entries_are_a_warning(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(database, ob, count=2)
    change(database, put_one(database, ob, "mail.send"), state="uncertain", due_at=NEVER, maybe_sent=True)
    put(database, ob, "mail.send", count=3)

    with caplog.at_level(logging.INFO):
        gauges = asyncio.run(report_gauges(DatabaseStore(database.engine, ob.configuration).run, TABLES))

    logged = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "outbox.maintenance"
    ]
    assert logged == [
        ("INFO", "destination 'crm': 2 pending"),
        ("WARNING", "destination 'mail': 3 pending, 1 uncertain"),
    ]
    assert gauges == {"crm": Gauge({"pending": 2}, True), "mail": Gauge({"pending": 3, "uncertain": 1}, True)}


# --- The dispatcher as a process whose database goes away, or is not there yet.


QUICK = """
from support.daemons import FileService

class Unhurried(FileService):
    async def send(self, delivery):
        import asyncio
        await asyncio.sleep(0.02)
        return await super().send(delivery)

def make():
    service = Unhurried(here)
    service.timeout = timedelta(seconds=3)
    return Dispatcher(
        url,
        outbox=ob,
        adapters={"crm": service},
        lease=timedelta(seconds=10),
        margin=timedelta(seconds=0.2),
        poll=timedelta(seconds=0.05),
        concurrency=8,
    )
"""


@contextmanager
def away(server_url: sa.URL, database: Database) -> Iterator[None]:
    """For the block, no client can reach the database, and all connections are lost."""
    admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    name = database.url.database
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    with admin.connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.exec_driver_sql(cut)
        try:
            yield
        finally:
            connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    database.dispose()


def test_a_database_that_goes_away_and_comes_back_costs_nothing(
    postgresql: Database, server_url: sa.URL, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put(postgresql, ob, count=300)
    write_factory(tmp_path, QUICK)
    keys = {ob.child_key(f"order:{number}", "crm.upsert") for number in range(300)}

    with daemon(tmp_path, postgresql.url) as process:
        for settled in (30, 120):
            wait_for(lambda settled=settled: states(postgresql)["delivered"] > settled, "progress", workers=[process])
            with away(server_url, postgresql):
                wait_for(lambda: outages(process, "unavailable") > outages(process, "available again"), "a warning")
            wait_for(lambda: outages(process, "unavailable") == outages(process, "available again"), "its end")
        wait_for(lambda: states(postgresql) == {"delivered": 300}, "the end", workers=[process])
        process.terminate()
        assert process.wait() == 0

    service = FileService(tmp_path)
    assert set(service.effects) == keys
    assert len(service.sent) == sum(row.attempts for row in postgresql.rows(TABLES.settlement)) - unsent(postgresql)


def outages(process: Daemon, text: str) -> int:
    return process.output.count(f"database {text}")


def unsent(database: Database) -> int:
    """Attempts that were only feared: claims whose acknowledgement was lost were taken over, and never sent."""
    return sum(row.attempts - 1 for row in database.rows(TABLES.settlement))


def test_outcomes_settle_when_the_database_comes_back_during_the_drain(
    postgresql: Database, server_url: sa.URL, ob: outbox.Outbox, tmp_path: Path
) -> None:
    with sending_two(postgresql, ob, tmp_path, GATED) as process:
        with away(server_url, postgresql):
            process.terminate()
            GatedService(tmp_path).open()
            wait_for(lambda: "database unavailable" in process.output, "a warning", workers=[process])

        assert process.wait() == 0, process.output

    assert states(postgresql) == {"delivered": 2, "pending": 3}


def test_a_daemon_whose_database_is_not_there_yet_waits_for_it(
    postgresql: Database, server_url: sa.URL, ob: outbox.Outbox, tmp_path: Path
) -> None:
    id = put_one(postgresql, ob)
    write_factory(tmp_path, QUICK)

    with away(server_url, postgresql), daemon(tmp_path, postgresql.url) as process:
        wait_for(lambda: "database unavailable" in process.output, "a warning", workers=[process])
        with sa.create_engine(server_url, isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {postgresql.url.database} ALLOW_CONNECTIONS true")
        postgresql.dispose()  # its own connections were cut as well
        wait_for(lambda: state(postgresql, id) == "delivered", "the send", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    logged = [line for line in process.output.splitlines() if ": database " in line]
    assert [line.partition(": database ")[2].partition(" after")[0].partition(":")[0] for line in logged] == [
        "unavailable",
        "available again",
    ]


def test_a_daemon_without_its_database_at_the_start_ends_at_a_signal(
    postgresql: Database, server_url: sa.URL, tmp_path: Path
) -> None:
    write_factory(tmp_path, QUICK)

    with away(server_url, postgresql), daemon(tmp_path, postgresql.url) as process:
        wait_for(lambda: "database unavailable" in process.output, "a warning", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output


def test_a_daemon_does_not_wait_for_a_database_that_does_not_exist(postgresql: Database, tmp_path: Path) -> None:
    write_factory(tmp_path, QUICK)

    with daemon(tmp_path, postgresql.url.set(database="nobody_made_it")) as process:
        assert process.wait() == 1
