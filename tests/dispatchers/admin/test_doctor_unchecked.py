"""What `outbox doctor` cannot check: it says so, still makes the other checks, and never writes."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.cli_runner import command
from support.database import TABLES, Database
from support.doctor import SETTINGS, deploy, examined, suspended

import outbox
from dispatchers.admin.check import doctor
from dispatchers.admin.check.doctor_rules import Finding
from dispatchers.store.connections.guards import Guards


def test_without_the_settings_it_says_what_it_did_not_check(database: Database) -> None:
    result = command("doctor", database=database)

    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "not checked: environment: OUTBOX_ENV is not set here",
            "not checked: secrets: OUTBOX_SECRET is not set here",
            "not checked: key ids: OUTBOX_SECRET is not set here",
            "17 checks, 0 findings",
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
