"""`outbox doctor`: each rule finds what it is for, mostly on a real database; a healthy set-up has no finding."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command
from support.database import TABLES, Database
from support.entries import age, dispatcher, put, run_once, until_true

import outbox
from dispatchers import Dispatcher, Operations, Settlement
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin import doctor, doctor_mariadb, doctor_rules
from dispatchers.admin.doctor_rules import Finding
from dispatchers.admin.table_health import Holder, TableHealth
from dispatchers.cli import doctor as cli_doctor
from dispatchers.process import daemon
from dispatchers.store.guards import Guards
from dispatchers.store.heartbeats import LIVE_FOR
from outbox import migrations
from outbox.errors import ConfigurationError
from outbox.sql.body_partitions import Day, Layout

MINUTES = timedelta(minutes=2)
OTHER_SECRET = SECRET_TEXT.replace("AAEC", "BBEC")
SETTINGS = {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}


def examined(database: Database, **changed: str) -> Any:
    """The document of `outbox doctor`, with the deployment's settings but what is `changed`."""
    result = command("doctor", "--json", database=database, **{**SETTINGS, **changed})
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["is_healthy"] else 7), result.output
    return document


def found(database: Database, **changed: str) -> list[tuple[str, str, str]]:
    """(check, severity, text) of each finding."""
    return [(each["check"], each["severity"], each["text"]) for each in examined(database, **changed)["findings"]]


def crm(database: Database, ob: outbox.Outbox, **settings: Any) -> Dispatcher:
    return dispatcher(database, ob, **{"adapters": {"crm": MemoryAdapter()}} | settings)


def beat(*working: Dispatcher) -> None:
    for each in working:
        asyncio.run(each.heartbeats.beat())


def deploy(database: Database, ob: outbox.Outbox) -> None:
    """A healthy set-up: an entry was sent, another one waits, and a dispatcher serves both."""
    put(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    put(database, ob)
    beat(crm(database, ob))


# --- a healthy set-up


def test_a_healthy_set_up_has_no_finding(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)

    document = examined(database)

    assert (document["findings"], document["unchecked"], document["is_healthy"]) == ([], [], True)
    assert document["checked"] == list(doctor.CHECKS)
    checked = asyncio.run(crm(database, ob).check())
    assert (checked.findings, checked.unchecked) == ([], [])


def test_an_outbox_that_was_never_used_has_no_finding(database: Database) -> None:
    assert found(database) == []


# --- what each rule finds on a real database


def of_another_env(database: Database, ob: outbox.Outbox) -> dict[str, str]:
    return {"OUTBOX_ENV": "prod"}


def with_another_secret(database: Database, ob: outbox.Outbox) -> dict[str, str]:
    return {"OUTBOX_SECRET": OTHER_SECRET}


def without_an_old_secret(database: Database, ob: outbox.Outbox) -> dict[str, str]:
    return {"OUTBOX_SECRET": SECRET_TEXT.replace("k1:", "k2:")}


def without_a_table(database: Database, ob: outbox.Outbox) -> None:
    with database.owner() as connection:
        TABLES.tombstone.drop(connection)


def suspended(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.update(TABLES.meta).values(suspended_reason="this is a copy"))


def unclaimed(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.delete(TABLES.dispatcher))
    age(database, MINUTES)


def with_a_dead_one(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.update(TABLES.dispatcher).values(host="dead", seen_at=_earlier(database, LIVE_FOR)))
    beat(crm(database, ob))


def _earlier(database: Database, by: timedelta) -> datetime:
    at: datetime = database.rows(TABLES.dispatcher)[0].seen_at
    return at - by


def with_another_lease(database: Database, ob: outbox.Outbox) -> None:
    beat(crm(database, ob, lease=timedelta(seconds=90), callback_timeout=timedelta(seconds=27.5)))


def with_an_unknown_operation(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send", count=2)
    age(database, MINUTES)


class Knowing(MemoryAdapter):
    def serves(self, operation: str) -> bool:
        return operation == "crm.contacts.upsert"


def with_a_misspelt_operation(database: Database, ob: outbox.Outbox) -> None:
    run_once(database, ob, adapters={"crm": Knowing()})
    age(database, MINUTES)


def settling(name: str) -> Operations:
    effects = Operations()

    @effects.on_settled(name)
    def settled(session: Any, settlement: Settlement) -> None:
        pass

    return effects


def with_a_callback_of_another_process(database: Database, ob: outbox.Outbox) -> None:
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[settling("crm.upsert")])


def with_a_callback_without_operation(database: Database, ob: outbox.Outbox) -> None:
    included = settling("mail.send")
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[included])
    database.execute(sa.delete(TABLES.dispatcher))
    beat(crm(database, ob, include=[included]))


