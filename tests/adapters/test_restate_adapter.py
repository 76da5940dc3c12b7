"""RestateAdapter with a real Restate server and a real service. Skipped where there is no restate-server."""

import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support import deliveries
from support.daemons import daemon, wait_for, write_factory
from support.database import Database
from support.entries import HOUR, age, put_one, run_once, settlement_row, state
from support.restate_server import Restate, running_restate

import outbox
from dispatchers import Absent, CannotTell, Deferred, Delivered, Found, Rejected, Unknown
from dispatchers.adapters import RestateAdapter

DIES_BEFORE_IT_SETTLES = """
from dispatchers.adapters import RestateAdapter
from dispatchers.testing.failpoints import failpoint

dying = failpoint("settle.before")
dying.__enter__()

def make():
    orders = RestateAdapter(url=os.environ["RESTATE_URL"])
    return Dispatcher(url, outbox=ob, adapters={"orders": orders})
"""


@pytest.fixture(scope="module")
def restate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restate]:
    with running_restate(tmp_path_factory.mktemp("restate")) as server:
        yield server


@pytest.fixture
def key() -> str:
    return f"ck1_{uuid4().hex}"


def asked(restate: Restate, verb: str, key: str, *, settings: Any = None, **fields: Any) -> Any:
    """The answer of `send` or `find` of an adapter of its own."""
    adapter = RestateAdapter(url=restate.url, **settings or {})
    return deliveries.asked(adapter, verb, key, {"number": key}, **{"operation": "orders.fulfil"} | fields)


def ended(restate: Restate, handler: str, key: str, number: str) -> list[str]:
    """The ids of the handler's invocations, when there is one."""
    return list(wait_for(lambda: restate.runs_of(handler, key, number), f"{handler} {number}"))


def test_a_handler_runs_once_although_the_dispatcher_died(
    restate: Restate, postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    """The second dispatcher starts it again under the same key."""
    id = put_one(postgresql, ob, "orders.fulfil", payload={"number": "C-1"})
    write_factory(tmp_path, DIES_BEFORE_IT_SETTLES)
    with daemon(tmp_path, postgresql.url, RESTATE_URL=restate.url) as first:
        assert first.wait() == -signal.SIGKILL
    assert state(postgresql, id) == "sending"
    age(postgresql, HOUR)

    assert run_once(postgresql, ob, adapters={"orders": RestateAdapter(url=restate.url)}) == 1

    assert state(postgresql, id) == "delivered"
    assert ended(restate, "orders/fulfil", "-", "C-1") == [
        json.loads(settlement_row(postgresql, id).result)["invocation_id"]
    ]


def test_a_second_attempt_is_the_same_invocation(restate: Restate, key: str) -> None:
    first, second = asked(restate, "send", key), asked(restate, "send", key, attempt=2)

    assert (first.replayed, second.replayed) == (False, True)
    assert first.result == second.result
    assert ended(restate, "orders/fulfil", "-", key) == [first.result["invocation_id"]]


def test_a_server_that_was_killed_remembers_the_key(restate: Restate, key: str) -> None:
    first = asked(restate, "send", key)
    restate.kill()
    dead = asked(restate, "send", key, attempt=2), asked(restate, "find", key)
    restate.start()

    third = asked(restate, "send", key, attempt=2)

    assert isinstance(dead[0], Deferred)
    assert isinstance(dead[1], CannotTell)
    assert third == Delivered(first.result, replayed=True)
    assert ended(restate, "orders/fulfil", "-", key) == [first.result["invocation_id"]]


def test_a_server_that_hangs_leaves_doubt_that_the_key_ends(restate: Restate, key: str) -> None:
    restate.freeze()
    try:
        doubtful = asked(restate, "send", key, settings={"timeout": timedelta(seconds=1)})
    finally:
        restate.thaw()

    second = asked(restate, "send", key, attempt=2)

    assert isinstance(doubtful, Unknown)
    assert isinstance(second, Delivered)
    assert ended(restate, "orders/fulfil", "-", key) == [second.result["invocation_id"]]


def test_the_lookup_finds_what_runs_has_ended_or_has_failed(restate: Restate, key: str) -> None:
    """A handler that fails with 404 and the very text of Restate's own answer was started."""
    findings = {}
    for handler in ("fulfil", "wait", "fail"):
        findings[handler, "before"] = asked(restate, "find", key, operation=f"orders.{handler}")
        sent = asked(restate, "send", key, operation=f"orders.{handler}")
        wait_for(lambda: asked(restate, "find", key, operation=f"orders.{handler}") != Absent(), handler)  # noqa: B023
        findings[handler, "after"] = asked(restate, "find", key, operation=f"orders.{handler}")
        assert isinstance(sent, Delivered)

    assert {finding for (_, when), finding in findings.items() if when == "before"} == {Absent()}
    assert all(isinstance(finding, Found) for (_, when), finding in findings.items() if when == "after")


def test_absence_proves_nothing_when_restate_may_have_forgotten(restate: Restate, key: str) -> None:
    assert asked(restate, "find", key, age=timedelta(hours=23)) == Absent()
    assert isinstance(asked(restate, "find", key, age=timedelta(hours=25)), CannotTell)


def test_a_workflow_has_the_child_key_as_its_own(restate: Restate, key: str) -> None:
    settings = {"target": {"shipments.start": "Shipment/{key}/run"}}

    absent = asked(restate, "find", key, settings=settings, operation="shipments.start")
    outcomes = [asked(restate, "send", key, settings=settings, operation="shipments.start") for _ in range(2)]

    assert absent == Absent()
    assert [outcome.replayed for outcome in outcomes] == [False, True]
    assert ended(restate, "Shipment/run", key, key) == [outcomes[0].result["invocation_id"]]
    assert isinstance(asked(restate, "find", key, settings=settings, operation="shipments.start"), Found)


def test_an_entry_may_name_the_object_whose_handler_runs(restate: Restate, key: str) -> None:
    options = {"target": "Customer/ada lovelace/greet"}

    outcomes = [asked(restate, "send", key, options=options) for _ in range(2)]

    assert [outcome.replayed for outcome in outcomes] == [False, True]
    assert ended(restate, "Customer/greet", "ada lovelace", key) == [outcomes[0].result["invocation_id"]]
    assert isinstance(asked(restate, "find", key, options=options), Found)


def test_a_handler_that_is_not_registered_yet_is_waited_for(restate: Restate, key: str) -> None:
    assert isinstance(asked(restate, "send", key, operation="invoices.send"), Deferred)
    assert isinstance(asked(restate, "find", key, operation="invoices.send"), CannotTell)


def test_a_workflow_without_the_key_is_rejected_by_restate(restate: Restate, key: str) -> None:
    """It would have one run for all entries: Restate takes no idempotency key for a workflow."""
    outcome = asked(restate, "send", key, options={"target": "Shipment/monday/run"})

    assert outcome == Rejected("HTTP 400")
