"""TemporalAdapter with a frontend made of the SDK's protobufs, which loses answers, hangs, fails and is killed."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from support import deliveries
from support.fake_temporal import HANG, LOSE, FakeTemporal

from dispatchers import Absent, CannotTell, Delivered, Found, Rejected, Unknown
from dispatchers.adapters import TemporalAdapter

WEEK = timedelta(days=7)
KEY = "ck1_a"
ask = partial(deliveries.ask, operation="orders.fulfil")
asked = partial(deliveries.asked, operation="orders.fulfil")


@pytest.fixture
def temporal() -> Iterator[FakeTemporal]:
    server = FakeTemporal()
    server.start()
    yield server
    server.kill()


def adapter(temporal: FakeTemporal, **settings: Any) -> TemporalAdapter:
    return TemporalAdapter(address=f"127.0.0.1:{temporal.port}", **{"task_queue": "orders", "window": WEEK} | settings)


def test_the_workflow_has_the_child_key_the_type_the_queue_and_the_payload(temporal: FakeTemporal) -> None:
    outcome = asked(adapter(temporal, workflow={"orders.fulfil": "Fulfilment"}, api_key="secret"))

    ((key, run),) = temporal.runs.items()
    assert outcome == Delivered({"workflow_id": KEY, "run_id": run.id})
    assert (key, run.request.workflow_type.name, run.request.task_queue.name) == (KEY, "Fulfilment", "orders")
    (argument,) = run.request.input.payloads
    assert (dict(argument.metadata), argument.data) == ({"encoding": b"json/plain"}, b'{"amount": 2000}')
    assert set(temporal.api_keys) == {"Bearer secret"}


@pytest.mark.parametrize("how", [HANG, LOSE])
def test_a_lost_answer_leaves_doubt_that_the_next_attempt_ends(temporal: FakeTemporal, how: str) -> None:
    temporal.behave({"StartWorkflowExecution": how})

    async def main() -> list[Any]:
        orders = adapter(temporal, timeout=timedelta(seconds=1))
        outcomes = [await ask(orders)]
        temporal.behave({})
        outcomes += [await ask(orders, attempt=2), await ask(orders, "find")]
        await orders.aclose()
        return outcomes

    doubtful, second, finding = asyncio.run(main())

    assert isinstance(doubtful, Unknown)
    assert isinstance(second, Delivered)
    assert finding == Found({**second.result, "status": "RUNNING"})
    assert len(temporal.runs) == 1


def test_absence_proves_nothing_when_temporal_may_have_deleted_it(temporal: FakeTemporal) -> None:
    assert asked(adapter(temporal), "find", age=timedelta(days=6)) == Absent()
    assert isinstance(asked(adapter(temporal), "find", age=timedelta(days=8)), CannotTell)


@pytest.mark.parametrize(("mebibytes", "requests"), [(2, 1), (4, 0)])
def test_a_payload_that_is_too_large_is_rejected(temporal: FakeTemporal, mebibytes: int, requests: int) -> None:
    """Temporal would answer more than four of them as if it were overloaded, and all entries would wait."""
    outcome = asked(adapter(temporal), payload="x" * mebibytes * 1024 * 1024)

    assert isinstance(outcome, Rejected)
    assert len(temporal.requests) == requests


def test_options_other_than_the_workflow_are_rejected(temporal: FakeTemporal) -> None:
    asked(adapter(temporal), options={"workflow": "Express"})

    assert temporal.runs[KEY].request.workflow_type.name == "Express"
    assert isinstance(asked(adapter(temporal), options={"task_queue": "express"}), Rejected)
    assert isinstance(asked(adapter(temporal), "find", options={"task_queue": "express"}), CannotTell)
