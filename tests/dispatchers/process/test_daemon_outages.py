"""The dispatcher as a process whose database goes away, or is not there yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.daemons import GATED, Daemon, FileService, GatedService, daemon, sending_two, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import put, put_one, state, states

import outbox

pytestmark = pytest.mark.sends_hints

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
