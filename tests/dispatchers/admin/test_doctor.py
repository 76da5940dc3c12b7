"""`outbox doctor`: each rule finds what it is for, mostly on a real database; a healthy setup has no finding."""

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command
from support.database import TABLES, Database
from support.doctor import SETTINGS, beat, crm, deploy, examined, found, suspended
from support.entries import age, dispatcher, put, run_once

import outbox
from dispatchers import Operations, Settlement
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.check import doctor, doctor_mariadb, doctor_rules
from dispatchers.admin.check.doctor_rules import Finding
from dispatchers.store.records.heartbeats import LIVE_FOR
from outbox.errors import ConfigurationError
from outbox.sql.schema.body_partitions import Layout
from outbox.sql.server_reports import Holder, TableHealth

MINUTES = timedelta(minutes=2)
OTHER_SECRET = SECRET_TEXT.replace("AAEC", "BBEC")


# --- a healthy setup


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


def unclaimed(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.delete(TABLES.dispatcher))
    age(database, MINUTES)


def claimed_by_no_dispatcher_yet(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.delete(TABLES.dispatcher))
    put(database, ob)


def with_a_dead_one(database: Database, ob: outbox.Outbox) -> None:
    database.execute(sa.update(TABLES.dispatcher).values(host="dead", seen_at=_earlier(database, LIVE_FOR)))
    beat(crm(database, ob))


def with_seven_dead_ones(database: Database, ob: outbox.Outbox) -> None:
    beat(*(crm(database, ob) for _ in range(6)))
    with_a_dead_one(database, ob)


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
    beat(dispatcher(database, ob, adapters={"mail": MemoryAdapter()}, retention=timedelta(days=2)))
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
    (with_a_dead_one, "running", "warning", "dispatchers that do not report any more: 1 (dead:"),
    (with_seven_dead_ones, "running", "warning", "dispatchers that do not report any more: 7 ("),
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
    (declaring(as_of="2024-03-04"), "dates", "notice", "last checked more than a year ago: crm (2024-03-04)"),
    (with_a_small_pool, "pool", "warning", "gives 2 connections; 3 may be in use"),
    (claimed_by_no_dispatcher_yet, "running", "notice", "and no dispatcher is live"),
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
    """On one database or the other: a healthy setup asks each of them every question."""
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
        (doctor_mariadb.purge(doctor_mariadb.MAX_HISTORY), []),
        (doctor_mariadb.purge(doctor_mariadb.MAX_HISTORY + 1), ["warning"]),
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
            "22 checks, 1 finding",
        ],
    )


def test_the_remedy_for_missing_tables_does_not_contradict_the_finding(database: Database, ob: outbox.Outbox) -> None:
    """What creates a table depends on what created it before, and only the finding says that."""
    without_a_table(database, ob)

    (finding,) = examined(database)["findings"]

    assert "outbox db upgrade" not in finding["remedy"]


def test_an_outcome_that_cannot_be_parsed_is_counted_without_its_reason(database: Database, ob: outbox.Outbox) -> None:
    deploy(database, ob)
    with_a_misspelt_operation(database, ob)
    broken = TABLES.queue.c.outcome.concat("}")
    database.execute(sa.update(TABLES.queue).values(outcome=broken))

    assert [text for check, _, text in found(database) if check == "served"] == ["1 entries of crm.upsert wait: "]


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
        working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}, callback_concurrency=1)
        try:
            return await working.check()
        finally:
            await working.close()
            await engine.dispose()

    diagnosis = asyncio.run(main())

    differing = {finding.text.partition(":")[0].rpartition(" ")[2] for finding in diagnosis.findings}
    assert differing == {"callback_concurrency", "max_connections"}  # an engine without a pool sets no limit
    assert diagnosis.unchecked == []
