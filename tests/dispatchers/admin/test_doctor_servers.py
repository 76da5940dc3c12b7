"""What `outbox doctor` finds of the server: open transactions, settings at risk, autovacuum, partitions, and missing drivers."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta

import pytest
import sqlalchemy as sa
from support.database import Database
from support.doctor import crm, deploy, examined, found
from support.entries import until_true

import outbox
from dispatchers.admin.check import doctor_rules
from dispatchers.cli import doctor as cli_doctor
from dispatchers.process import daemon
from outbox import migrations
from outbox.sql.schema.body_partitions import Day, Layout


@contextmanager
def open_transaction(database: Database) -> Iterator[None]:
    with database.new_engine(poolclass=sa.NullPool).connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ").exec_driver_sql(
            "SELECT count(*) FROM shop_order"
        )
        yield


def test_an_open_transaction_holds_back_the_horizon(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_transaction(postgresql):
        young = found(postgresql)
        monkeypatch.setattr(doctor_rules, "HORIZON_HELD", timedelta(0))
        ((check, severity, text),) = found(postgresql)

    assert (young, check, severity) == ([], "horizon", "warning")
    assert text.startswith("the idle in transaction session ")


@contextmanager
def at_risk(mariadb: Database) -> Iterator[None]:
    """The server may lose a commit, and closes an idle connection soon."""
    names = ("innodb_flush_log_at_trx_commit", "wait_timeout")
    change = ", ".join(f"GLOBAL {name} = %s" for name in names)
    with mariadb.owner() as connection:
        before = connection.exec_driver_sql(f"SELECT {', '.join(f'@@GLOBAL.{name}' for name in names)}").one()
        connection.exec_driver_sql(f"SET {change}", (2, 5))
    try:
        yield
    finally:
        with mariadb.owner() as connection:
            connection.exec_driver_sql(f"SET {change}", tuple(before))


def test_settings_of_a_mariadb_that_put_commits_at_risk_are_found(mariadb: Database, ob: outbox.Outbox) -> None:
    deploy(mariadb, ob)

    with at_risk(mariadb):
        document = examined(mariadb)

    assert document["unchecked"] == []
    texts = [(each["check"], each["text"]) for each in document["findings"]]
    assert texts == [("server", "innodb_flush_log_at_trx_commit is 2"), ("server", "wait_timeout is 5")]


def test_a_dispatcher_on_mariadb_logs_what_is_found_of_the_server_once(
    mariadb: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve() -> None:
        serving = asyncio.ensure_future(daemon.serve(crm(mariadb, ob)))
        await until_true(lambda: any("database server: " in line for line in caplog.messages))
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    with at_risk(mariadb):
        asyncio.run(serve())

    line, _ = [line for line in caplog.messages if line.startswith("database server: ")]
    assert line.startswith(
        "database server: innodb_flush_log_at_trx_commit is 2: a commit that was answered may be lost"
    )
    assert "SET GLOBAL innodb_flush_log_at_trx_commit = 1" in line


def test_a_dispatcher_on_postgresql_asks_nothing_of_the_server(postgresql: Database, ob: outbox.Outbox) -> None:
    working, statements = crm(postgresql, ob), list[str]()
    sa.event.listen(
        postgresql.engine, "before_cursor_execute", lambda connection, cursor, sql, *rest: statements.append(sql)
    )

    asyncio.run(working.report_server())

    assert statements == []


def test_autovacuum_that_is_off_is_found(postgresql: Database) -> None:
    with postgresql.owner() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_queue SET (autovacuum_enabled = false)")

    assert found(postgresql) == [("vacuum", "warning", "autovacuum is off for outbox_queue")]


def test_one_setting_of_autovacuum_is_one_finding(postgresql: Database) -> None:
    with postgresql.owner() as connection:
        for name in ("outbox_queue", "outbox_entry", "outbox_record"):
            connection.exec_driver_sql(f"ALTER TABLE {name} SET (autovacuum_enabled = false)")

    ((check, _, text),) = found(postgresql)

    assert check == "vacuum"
    assert {*text.removeprefix("autovacuum is off for ").split(", ")} == {
        "outbox_queue",
        "outbox_entry",
        "outbox_record",
    }


def test_a_missing_partition_of_tomorrow_is_found(postgresql: Database) -> None:
    migrations.partition(postgresql.owners_url)
    enough = found(postgresql)
    with postgresql.owner() as connection:
        tomorrow = connection.exec_driver_sql("SELECT to_char(now() AT TIME ZONE 'UTC' + '1 day', 'YYYYMMDD')").scalar()
        connection.exec_driver_sql(f"DROP TABLE outbox_body_{tomorrow}")

    ((check, severity, _),) = found(postgresql)
    assert (enough, check, severity) == ([], "partitions", "error")


def test_a_package_that_the_url_needs_is_missed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "find_spec", lambda name: None if name == "apscheduler" else name)

    assert found(database) == [("extras", "warning", "the package 'apscheduler' is not installed here")]


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("mariadb+pymysql://u@host/x", {"pymysql": "mariadb"}),
        ("mariadb://u@host/x", {"MySQLdb": "mysqlclient"}),
        ("mariadb+asyncmy://u@host/x", {"asyncmy": "asyncmy", "greenlet": "asyncio"}),
        ("postgresql+psycopg_async://u@host/x", {"psycopg": "postgresql", "greenlet": "asyncio"}),
    ],
)
def test_the_driver_of_each_database_is_missed(
    url: str, missing: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_doctor, "find_spec", lambda name: None)

    assert cli_doctor.missing_packages(url) == {"apscheduler": "dispatcher", **missing}


def test_partitions_for_a_few_days_only_are_a_warning() -> None:
    today = date(2026, 1, 1)
    days = tuple(Day(today + timedelta(days=ahead), True, False) for ahead in range(3))

    (finding,) = doctor_rules.partitions(Layout(True, True, today, days))

    assert (finding.severity, finding.text) == ("warning", "body partitions exist for 2 days ahead only")
