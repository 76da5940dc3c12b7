"""However many there are of a kind, each entry ends, and the least share does not wait for the largest: budgets are smaller."""

import asyncio
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import Database, statements_of
from support.entries import dispatcher, pumping, run_once, states
from support.fleet import delivered, fleet, run_until, urls

import outbox
from dispatchers import Delivered, Delivery, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement

COUNTS = (4, 30)
BUDGETS: dict[str, Any] = {"concurrency": 2, "max_in_flight": 3, "callback_concurrency": 1}
HOG = 40  # entries of the largest share, all enqueued before the others

Share = Callable[[int], tuple[str, dict[str, Any]]]
"""The operation and the settings of an entry of the n-th share."""

SHARES: dict[str, Share] = {
    "destinations": lambda share: (f"d{share}.do", {}),
    "destinations with callbacks": lambda share: (f"called{share}.do", {}),
    "accounts": lambda share: ("crm.do", {"destination": f"crm:acct_{share}"}),
    "ordering groups": lambda share: ("crm.do", {"ordering_key": f"customer:{share}"}),
    "scopes": lambda share: ("fair.do", {"scope": f"tenant {share}"}),
}


class Service:
    """Every operation of so many shares. order: the payloads, as they were sent."""

    def __init__(self, kind: str, count: int) -> None:
        self.order: list[Any] = []
        self.operations = Operations()
        for operation in sorted({SHARES[kind](share)[0] for share in range(count)}):
            self.operations.operation(operation)(self._send)
            if kind == "destinations with callbacks":
                self.operations.on_settled(operation)(self._note)

    async def _send(self, delivery: Delivery) -> Outcome:
        self.order.append(delivery.payload)
        return Delivered()

    def _note(self, session: Any, settlement: Settlement) -> None: ...


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("count", COUNTS)
def test_the_least_share_is_sent_before_the_largest_ends(
    postgresql: Database, ob: outbox.Outbox, kind: str, count: int
) -> None:
    fair = outbox.Outbox(ob.configuration.keyring, env="test", fair={"fair"})
    service = Service(kind, count)
    shares = [*[0] * HOG, *range(1, count)]
    with postgresql.begin() as session:
        for number, share in enumerate(shares):
            operation, given = SHARES[kind](share)
            parent = outbox.ParentKey(f"order:{number}", scope=given.pop("scope", ""))
            fair.enqueue(session, operation, share, parent=parent, **given)
    working = dispatcher(postgresql, fair, include=[service.operations], **BUDGETS)

    asyncio.run(pumping(working, lambda: states(postgresql)["delivered"] == len(shares)))

    last_of_others = max(place for place, share in enumerate(service.order) if share != 0)
    assert sorted(service.order) == shares
    assert last_of_others < len(shares) - 1


@pytest.mark.parametrize("count", COUNTS)
def test_entries_of_one_parent_and_of_one_caller_end(postgresql: Database, ob: outbox.Outbox, count: int) -> None:
    with postgresql.begin() as session:
        for number in range(count):
            ob.enqueue(session, "crm.do", {}, parent="order:1", discriminator=str(number))
    for number in range(count):
        with postgresql.begin() as session, ob.idempotent(session, f"key {number}", scope="one", content={}) as claim:
            ob.enqueue(session, "crm.do", {})
            claim.respond(201, {})

    settled = run_once(postgresql, ob, adapters={"crm": MemoryAdapter()}, **BUDGETS)

    assert settled == states(postgresql)["delivered"] == 2 * count


@pytest.mark.parametrize("count", COUNTS)
def test_many_dispatchers_end_the_entries_of_one_database(postgresql: Database, ob: outbox.Outbox, count: int) -> None:
    service = MemoryAdapter()
    with postgresql.begin() as session:
        for number in range(2 * count):
            ob.enqueue(session, "crm.do", {}, parent=f"order:{number}")

    async def main() -> None:
        working = [dispatcher(postgresql, ob, adapters={"crm": service}, **BUDGETS) for _ in range(count)]
        await asyncio.gather(*(each.run_once() for each in working))
        await asyncio.gather(*(each.close() for each in working))

    asyncio.run(main())

    assert states(postgresql) == {"delivered": 2 * count}
    assert len(service.deliveries) == 2 * count


@pytest.mark.parametrize("count", COUNTS)
def test_each_of_many_databases_is_served(sqlite_template: Path, tmp_path: Path, ob: outbox.Outbox, count: int) -> None:
    paths = [shutil.copy(sqlite_template, tmp_path / f"{number}.db") for number in range(count)]
    tenants = [Database(sa.URL.create("sqlite", database=str(path), query={"timeout": "30"})) for path in paths]
    for tenant in tenants:
        with tenant.begin() as session:
            for number in range(2):
                ob.enqueue(session, "crm.do", {}, parent=f"order:{number}")

    seldom = timedelta(seconds=1)

    run_until(fleet(urls(tenants), ob, MemoryAdapter(), poll=seldom, **BUDGETS), delivered(tenants, 2))

    assert all(states(tenant) == {"delivered": 2} for tenant in tenants)


# --- what a start costs


def _kids(count: int) -> dict[str, Any]:
    secrets = {f"k{number}": bytes([number]) * 32 for number in range(1, count + 1)}
    return {
        "ob": outbox.Outbox(outbox.Keyring(secrets, current="k1"), env="test"),
        "adapters": {"crm": MemoryAdapter()},
    }


def _callbacks(count: int) -> dict[str, Any]:
    return {"include": [Service("destinations with callbacks", count).operations]}


def _operations(count: int) -> dict[str, Any]:
    return {"adapters": {f"crm.do{number}": MemoryAdapter() for number in range(count)}}


@pytest.mark.parametrize("of", [_kids, _callbacks, _operations])
def test_a_start_takes_as_many_statements_for_many_as_for_few(
    postgresql: Database, ob: outbox.Outbox, of: Callable[[int], dict[str, Any]]
) -> None:
    taken = []
    for count in (1, *COUNTS):
        with statements_of(postgresql.dispatchers_engine) as statements:
            run_once(postgresql, **{"ob": ob, **of(count)})
        taken.append(statements)

    _, few, many = taken  # the first start of all records the database's identity
    assert len(few) == len(many)
    assert _claims(few) == _claims(many)


def _claims(statements: list[str]) -> set[str]:
    return {statement for statement in statements if "SKIP LOCKED" in statement}
