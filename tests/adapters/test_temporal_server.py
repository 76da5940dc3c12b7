"""TemporalAdapter with a real Temporal server: a child key starts one workflow, also when dispatchers and servers are killed."""

import asyncio
import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.daemons import daemon, wait_for, write_factory
from support.database import Database
from support.entries import HOUR, age, put, put_one, run_once, settlement_row, state, states
from support.temporal_server import QUEUE, Temporal, running_temporal

import outbox
from dispatchers import Absent, CannotTell, Deferred, Delivered, Delivery, Found, Outcome, Rejected, Unknown
from dispatchers.adapters import TemporalAdapter
from dispatchers.testing.attempts import due_in_time, sent

DAY = timedelta(days=1)  # the retention of the development server
COUNT = 40
DISPATCHER = """
from dispatchers.adapters import TemporalAdapter
from dispatchers.testing.failpoints import failpoint

if os.environ.get("DIES"):
    dying = failpoint("settle.before")
    dying.__enter__()

def make():
    orders = TemporalAdapter(address=os.environ["TEMPORAL"], task_queue="orders", window=timedelta(days=1))
    return Dispatcher(url, outbox=ob, adapters={"orders": orders}, concurrency=5)
"""


@pytest.fixture(scope="module")
def temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Temporal]:
    with running_temporal(tmp_path_factory.mktemp("temporal")) as server:
        yield server


def adapter(temporal: Temporal, **settings: Any) -> TemporalAdapter:
    return TemporalAdapter(address=temporal.address, **{"task_queue": QUEUE, "window": DAY} | settings)


def delivery(key: str, body: bytes = b'{"amount": 2000}', attempt: int = 1, **fields: Any) -> Delivery:
    given: dict[str, Any] = {"operation": "orders.fulfil", "options": {}, "headers": {}} | fields
    return Delivery(uuid4(), payload_json=body, key=key, attempt=attempt, deadline=0.0, **given)


async def found(adapter: TemporalAdapter, key: str) -> Any:
    return await adapter.find(due_in_time(adapter, delivery(key)))


