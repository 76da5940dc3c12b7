"""What `outbox doctor` finds of the server and of missing drivers, and what it says of a check that it could not make."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.cli_runner import command
from support.database import TABLES, Database
from support.doctor import SETTINGS, crm, deploy, examined, found, suspended
from support.entries import until_true

import outbox
from dispatchers.admin.check import doctor, doctor_rules
from dispatchers.admin.check.doctor_rules import Finding
from dispatchers.cli import doctor as cli_doctor
from dispatchers.process import daemon
from dispatchers.store.connections.guards import Guards
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


# --- What `outbox doctor` cannot check: it says so, still makes the other checks, and never writes.


def test_without_the_settings_it_says_what_it_did_not_check(database: Database) -> None:
    result = command("doctor", database=database)

    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "not checked: environment: OUTBOX_ENV is not set here",
            "not checked: secrets: OUTBOX_SECRET is not set here",
            "not checked: key ids: OUTBOX_SECRET is not set here",
            "19 checks, 0 findings",
        ],
    )


@pytest.mark.differs("mariadb", "a missing table counts as one without rights")
def test_without_the_tables_it_finds_that_and_leaves_out_what_needs_them(database: Database) -> None:
    with database.owner() as connection:
        TABLES.metadata.drop_all(connection)

    document = examined(database)

    assert [each["check"] for each in document["findings"]] == ["schema"]
    assert {each["reason"] for each in document["unchecked"]} == {"a table is missing: see the finding of `schema`"}
    assert {"horizon", "clock", "extras"} <= set(document["checked"])


def test_without_the_tables_no_right_is_said_to_be_missing_on_mariadb(mariadb: Database) -> None:
    with mariadb.owner() as connection:
        TABLES.metadata.drop_all(connection)

    reasons = {each["reason"] for each in examined(mariadb)["unchecked"]}

    assert reasons == {"a table is missing: see the finding of `schema`"}


def test_a_check_that_waits_too_long_is_not_made_and_the_others_are(postgresql: Database, ob: outbox.Outbox) -> None:
    deploy(postgresql, ob)
    with postgresql.owner() as connection:
        connection.exec_driver_sql("LOCK TABLE outbox_kid IN ACCESS EXCLUSIVE MODE")
        document = examined(postgresql)

    reason = "another transaction has locked a table"
    assert document["unchecked"] == [{"check": "secrets", "reason": reason, "failed": True}]
    assert (document["findings"], document["is_healthy"]) == ([], False)


def test_a_statement_that_takes_too_long_is_ended(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(connection: sa.Connection, context: doctor.Context) -> list[Finding]:
        connection.execute(sa.text("SELECT pg_sleep(60)"))
        return []

    monkeypatch.setattr(doctor, "CHECKS", {"sleep": sleep})
    monkeypatch.setattr(doctor, "CHECK_LIMITS", Guards(statement=timedelta(milliseconds=200)))

    reason = "a statement took too long"
    assert examined(postgresql)["unchecked"] == [{"check": "sleep", "reason": reason, "failed": True}]


def test_a_defect_of_one_check_hides_no_finding_of_the_others(
    sqlite: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(connection: sa.Connection, context: doctor.Context) -> list[Finding]:
        raise KeyError("ada@example.com")

    deploy(sqlite, ob)
    suspended(sqlite, ob)
    monkeypatch.setattr(doctor, "CHECKS", {"broken": broken, **doctor.CHECKS})
    document = examined(sqlite)

    assert document["unchecked"] == [{"check": "broken", "reason": "internal error: KeyError", "failed": True}]
    assert [each["check"] for each in document["findings"]] == ["suspended"]


def test_a_malformed_secret_is_a_finding_and_is_not_shown(sqlite: Database, ob: outbox.Outbox) -> None:
    deploy(sqlite, ob)

    document = examined(sqlite, OUTBOX_SECRET="k1:geheim")

    assert [(each["check"], each["severity"]) for each in document["findings"]] == [("secrets", "error")]
    assert "OUTBOX_SECRET is malformed" in document["findings"][0]["text"]
    assert "geheim" not in json.dumps(document)
    assert [each["check"] for each in document["unchecked"]] == ["key ids"]


def test_a_file_that_is_no_database_is_not_healthy(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    file.write_bytes(b"no database" * 1000)

    result = command("doctor", "--json", "--database", f"sqlite:///{file}", **SETTINGS)

    document = json.loads(result.stdout)
    assert (result.exit_code, document["is_healthy"]) == (7, False)
    assert {each["reason"] for each in document["unchecked"]} == {"SQLITE_NOTADB"}


def test_no_check_can_write(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(connection: sa.Connection, context: doctor.Context) -> list[Finding]:
        connection.execute(sa.insert(TABLES.kid).values(kid="k", secret_check="x", recorded_at=datetime.now(UTC)))
        return []

    monkeypatch.setattr(doctor, "CHECKS", {"write": write})
    ((unchecked,)) = examined(postgresql)["unchecked"]

    assert "25006" in unchecked["reason"]  # PostgreSQL, appendix A: read_only_sql_transaction
    assert postgresql.rows(TABLES.kid) == []
