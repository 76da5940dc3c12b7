"""Heartbeats: the row of each running dispatcher, how `outbox status` shows it, and that it never stops a send."""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import command, document, succeeded
from support.daemons import Daemon, daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import age, dispatcher, put, put_one, run_once, states

import outbox
from dispatchers import Breaker, Limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.dispatchers import differences, is_served
from dispatchers.maintenance.jobs import forget_dead_dispatchers
from dispatchers.process.daemon import REPEAT_SECONDS
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.store.records.heartbeats import BEAT_SECONDS, KEPT_FOR, LIVE_FOR, DispatcherSeen
from outbox.errors import SchemaError

MINUTES = timedelta(minutes=2)

GATED = """
from support.daemons import GatedService

def make():
    return Dispatcher(url, outbox=ob, adapters={"crm": GatedService(here)}, concurrency=2, grace=timedelta(seconds=30))
"""


def crm(database: Database, ob: outbox.Outbox, **settings: Any) -> DispatcherWork:
    return dispatcher(database, ob, **{"adapters": {"crm": MemoryAdapter()}} | settings)


def beat(*working: DispatcherWork) -> None:
    for each in working:
        asyncio.run(each.heartbeats.beat())


def rows(database: Database) -> list[sa.Row[Any]]:
    return database.rows(TABLES.dispatcher)


def unseen_for(database: Database, by: timedelta) -> None:
    """As if the last heartbeats had been written so long ago."""
    for row in rows(database):
        changed = sa.update(TABLES.dispatcher).where(TABLES.dispatcher.c.id == row.id)
        database.execute(changed.values(since=row.since - by, seen_at=row.seen_at - by))


# --- the row