def test_a_workflow_is_started_once_although_the_dispatcher_died(
    temporal: Temporal, postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    id = put_one(postgresql, ob, "orders.fulfil")
    write_factory(tmp_path, DISPATCHER)
    with daemon(tmp_path, postgresql.url, TEMPORAL=temporal.address, DIES="1") as first:
        assert first.wait() == -signal.SIGKILL
    assert state(postgresql, id) == "sending"
    age(postgresql, HOUR)

    assert run_once(postgresql, ob, adapters={"orders": adapter(temporal)}) == 1

    result = json.loads(settlement_row(postgresql, id).result)
    assert asyncio.run(temporal.runs())[result["workflow_id"]] == [result["run_id"]]


def test_a_second_attempt_finds_the_workflow_that_runs_and_that_has_ended(temporal: Temporal) -> None:
    async def main() -> tuple[list[Outcome], list[Any]]:
        orders = adapter(temporal)
        assert await found(orders, "ck1_ends") == Absent()
        outcomes = [await sent(orders, delivery("ck1_ends")), await sent(orders, delivery("ck1_ends", attempt=2))]
        findings = [await found(orders, "ck1_ends")]
        async with temporal.working() as client:
            assert await client.get_workflow_handle("ck1_ends").result() == {"amount": 2000}
        outcomes.append(await sent(orders, delivery("ck1_ends", attempt=3)))
        findings.append(await found(orders, "ck1_ends"))
        await orders.aclose()
        return outcomes, findings

    outcomes, findings = asyncio.run(main())

    (result,) = {json.dumps(outcome.result) for outcome in outcomes if isinstance(outcome, Delivered)}
    assert len(outcomes) == 3
    assert findings == [Found({**json.loads(result), "status": each}) for each in ("RUNNING", "COMPLETED")]


def test_a_workflow_that_continues_as_another_run_is_not_started_again(temporal: Temporal) -> None:
    async def main() -> tuple[Outcome, Outcome, Any]:
        orders = adapter(temporal)
        async with temporal.working() as client:
            first = await sent(orders, delivery("ck1_again", b'{"again": true}'))
            await client.get_workflow_handle("ck1_again").result()
        second = await sent(orders, delivery("ck1_again", b'{"again": true}', attempt=2))
        finding = await found(orders, "ck1_again")
        await orders.aclose()
        return first, second, finding

    first, second, finding = asyncio.run(main())

    assert isinstance(first, Delivered)
    assert isinstance(second, Delivered)
    assert second.replayed
    assert second.result["run_id"] != first.result["run_id"]
    assert finding == Found({**second.result, "status": "COMPLETED"})


def test_sends_at_the_same_time_start_one_workflow(temporal: Temporal) -> None:
    async def main() -> list[Outcome]:
        orders = adapter(temporal)
        outcomes = await asyncio.gather(*(sent(orders, delivery("ck1_same")) for _ in range(20)))
        await orders.aclose()
        return outcomes

    outcomes = asyncio.run(main())

    assert {type(outcome) for outcome in outcomes} == {Delivered}
    assert len({json.dumps(outcome.result) for outcome in outcomes if isinstance(outcome, Delivered)}) == 1


@pytest.mark.parametrize(
    ("settings", "fields", "expected"),
    [
        ({"window": 2 * DAY}, {}, Deferred),
        ({"namespace": "missing"}, {}, Deferred),
        ({}, {"body": b'"' + b"x" * 2**21 + b'"'}, Rejected),
        ({}, {"operation": "orders." + "x" * 1000}, Rejected),
        ({"task_queue": "x" * 1001}, {}, Rejected),
    ],
    ids=["retention", "namespace", "payload", "type", "task queue"],
)
def test_what_the_server_does_not_take_starts_nothing(
    temporal: Temporal, settings: Any, fields: Any, expected: type[Outcome]
) -> None:
    key = f"ck1_{uuid4().hex}"

    async def main() -> tuple[Outcome, Any]:
        orders = adapter(temporal, **settings)
        outcome = await sent(orders, delivery(key, **fields))
        finding = await found(adapter(temporal), key)
        await orders.aclose()
        return outcome, finding

    outcome, finding = asyncio.run(main())

    assert isinstance(outcome, expected)
    assert finding == Absent()


def test_a_killed_server_leaves_doubt_that_ends_when_it_is_back(tmp_path: Path) -> None:
    async def main(server: Temporal) -> list[Any]:
        orders = adapter(server, timeout=timedelta(seconds=3))
        answers: list[Any] = [await sent(orders, delivery("ck1_a"))]
        server.kill()
        answers += [await sent(orders, delivery(key)) for key in ("ck1_b", "ck1_c")]
        answers.append(await found(orders, "ck1_a"))
        await asyncio.to_thread(server.start)
        answers += [await found(orders, "ck1_a"), await sent(orders, delivery("ck1_a", attempt=2))]
        await orders.aclose()
        return answers

    with running_temporal(tmp_path) as server:
        before, lost, waiting, unclear, finding, after = asyncio.run(main(server))

    assert isinstance(before, Delivered)
    assert isinstance(lost, Unknown)
    assert isinstance(waiting, Deferred)
    assert isinstance(unclear, CannotTell)
    assert finding == Found({**before.result, "status": "RUNNING"})
    assert after == before


def test_kills_of_both_sides_start_each_workflow_once(postgresql: Database, ob: outbox.Outbox, tmp_path: Path) -> None:
    def delivered(at_least: int) -> bool:
        return states(postgresql)["delivered"] >= at_least

    put(postgresql, ob, "orders.fulfil", count=COUNT)
    write_factory(tmp_path, DISPATCHER)
    with running_temporal(tmp_path) as server:
        for enough in (COUNT // 4, COUNT // 2, COUNT):
            with daemon(tmp_path, postgresql.url, TEMPORAL=server.address):
                wait_for(lambda enough=enough: delivered(enough), f"{enough} workflows", seconds=180)
                server.kill()
            server.start()
            age(postgresql, HOUR)  # leases of the killed dispatcher, and waits for the server
        runs = asyncio.run(server.runs())

    assert states(postgresql) == {"delivered": COUNT}
    assert [len(each) for each in runs.values()] == [1] * COUNT
