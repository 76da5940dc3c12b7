"""Why due entries of a destination are not claimed, as `outbox destinations`, the dashboard and `outbox doctor` say it."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from support.callbacks import Gate
from support.cli_runner import succeeded
from support.dashboard import Browser, dashboard
from support.database import TABLES, Database
from support.decide import fresh
from support.decisions import decide
from support.doctor import examined
from support.entries import age, dispatcher, put, run_once, until_true

import outbox
from dispatchers import Delivered, Limits, Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel, pause
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.waiting_reasons import why_waiting
from dispatchers.store.records.heartbeats import DispatcherSeen

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOON = NOW + timedelta(seconds=3)


def seen(
    name: str = "web-1",
    *,
    operations: tuple[str, ...] = ("crm.do",),
    is_live: bool = True,
    limits: Mapping[str, Any] | None = None,
    **used_up: Any,
) -> DispatcherSeen:
    return DispatcherSeen(
        host=name,
        pid=7,
        version="1",
        since=NOW,
        seen_at=NOW,
        is_live=is_live,
        in_flight=0,
        settings_digest="",
        operations=list(operations),
        settings={"callback_concurrency": 4, "max_in_flight": 1000, "limits": limits or {}},
        used_up=used_up,
    )


def row(**columns: Any) -> Any:
    return SimpleNamespace(**{"max_permits": None, "rate_at": None, "rate_per_second": None} | columns)


CASES: list[tuple[list[DispatcherSeen], Any, str | None, str | None]] = [
    ([seen()], None, None, None),
    ([seen()], row(), None, None),
    ([seen()], None, "a restore", "sending is suspended: a restore"),
    ([], None, None, "no dispatcher is live"),
    ([seen(is_live=False)], None, None, "no dispatcher is live"),
    ([seen(operations=("mail.send",))], None, None, "no live dispatcher serves it"),
    ([seen(operations=("crm",))], None, None, None),
    ([seen()], row(max_permits=3), None, "all 3 permits of total_concurrency are in use"),
    ([seen()], row(max_permits=4), None, None),
    ([seen()], row(rate_at=SOON, rate_per_second=0.5), None, "its rate of 0.5/s is used up"),
    ([seen()], row(rate_at=NOW, rate_per_second=0.5), None, None),
    ([seen()], row(rate_at=SOON, rate_per_second=4.0), None, "its rate of 4/s is used up"),  # 12 of a burst of 4
    ([seen()], row(rate_at=NOW + timedelta(seconds=0.5), rate_per_second=4.0), None, None),  # 2 of 4
    ([seen(limits={"crm": {"burst": 20}})], row(rate_at=SOON, rate_per_second=4.0), None, None),
    ([seen(limits={"crm": {"burst": 12}})], row(rate_at=SOON, rate_per_second=4.0), None, "its rate of 4/s is used up"),
    ([seen(concurrency=["crm"])], None, None, "its concurrency is used up (web-1:7)"),
    ([seen(concurrency=["mail"])], None, None, None),
    ([seen(fleet=["crm"])], None, None, "the limits that all databases of the fleet share are used up (web-1:7)"),
    ([seen(fleet=["mail"])], None, None, None),
    ([seen(max_in_flight=[])], None, None, "max_in_flight=1000 is used up (web-1:7)"),
    (
        [seen(callback_concurrency=["crm"])],
        None,
        None,
        "its callbacks take all that callback_concurrency=4 allows (web-1:7)",
    ),
    ([seen(concurrency=["crm"]), seen("web-2")], None, None, None),
    (
        [seen(concurrency=["crm"]), seen("web-2", operations=("mail",))],
        None,
        None,
        "its concurrency is used up (web-1:7)",
    ),
    (
        [seen(f"web-{number}", concurrency=["crm"]) for number in range(5)],
        None,
        None,
        "its concurrency is used up (web-0:7, web-1:7, web-2:7 and 2 more)",
    ),
    ([seen(of_a_newer_release=["crm"])], None, None, None),
]


@pytest.mark.parametrize(("dispatchers", "of", "suspended", "why"), CASES)
def test_a_reason_is_named_only_if_it_is_true_of_each_that_serves_it(
    dispatchers: list[DispatcherSeen], of: Any, suspended: str | None, why: str | None
) -> None:
    assert why_waiting("crm", of, NOW, dispatchers, suspended, permits_taken=3) == why


def why_of(database: Database) -> Mapping[str, str | None]:
    with database.engine.connect() as connection:
        found = read_destinations(connection, TABLES).destinations
    return {state.name: state.waits_because for state in found}


def test_a_destination_of_any_name_is_served_by_who_serves_its_operation(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "http.hooks.send", destination="hooks:a")
    put(database, ob, "http.hooks.send", destination="hooks:b")
    put(database, ob, "crm.upsrt", destination="typed")
    working = dispatcher(database, ob, adapters={"http": MemoryAdapter()}, limits={"hooks": Limits(concurrency=1)})
    working._loops._scheduler.destinations.reserve(fresh(destination="hooks:a"))
    asyncio.run(working.heartbeats.beat())

    found = why_of(database)

    assert (found["hooks:a"] or "").startswith("its concurrency is used up")
    assert (found["hooks:b"], found["typed"]) == (None, "no live dispatcher serves it")


def test_slow_callbacks_are_named_by_the_commands_and_the_dashboard(postgresql: Database, ob: outbox.Outbox) -> None:
    effects, gate = Operations(), Gate()
    for name in ("bank", "crm"):
        effects.operation(f"{name}.do")(lambda delivery: Delivered())
        effects.on_settled(f"{name}.do")(gate)
    for name in ("bank", "crm"):
        put(postgresql, ob, f"{name}.do", count=20)
    working = dispatcher(
        postgresql, ob, include=[effects], callback_concurrency=1, callback_timeout=timedelta(seconds=50)
    )

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: len(working._loops.used_up()) > 0 and gate.entered == 1)
        await working.heartbeats.beat()
        await asyncio.to_thread(look)
        gate.opened.set()
        stopping.set()
        await pump

    def look() -> None:
        why = "its callbacks take all that callback_concurrency=1 allows ("
        found = why_of(postgresql)
        assert [name for name, text in found.items() if text is not None and text.startswith(why)] == ["bank", "crm"]
        printed = " ".join(succeeded("destinations", database=postgresql, COLUMNS="250").split())
        assert "waits: its callbacks take all that callback_concurrency=1 allows" in printed

    asyncio.run(main())


def test_callbacks_are_named_for_entries_cancelled_during_a_pause(postgresql: Database, ob: outbox.Outbox) -> None:
    effects, gate = Operations(), Gate()
    effects.operation("bank.do")(lambda delivery: Delivered())
    effects.on_settled("bank.do")(gate)
    for id in put(postgresql, ob, "bank.do", count=60):
        decide(postgresql, cancel, id)
    with postgresql.engine.begin() as connection:
        pause(connection, TABLES, "bank", actor="ada", reason="their provider is moving")
    working = dispatcher(
        postgresql, ob, include=[effects], callback_concurrency=1, callback_timeout=timedelta(seconds=50)
    )

    async def main() -> None:
        stopping = asyncio.Event()
        pump = asyncio.create_task(working.pump(stopping))
        await until_true(lambda: len(working._loops.used_up()) > 0 and gate.entered == 1)
        await working.heartbeats.beat()
        found = await asyncio.to_thread(why_of, postgresql)
        gate.opened.set()
        stopping.set()
        await pump
        assert (found["bank"] or "").startswith("its callbacks take all that callback_concurrency=1 allows (")

    asyncio.run(main())


@pytest.mark.parametrize(("setting", "is_named"), [("callback_concurrency", True), ("concurrency", False)])
def test_entries_that_are_not_sent_wait_for_callbacks_only(setting: str, is_named: bool) -> None:
    busy = row(max_permits=3, rate_at=SOON, rate_per_second=0.5)

    found = why_waiting("crm", busy, NOW, [seen(**{setting: ["crm"]})], None, permits_taken=3, are_sent=False)

    assert (found is not None) is is_named


def test_the_callback_that_no_live_dispatcher_has_is_named(postgresql: Database, ob: outbox.Outbox) -> None:
    older, newer = Operations(), Operations()
    for effects in (older, newer):
        effects.operation("bank.do")(lambda delivery: Delivered())
    newer.on_settled("bank.do")(lambda session, settlement: None)
    run_once(postgresql, ob, include=[newer])  # it records its callback, and leaves
    put(postgresql, ob, "bank.do", count=2)
    working = dispatcher(postgresql, ob, include=[older])
    asyncio.run(working.run_once())
    asyncio.run(working.heartbeats.beat())

    assert why_of(postgresql)["bank"] == "no live dispatcher has the callback on_settled bank.do"


def test_the_budget_of_a_dispatcher_without_the_callback_does_not_count() -> None:
    having = seen(callback_concurrency=["crm"])
    having.settings["callbacks"] = ["on_settled crm.do"]

    found = why_waiting(
        "crm",
        None,
        NOW,
        [having, seen("web-2")],
        None,
        permits_taken=0,
        are_sent=False,
        callbacks=["on_settled crm.do"],
    )

    assert found == "its callbacks take all that callback_concurrency=4 allows (web-1:7)"


def test_doctor_names_what_has_waited_for_more_than_a_minute(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=3)
    age(postgresql, timedelta(minutes=2))
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, limits={"crm": Limits(concurrency=1)})
    working._loops._scheduler.destinations.reserve(fresh(destination="crm"))
    asyncio.run(working.heartbeats.beat())

    (finding,) = [each for each in examined(postgresql)["findings"] if each["check"] == "waiting"]

    assert finding["text"].startswith("entries have been due for up to 0:02:0")
    assert "its concurrency is used up" in finding["text"]
    assert finding["text"].endswith("; destinations: crm")


def test_the_dashboard_shows_why_a_destination_waits(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob)

    with dashboard(postgresql) as app:
        page = Browser(app).text("/destinations")

    assert "waits: no dispatcher is live" in page


def test_a_heartbeat_with_a_used_up_budget_has_the_same_settings(postgresql: Database, ob: outbox.Outbox) -> None:
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, max_in_flight=1)
    before = working.heartbeats.as_seen()
    working._loops._scheduler.destinations.reserve(fresh(destination="crm"))
    after = working.heartbeats.as_seen()

    assert (before.used_up, after.used_up) == ({}, {"max_in_flight": []})
    assert (after.settings_digest, after.settings) == (before.settings_digest, before.settings)
