"""What an app's error reporter hears of: defects, and never a payload or the text of another library's exception."""

import asyncio
import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import Database
from support.entries import age, claim_one, dispatcher, put, put_one, run_once, states

import outbox
from dispatchers import Delivery, Operations, Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline.routing import Routes
from dispatchers.process.daemon import _patiently
from dispatchers.store.database import DatabaseStore
from dispatchers.telemetry.errors import ErrorReport, ErrorReports
from outbox.errors import ConfigurationError

SECRET = "ada@example.com"


class Broken(MemoryAdapter):
    async def send(self, delivery: Delivery) -> Outcome:
        raise ValueError(f"cannot use {SECRET}")


def shown(report: ErrorReport) -> str:
    """All that a reporter can read of it."""
    return f"{report!r} {report.frames} {report.trace}"


def test_an_adapter_that_raises_is_reported_with_its_entry_without_text(database: Database, ob: outbox.Outbox) -> None:
    id, heard = put_one(database, ob), list[ErrorReport]()

    run_once(database, ob, adapters={"crm": Broken()}, report=heard.append)

    (report,) = heard
    assert (report.where, report.error, report.text) == ("adapter", "ValueError", "")
    assert (report.entry_id, report.operation, report.destination) == (id, "crm.upsert", "crm")
    assert [frame.name for frame in report.frames][-1] == "send"
    assert report.trace.startswith("ValueError\n")
    assert SECRET not in shown(report)


def test_a_status_lookup_that_raises_is_reported(database: Database, ob: outbox.Outbox) -> None:
    def find(delivery: Delivery) -> Any:
        raise KeyError(SECRET)

    heard = list[ErrorReport]()
    put_one(database, ob)
    service = MemoryAdapter(lambda delivery: Unknown("no answer"), window=None, find=find)
    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, report=heard.append)
        age(database, timedelta(hours=1))

    assert [(report.where, report.error) for report in heard] == [("adapter", "KeyError")]


class Unsure(MemoryAdapter):
    def serves(self, operation: str) -> bool:
        if operation == "crm.delete":
            raise KeyError(operation)
        return True

    def sends_alike(self, pinned: str, options: Any) -> bool:
        raise LookupError(pinned)


def test_an_adapter_that_raises_when_asked_about_an_entry_is_reported(sqlite: Database, ob: outbox.Outbox) -> None:
    id, heard = put_one(sqlite, ob), list[ErrorReport]()
    entry = claim_one(DatabaseStore(sqlite.engine, ob.configuration))._replace(sent_as="native other")
    seconds = timedelta(seconds=60), timedelta(seconds=5)
    routes = Routes({"crm": Unsure()}, lease=seconds[0], margin=seconds[1], errors=ErrorReports(heard.append))

    route = routes.find("crm.upsert")
    assert route is not None
    assert (routes.find("crm.delete"), route.sends_alike(entry)) == (None, False)

    found = [(report.where, report.error, report.entry_id) for report in heard]
    assert found == [("adapter", "KeyError", None), ("adapter", "LookupError", id)]


def test_a_callback_that_fails_is_reported_without_parameters(database: Database, ob: outbox.Outbox) -> None:
    effects, heard = Operations(), list[ErrorReport]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        session.execute(sa.text("SELECT * FROM nowhere WHERE email = :email"), {"email": SECRET})

    id = put_one(database, ob)

    run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[effects], report=heard.append)

    (report,) = heard
    assert (report.where, report.entry_id) == ("callback", id)
    assert report.error.split()[0] in ("ProgrammingError", "OperationalError")
    assert "settled" in [frame.name for frame in report.frames]
    assert SECRET not in shown(report)


def test_a_callback_that_is_too_slow_is_reported_in_our_words(sqlite: Database, ob: outbox.Outbox) -> None:
    effects, heard, stop = Operations(), list[ErrorReport](), threading.Event()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        stop.wait(60)

    put_one(sqlite, ob)
    try:
        run_once(
            sqlite,
            ob,
            adapters={"crm": MemoryAdapter()},
            include=[effects],
            callback_timeout=timedelta(milliseconds=50),
            report=heard.append,
        )
    finally:
        stop.set()

    (report,) = heard
    assert (report.where, report.error) == ("callback", "CallbackOverdue")
    assert "took longer than 0.05 s, its deadline" in report.text


def test_an_error_of_a_scheduled_job_is_reported_and_an_outage_is_not(sqlite: Database, ob: outbox.Outbox) -> None:
    heard = list[ErrorReport]()
    working = dispatcher(sqlite, ob, adapters={"crm": MemoryAdapter()}, report=heard.append)

    async def broken() -> None:
        raise KeyError(SECRET)

    async def away() -> None:
        raise ConnectionRefusedError

    for job in (broken, away):
        asyncio.run(_patiently(working, job))

    assert [(report.where, report.error, report.entry_id) for report in heard] == [("job", "KeyError", None)]


def test_a_defect_of_the_claim_loop_is_reported_once_until_it_ends(sqlite: Database, ob: outbox.Outbox) -> None:
    heard = list[ErrorReport]()
    working = dispatcher(sqlite, ob, adapters={"crm": MemoryAdapter()}, report=heard.append)

    for error in (KeyError(SECRET), KeyError(SECRET), ConnectionRefusedError()):
        working.outages.failed(error)

    assert [(report.where, report.error) for report in heard] == [("dispatcher", "KeyError")]


def test_outcomes_are_not_reported(database: Database, ob: outbox.Outbox) -> None:
    heard = list[ErrorReport]()
    put(database, ob, count=2)

    run_once(database, ob, adapters={"crm": MemoryAdapter([Unknown("no answer")])}, report=heard.append)

    assert heard == []


def test_a_reporter_that_raises_is_logged_once_and_fails_no_send(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    def report(error: ErrorReport) -> None:
        raise RuntimeError("a defect of the reporter")

    put(sqlite, ob, count=3)

    with caplog.at_level(logging.ERROR, "outbox.observer"):
        run_once(sqlite, ob, adapters={"crm": Broken()}, report=report)

    assert states(sqlite) == {"retry": 3}
    texts = [record.getMessage() for record in caplog.records if record.name == "outbox.observer"]
    assert texts == ["report= raised; sending is not affected, and its further errors are not logged"]


async def _report(error: ErrorReport) -> None: ...


@pytest.mark.parametrize("given", [_report, "sentry"])
def test_a_reporter_must_be_a_plain_function(ob: outbox.Outbox, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="report must be a plain function"):
        dispatcher("sqlite://", ob, adapters={"crm": MemoryAdapter()}, report=given)