def declaring(**changed: Any) -> Callable[[Database, outbox.Outbox], None]:
    """What this release refuses at its start, another one's process may have."""

    def declare(database: Database, ob: outbox.Outbox) -> None:
        declared = json.loads(database.rows(TABLES.dispatcher)[0].declared)
        declared["operations"]["crm"] |= changed
        database.execute(sa.update(TABLES.dispatcher).values(declared=json.dumps(declared)))

    return declare


def with_a_window_of_an_hour(database: Database, ob: outbox.Outbox) -> None:
    beat(dispatcher(database, ob, adapters={"mail": MemoryAdapter(window=timedelta(hours=1))}))


def with_a_keep_for_shorter_windows(database: Database, ob: outbox.Outbox) -> None:
    beat(dispatcher(database, ob, adapters={"mail": MemoryAdapter()}, keep=timedelta(days=2)))
    beat(dispatcher(database, ob, adapters={"pay": MemoryAdapter(window=timedelta(days=30))}))


def with_a_small_pool(database: Database, ob: outbox.Outbox) -> None:
    small = database.new_engine(pool_size=1, max_overflow=1)
    database.execute(sa.delete(TABLES.dispatcher))
    beat(dispatcher(small, ob, adapters={"crm": MemoryAdapter()}))


BROKEN: list[tuple[Callable[..., Any], str, str, str]] = [
    (without_a_table, "schema", "error", "lacks table outbox_tombstone"),
    (of_another_env, "environment", "error", "belongs to env 'test', but this process"),
    (with_another_secret, "secrets", "error", "the secret of kid 'k1' differs"),
    (without_an_old_secret, "key ids", "error", "under kid 'k1', which is not in the key ring"),
    (suspended, "suspended", "error", "sending is suspended: this is a copy"),
    (unclaimed, "running", "error", "entries have been due for 0:02:0"),
    (with_a_dead_one, "running", "warning", "dispatcher dead:"),
    (with_another_lease, "alike", "warning", "differ in lease: 60.0 ("),
    (with_an_unknown_operation, "served", "error", "2 entries of mail.send wait: no live dispatcher has registered"),
    (
        with_a_misspelt_operation,
        "served",
        "error",
        "1 entries of crm.upsert wait: no adapter of this dispatcher serves it",
    ),
    (with_a_callback_of_another_process, "callbacks", "warning", "no live dispatcher has the callback 'on_settled crm"),
    (with_a_callback_without_operation, "callbacks", "warning", "'on_settled mail.send' fits no operation"),
    (declaring(timeout=58.0), "lease", "error", "timeout 58 s and margin 5 s do not fit into the lease of 60 s"),
    (
        with_a_window_of_an_hour,
        "retries",
        "warning",
        "its 20 attempts can take 1:57:03, and the service remembers a key",
    ),
    (with_a_keep_for_shorter_windows, "retention", "error", "deletes entries 2 days, 0:00:00 after they settled"),
    (with_a_small_pool, "pool", "warning", "gives 2 connections; 3 are used at once"),
]


@pytest.mark.parametrize(("broken", "check", "severity", "text"), BROKEN, ids=[each[0].__name__ for each in BROKEN])
def test_a_rule_finds_what_it_is_for(
    request: pytest.FixtureRequest,
    ob: outbox.Outbox,
    broken: Callable[..., Any],
    check: str,
    severity: str,
    text: str,
) -> None:
    """On one database or the other: a healthy set-up asks each of them every question."""
    kind = "postgresql" if BROKEN.index((broken, check, severity, text)) % 2 else "sqlite"
    database: Database = request.getfixturevalue(kind)
    deploy(database, ob)

    changed = broken(database, ob) or {}
    findings = found(database, **changed)

    assert [(each[0], each[1]) for each in findings] == [(check, severity)]
    assert text in findings[0][2]