def test_a_running_dispatcher_is_shown_with_what_it_serves(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    beat(crm(database, ob, adapters={"mail": MemoryAdapter(), "crm": MemoryAdapter()}))

    (shown,) = document("status", database=database)["dispatchers"]
    printed = succeeded("status", database=database)

    assert (shown["is_live"], shown["in_flight"], shown["operations"]) == (True, 0, ["crm", "mail"])
    assert shown["settings"]["lease"] == 60.0
    assert shown["settings"]["operations"]["crm"]["timeout"] == 30.0
    assert f"{shown['host']}:{shown['pid']}" in printed
    assert shown["settings_digest"] in printed
    assert "crm, mail" in printed


def test_a_heartbeat_is_one_transaction_and_updates_its_row(database: Database, ob: outbox.Outbox) -> None:
    working, committed = crm(database, ob), []
    beat(working)
    first = rows(database)

    sa.event.listen(database.dispatchers_engine, "commit", committed.append)
    beat(working)

    (before,), (after,) = first, rows(database)
    assert (before.id, before.since) == (after.id, after.since)
    assert after.seen_at > before.seen_at
    assert len(committed) / BEAT_SECONDS <= 0.1  # an idle dispatcher's 1.7 transactions a second stay below 2


@contextmanager
def with_two_in_flight(database: Database, ob: outbox.Outbox, directory: Path) -> Iterator[Daemon]:
    put(database, ob, count=3)
    write_factory(directory, GATED)
    with daemon(directory, database.url) as process:
        wait_for(lambda: len(list(directory.glob("*.waiting"))) == 2, "two sends", workers=[process])
        wait_for(lambda: rows(database), "its heartbeat", workers=[process])
        yield process


def test_a_clean_stop_removes_the_row_once_the_drain_is_over(
    database: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    with with_two_in_flight(database, ob, tmp_path) as process:
        process.terminate()
        wait_for(lambda: "draining; sends in flight" in process.output, "the drain")
        draining = rows(database)
        (tmp_path / "gate").touch()

        assert process.wait() == 0, process.output

    assert [row.pid for row in draining] == [process.process.pid]
    assert rows(database) == []


def test_a_stop_that_leaves_sends_in_doubt_leaves_the_row(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    with with_two_in_flight(postgresql, ob, tmp_path) as process:
        process.terminate()
        wait_for(lambda: "draining; sends in flight" in process.output, "the drain")
        time.sleep(REPEAT_SECONDS)
        process.process.send_signal(signal.SIGTERM)
        process.wait(seconds=60)

    assert len(rows(postgresql)) == 1


def test_a_dead_dispatcher_is_shown_for_an_hour_and_then_forgotten(database: Database, ob: outbox.Outbox) -> None:
    working = crm(database, ob)
    beat(working)

    unseen_for(database, LIVE_FOR)
    (shown,) = document("status", database=database)["dispatchers"]
    printed = succeeded("status", database=database)
    kept = asyncio.run(forget_dead_dispatchers(working.store.run, TABLES))
    unseen_for(database, KEPT_FOR)
    listed = document("status", database=database)["dispatchers"]

    assert (shown["is_live"], kept, listed) == (False, 0, [])
    assert "ago, dead" in printed
    assert asyncio.run(forget_dead_dispatchers(working.store.run, TABLES)) == 1
    beat(working)  # a process that was suspended for so long is back
    assert len(rows(database)) == 1


def test_the_command_maintenance_forgets_the_dead_too(database: Database, ob: outbox.Outbox) -> None:
    beat(crm(database, ob))
    unseen_for(database, KEPT_FOR)

    succeeded_but_for_progress(database, "--dry-run")
    counted = len(rows(database))
    succeeded_but_for_progress(database)

    assert (counted, rows(database)) == (1, [])


def succeeded_but_for_progress(database: Database, *options: str) -> None:
    from support.cli_runner import command

    assert command("maintenance", "--window", "forever", *options, database=database).exit_code == 0


# --- it never stops a send


def test_a_heartbeat_that_fails_is_logged_once_and_stops_no_send(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put_one(database, ob)
    working = crm(database, ob)
    with database.owner() as connection:
        TABLES.dispatcher.drop(connection)

    async def main() -> int:
        async with working.heartbeats.running():
            await working.heartbeats.beat()
            settled = await working.run_once()
        await working.heartbeats.leave()
        return settled

    assert asyncio.run(main()) == 1
    (logged,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert logged.startswith("cannot write this dispatcher's heartbeat")
    assert "table 'outbox_dispatcher' does not exist" in logged


def test_a_dispatcher_does_not_start_on_a_database_without_the_table(database: Database, ob: outbox.Outbox) -> None:
    with database.owner() as connection:
        TABLES.dispatcher.drop(connection)

    with pytest.raises(SchemaError, match="lacks table outbox_dispatcher: "):
        asyncio.run(crm(database, ob).check())


def test_run_once_leaves_no_heartbeat(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    assert rows(database) == []


# --- alike or not


def test_status_names_the_setting_in_which_two_live_dispatchers_differ(database: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(rate=5, breaker=Breaker(failures=3))}
    beat(crm(database, ob), crm(database, ob), crm(database, ob, lease=timedelta(seconds=90), limits=limits))

    found = document("status", database=database)["differences"]
    printed = succeeded("status", database=database)

    assert {each["setting"] for each in found} == {"lease", "limits", "callback_timeout"}
    ((_, alike), (_, other)) = next(each["values"] for each in found if each["setting"] == "lease")
    assert (len(alike), len(other)) == (2, 1)
    assert "live dispatchers differ in lease: 60.0 (" in printed


def seen(number: int, *, is_live: bool = True, **declared: Any) -> DispatcherSeen:
    settings = {"lease": 60.0, "operations": {"crm": {"timeout": 30.0}}} | declared
    return DispatcherSeen(
        host="web",
        pid=number,
        version="1",
        since=datetime.now(UTC),
        seen_at=datetime.now(UTC),
        is_live=is_live,
        in_flight=0,
        settings_digest=json.dumps(settings),
        operations=sorted(settings["operations"]),
        settings=settings,
    )


@pytest.mark.parametrize(
    "other",
    [
        seen(2),
        seen(2, is_live=False, lease=90.0),
        seen(2, lease=90.0, operations={"mail": {"timeout": 30.0}}),
        seen(2, operations={"crm": {"timeout": 30.0}, "mail": {"timeout": 5.0}}),
    ],
    ids=["alike", "dead", "of another fleet", "serves more"],
)
def test_dispatchers_that_may_differ_are_not_reported(other: DispatcherSeen) -> None:
    assert differences([seen(1), other]) == []


def test_an_adapter_that_two_declare_differently_is_a_difference() -> None:
    (found,) = differences([seen(1), seen(2, operations={"crm": {"timeout": 5.0}})])

    assert (found.setting, found.values) == ("crm: timeout", [(30.0, ["web:1"]), (5.0, ["web:2"])])


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (["a", "b"], ["b"], "callbacks: with a (web:1) or without (web:2)"),
        (["a", "b"], ["b", "c"], "callbacks: with a (web:1) or with c (web:2)"),
        ([str(n) for n in range(30)], [], "callbacks: with 0, 1, 10 and 27 more (web:1) or without (web:2)"),
        (["a", "b"], ["b", "a"], 'callbacks: ["a", "b"] (web:1) or ["b", "a"] (web:2)'),
    ],
)
def test_of_two_lists_the_text_has_what_differs(ours: list[str], theirs: list[str], text: str) -> None:
    (found,) = differences([seen(1, callbacks=ours), seen(2, callbacks=theirs)])

    assert found.text == text


@pytest.mark.parametrize(
    ("operation", "served"), [("crm", True), ("crm.upsert", True), ("crmx", False), ("mail", False)]
)
def test_an_operation_is_served_by_a_live_dispatcher_with_a_prefix_of_it(operation: str, served: bool) -> None:
    assert is_served(operation, [seen(1)]) == served
    assert not is_served(operation, [seen(1, is_live=False)])


# --- what no dispatcher serves


def test_waiting_entries_that_no_live_dispatcher_has_registered_are_named(
    database: Database, ob: outbox.Outbox
) -> None:
    put(database, ob, "crm.upsert")
    put(database, ob, "mail.send", count=3)
    beat(crm(database, ob))

    young = document("status", database=database)["unregistered"]
    age(database, MINUTES)
    found = document("status", database=database)["unregistered"]

    assert young == []  # an older release's process, without a heartbeat, may be about to send them
    assert found == [{"operation": "mail.send", "destination": "mail", "entries": 3, "has_more": False}]
    printed = succeeded("status", database=database)
    assert "3 of mail.send wait: no live dispatcher has registered it" in printed
    assert "crm.upsert" not in printed


def test_what_a_dispatcher_has_reported_as_unserved_is_named_once(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send")
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    age(database, MINUTES)
    beat(crm(database, ob))

    assert succeeded("status", database=database).count("mail.send") == 1


def test_status_says_that_entries_wait_and_no_dispatcher_reports_itself(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "mail.send")
    fresh = succeeded("status", database=database)
    age(database, MINUTES)
    waiting = succeeded("status", database=database)
    beat(crm(database, ob))

    assert "no running dispatcher reports itself" not in fresh
    assert "due for 2m and no running dispatcher reports itself" in waiting
    assert "no running dispatcher reports itself" not in succeeded("status", database=database)


# --- what another release writes, and clocks

MALFORMED = [
    "no JSON",
    "null",
    "[]",
    "{}",
    '{"operations": ["crm"]}',
    "[" * 100_000,
    json.dumps({"lease": float("nan"), "operations": {}}),
    json.dumps({"lease": 60, "margin": 5, "retention": "a month", "callback_concurrency": 4, "operations": {}}),
]


@pytest.mark.parametrize("declared", MALFORMED, ids=lambda declared: str(declared)[:20])
def test_settings_that_this_release_cannot_read_are_reported(
    database: Database, ob: outbox.Outbox, declared: str
) -> None:
    put(database, ob, "mail.send")
    age(database, MINUTES)
    beat(crm(database, ob), crm(database, ob))
    newer = rows(database)[0].id
    changed = sa.update(TABLES.dispatcher).where(TABLES.dispatcher.c.id == newer)
    database.execute(changed.values(declared=declared, version="9.0", host="newer"))

    status = document("status", database=database)
    doctor = json.loads(command("doctor", "--json", database=database).stdout)

    assert [each["is_readable"] for each in status["dispatchers"]].count(False) == 1
    assert status["unregistered"] == []  # the newer one may serve what waits
    assert [(each["check"], each["text"].partition(":")[0]) for each in doctor["findings"]] == [
        ("settings", "the settings of dispatcher newer")
    ]
    assert [each["check"] for each in doctor["unchecked"]] == ["environment", "secrets", "key ids"]


def test_a_clock_that_was_set_back_leaves_no_dead_dispatcher_alive(database: Database, ob: outbox.Outbox) -> None:
    dead, working = crm(database, ob), crm(database, ob)
    beat(dead, working)

    unseen_for(database, -2 * KEPT_FOR)  # as if the clock had been set back by two hours
    before = document("status", database=database)["dispatchers"]
    beat(working)
    after = document("status", database=database)["dispatchers"]

    assert [each["is_live"] for each in before] == [False, False]
    assert sorted(each["is_live"] for each in after) == [False, True]
    assert asyncio.run(forget_dead_dispatchers(working.store.run, TABLES)) == 1


def test_a_thousand_dispatchers_are_compared_at_once() -> None:
    """Each with settings of its own, which is the most work."""
    fleet = [seen(number, lease=60.0 + number) for number in range(1000)]

    (found,) = differences(fleet)

    assert (found.setting, len(found.values)) == ("lease", 1000)
    assert len(found.text) < 200
    assert is_served("crm.upsert", fleet)


def test_a_locked_row_of_a_heartbeat_delays_no_send(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=3)
    working = crm(postgresql, ob, lease=timedelta(seconds=40))
    beat(working)

    async def main() -> int:
        async with working.heartbeats.running():
            settled = await working.run_once()
        await working.close()
        return settled

    with postgresql.owner() as connection:
        connection.execute(sa.select(TABLES.dispatcher).with_for_update())
        assert asyncio.run(main()) == 3

    assert states(postgresql) == {"delivered": 3}