def test_a_callback_that_entries_wait_for_is_an_error(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)
    with_a_callback_of_another_process(database, ob)
    put(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    ((check, severity, text),) = found(database)

    assert (check, severity) == ("callbacks", "error")
    assert text.endswith("; 1 entries wait for it")


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


def test_settings_of_a_mariadb_that_put_commits_at_risk_are_found(mariadb: Database, ob: outbox.Outbox) -> None:
    """The server of the tests waits for no disk."""
    deploy(mariadb, ob)
    with mariadb.owner() as connection:
        before = connection.exec_driver_sql(
            "SELECT @@GLOBAL.wait_timeout, @@GLOBAL.innodb_flush_log_at_trx_commit"
        ).one()
        connection.exec_driver_sql("SET GLOBAL wait_timeout = 5, GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        document = examined(mariadb)
    finally:
        with mariadb.owner() as connection:
            restored = "SET GLOBAL wait_timeout = %s, GLOBAL innodb_flush_log_at_trx_commit = %s"
            connection.exec_driver_sql(restored, tuple(before))

    assert document["unchecked"] == []
    texts = [(each["check"], each["text"]) for each in document["findings"]]
    assert texts == [("server", "innodb_flush_log_at_trx_commit is 2"), ("server", "wait_timeout is 5")]


def test_a_dispatcher_on_mariadb_logs_what_is_found_of_the_server_once(
    mariadb: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of the tests waits for no disk."""

    async def serve() -> None:
        serving = asyncio.ensure_future(daemon.serve(crm(mariadb, ob)))
        await until_true(lambda: any("database server: " in line for line in caplog.messages))
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    asyncio.run(serve())

    (line,) = [line for line in caplog.messages if line.startswith("database server: ")]
    assert line.startswith(
        "database server: innodb_flush_log_at_trx_commit is 0: a commit that was answered may be lost"
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


# --- what no test can bring about in a moment: rules on what would be read


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (doctor_rules.horizon([Holder("the prepared transaction 'x'", 3600)]), ["warning"]),
        (doctor_rules.horizon([Holder("the replication slot s, which nothing reads,", None)]), ["warning"]),
        (doctor_rules.horizon([Holder("a session", 240)]), []),
        (doctor_rules.vacuum([TableHealth("outbox_queue", 10, 100_001, True)]), ["warning"]),
        (doctor_rules.vacuum([TableHealth("outbox_queue", 10, 100_000, True)]), []),
        (doctor_rules.vacuum([TableHealth("outbox_entry", 1_000_000, 400_000, True)]), []),
        (doctor_rules.pooler(is_between=True, prepares=True), ["warning"]),
        (doctor_rules.pooler(is_between=True, prepares=False), ["notice"]),
        (doctor_rules.pooler(is_between=False, prepares=True), []),
        (doctor_mariadb.server({"innodb_flush_log_at_trx_commit": 2, "sync_binlog": 0}), ["warning", "warning"]),
        (doctor_mariadb.server({"max_allowed_packet": 2**22, "wait_timeout": 60, "sync_binlog": 1}), []),
        (doctor_mariadb.galera({"wsrep_osu_method": "RSU", "wsrep_cluster_size": "2"}), ["warning", "warning"]),
        (doctor_mariadb.galera({"wsrep_osu_method": "TOI", "wsrep_cluster_size": "3", "wsrep_on": "ON"}), []),
        (doctor_mariadb.galera({"wsrep_cluster_status": "non-Primary", "wsrep_on": "OFF"}), ["error", "error"]),
        (doctor_rules.clock(timedelta(seconds=6)), ["warning"]),
        (doctor_rules.clock(timedelta(seconds=-6)), ["warning"]),
        (doctor_rules.clock(timedelta(seconds=5)), []),
        (doctor_rules.partitions(Layout(True, True, date(2026, 1, 1), ())), ["error"]),
        (doctor_rules.partitions(Layout(False, True, date(2026, 1, 1), ())), []),
    ],
)
def test_a_rule_judges_what_was_read(findings: Iterator[Finding], expected: list[str]) -> None:
    assert [finding.severity for finding in findings] == expected


def test_partitions_for_a_few_days_only_are_a_warning() -> None:
    today = date(2026, 1, 1)
    days = tuple(Day(today + timedelta(days=ahead), True, False) for ahead in range(3))

    (finding,) = doctor_rules.partitions(Layout(True, True, today, days))

    assert (finding.severity, finding.text) == ("warning", "body partitions exist for 2 days ahead only")


# --- what is not checked, and that nothing is changed


def test_without_the_settings_it_says_what_it_did_not_check(database: Database) -> None:
    result = command("doctor", database=database)

    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "not checked: environment: OUTBOX_ENV is not set here",
            "not checked: secrets: OUTBOX_SECRET is not set here",
            "not checked: key ids: OUTBOX_SECRET is not set here",
            "16 checks, 0 findings",
        ],
    )


def test_without_the_tables_it_finds_that_and_leaves_out_what_needs_them(database: Database) -> None:
    with database.owner() as connection:
        TABLES.metadata.drop_all(connection)

    document = examined(database)

    assert [each["check"] for each in document["findings"]] == ["schema"]
    assert {each["reason"] for each in document["unchecked"]} == {"a table is missing: see the finding of `schema`"}
    assert {"horizon", "clock", "extras"} <= set(document["checked"])


def test_a_finding_says_what_it_means_and_what_to_do(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)
    suspended(database, ob)

    result = command("doctor", database=database, **SETTINGS)

    assert (result.exit_code, result.stdout.splitlines()) == (
        7,
        [
            "error: suspended: sending is suspended: this is a copy",
            "  means: no dispatcher of this database sends",
            "  do: follow docs/restore.md, then `outbox resume --after-restore`",
            "19 checks, 1 finding",
        ],
    )


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


def test_an_outcome_that_cannot_be_parsed_is_counted_without_its_reason(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)
    with_a_misspelt_operation(database, ob)
    broken = TABLES.queue.c.outcome.concat("}")
    database.execute(sa.update(TABLES.queue).values(outcome=broken))

    assert [text for check, _, text in found(database) if check == "served"] == ["1 entries of crm.upsert wait: "]


def test_no_check_can_write(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(connection: sa.Connection, context: doctor.Context) -> list[Finding]:
        connection.execute(sa.insert(TABLES.kid).values(kid="k", secret_check="x", recorded_at=datetime.now(UTC)))
        return []

    monkeypatch.setattr(doctor, "CHECKS", {"write": write})
    ((unchecked,)) = examined(postgresql)["unchecked"]

    assert "25006" in unchecked["reason"]  # PostgreSQL, appendix A: read_only_sql_transaction
    assert postgresql.rows(TABLES.kid) == []


# --- a dispatcher's own check


def test_the_check_of_a_dispatcher_judges_its_own_settings(database: Database, ob: outbox.Outbox) -> None:
    working = dispatcher(database, ob, adapters={"crm": MemoryAdapter(window=timedelta(hours=1))})

    diagnosis = asyncio.run(working.check())

    assert [finding.check for finding in diagnosis.findings] == ["retries"]
    assert not diagnosis.is_healthy
    assert database.rows(TABLES.dispatcher) == []


def test_the_check_of_a_dispatcher_compares_it_with_those_that_run(database: Database, ob: outbox.Outbox) -> None:
    beat(crm(database, ob))

    diagnosis = asyncio.run(crm(database, ob, concurrency=5).check())

    assert [finding.text.partition(":")[0] for finding in diagnosis.findings] == [
        "live dispatchers of the same operation differ in concurrency"
    ]


def test_the_check_of_a_dispatcher_raises_what_ends_it_at_its_start(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)
    elsewhere = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="prod")

    with pytest.raises(ConfigurationError, match="belongs to env 'test'"):
        asyncio.run(crm(database, elsewhere).check())


def test_with_an_async_engine_the_check_finds_the_same(postgresql: Database, ob: outbox.Outbox) -> None:
    deploy(postgresql, ob)

    async def main() -> doctor.Diagnosis:
        engine = postgresql.async_engine()
        working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}, callbacks_at_once=1)
        try:
            return await working.check()
        finally:
            await working.close()
            await engine.dispose()

    diagnosis = asyncio.run(main())

    differing = {finding.text.partition(":")[0].rpartition(" ")[2] for finding in diagnosis.findings}
    assert differing == {"callbacks_at_once", "connections_max"}  # an engine without a pool sets no limit
    assert diagnosis.unchecked == []
