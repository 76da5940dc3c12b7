"""After a hint only what it names is asked, before anything else, and its send begins at once."""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import HOUR, dispatcher, pumping, put_one, settlement_row, until_true
from support.hints import elsewhere, put_by, working_until

import outbox
from dispatchers import Delivery
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline import claim_loops, wakeup
from dispatchers.pipeline.claim_loops import IDLE_SWEEP_SECONDS
from dispatchers.pipeline.scheduler import MAX_DESTINATIONS
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange, Survey
from dispatchers.store.queue.claim_request import ClaimRequest

pytestmark = pytest.mark.sends_hints

MAX_ROUNDS = 15  # some may begin while the dispatcher has not begun to rest
LONGER_SECONDS = 0.05  # each time, for a busy machine


class Recorded(MemoryAdapter):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    async def send(self, delivery: Delivery) -> Any:
        self._seen.append("send")
        return await super().send(delivery)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each claim with the destinations it asks, each sweep, each send."""
    seen: list[str] = []
    survey, exchange = DatabaseStore.survey, DatabaseStore.exchange

    async def sweep(self: DatabaseStore) -> Survey:
        seen.append("sweep")
        return await survey(self)

    async def ask(self: DatabaseStore, settlements: Sequence[Any], request: ClaimRequest | None) -> Any:
        seen.append("claim " + " ".join(sorted(quota.destination for quota in request.quotas)) if request else "settle")
        return await exchange(self, settlements, request)

    monkeypatch.setattr(DatabaseStore, "survey", sweep)
    monkeypatch.setattr(DatabaseStore, "exchange", ask)
    return seen


@pytest.mark.parametrize(
    ("age", "first"),
    [
        (0.0, ["claim crm", "send"]),
        (IDLE_SWEEP_SECONDS, ["claim crm", "send"]),
        (2 * IDLE_SWEEP_SECONDS, ["sweep", "claim crm mail sms"]),
    ],
    ids=["no sweep due", "sweep due", "sweep overdue"],
)
def test_a_hinted_entry_is_claimed_alone_and_sent_before_another_question(
    postgresql: Database, ob: outbox.Outbox, seen: list[str], age: float, first: list[str]
) -> None:
    adapters = {"crm": Recorded(seen), "mail": MemoryAdapter(), "sms": MemoryAdapter()}
    working = dispatcher(postgresql, ob, adapters=adapters, poll=HOUR)
    apps = elsewhere(postgresql)

    async def begins_with(number: int) -> list[str]:
        loops, asked = working._loops, -1
        while asked < len(seen):  # until it rests
            asked = len(seen)
            await asyncio.sleep(0.2)
        loops._swept_at, loops._has_claimed = loops._clock() - age, False
        seen.clear()
        id = await asyncio.to_thread(put_by, apps, ob, number)
        await until_true(lambda: settlement_row(postgresql, id) is not None)
        return seen[:2]

    async def steps() -> None:
        begun: list[list[str]] = []
        while first not in begun:
            assert len(begun) < MAX_ROUNDS, begun
            await asyncio.sleep(len(begun) * LONGER_SECONDS)
            begun.append(await begins_with(len(begun)))

    asyncio.run(working_until(working, steps))


def test_an_outcome_begins_no_claim_while_hints_announce_what_is_due(
    postgresql: Database, ob: outbox.Outbox, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most users' load is one entry at a time: a claim that brings nothing would cost as much as the entry."""
    monkeypatch.setattr(claim_loops, "SWEEP_SECONDS", 3600.0)
    monkeypatch.setattr(claim_loops, "IDLE_SWEEP_SECONDS", 3600.0)
    working = dispatcher(postgresql, ob, adapters={"crm": Recorded(seen), "mail": MemoryAdapter()}, poll=HOUR)
    apps = elsewhere(postgresql)

    async def steps() -> None:
        begun: list[list[str]] = []
        while ["claim crm", "send", "claim "] not in begun:  # the last one settles
            assert len(begun) < MAX_ROUNDS, begun
            await asyncio.sleep(0.2 + len(begun) * LONGER_SECONDS)
            seen.clear()
            id = await asyncio.to_thread(put_by, apps, ob, len(begun))
            await until_true(lambda id=id: settlement_row(postgresql, id) is not None)
            await asyncio.sleep(0.2)
            begun.append([*seen])

    asyncio.run(working_until(working, steps))


def test_a_hinted_entry_is_sent_while_a_sweep_has_no_answer(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that follows hints leaves the sweeps of a busy dispatcher to the others."""
    monkeypatch.setattr(claim_loops, "SWEEP_SECONDS", 3600.0)
    monkeypatch.setattr(claim_loops, "IDLE_SWEEP_SECONDS", 3600.0)
    working = dispatcher(postgresql, ob, adapters={"crm": MemoryAdapter()}, poll=HOUR)
    apps, survey = elsewhere(postgresql), DatabaseStore.survey
    swept, answer = asyncio.Event(), asyncio.Event()

    async def sweep(self: DatabaseStore) -> Survey:
        swept.set()
        await answer.wait()
        return await survey(self)

    async def put_and_wait(number: int) -> None:
        id = await asyncio.to_thread(put_by, apps, ob, number)
        await until_true(lambda: settlement_row(postgresql, id) is not None, 20)

    async def steps() -> None:
        await asyncio.sleep(0.5)  # until it rests
        monkeypatch.setattr(DatabaseStore, "survey", sweep)
        try:
            for number in range(5):
                swept.clear()
                answer.clear()
                working._loops._swept_at = working._loops._clock() - 3600.0
                await put_and_wait(2 * number)
                await asyncio.wait_for(swept.wait(), 20)
                await put_and_wait(2 * number + 1)
                answer.set()
        finally:
            answer.set()

    asyncio.run(working_until(working, steps))


def test_hints_that_bring_nothing_do_not_put_the_poll_off(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are faster with what they name, and what becomes due elsewhere has no hint."""
    monkeypatch.setattr(wakeup, "HELPERS_REST", 10_000)  # only the first loop polls,
    monkeypatch.setattr(claim_loops, "IDLE_SWEEP_SECONDS", 3600.0)  # and no sweep asks for everything
    adapters = {"crm": MemoryAdapter(), "mail": MemoryAdapter()}
    working = dispatcher(postgresql, ob, adapters=adapters, poll=timedelta(milliseconds=250))

    async def steps() -> None:
        await asyncio.sleep(0.5)  # until it rests
        id = put_one(postgresql, ob, "mail.welcome", due=timedelta(seconds=1))
        deadline = time.monotonic() + 60
        while settlement_row(postgresql, id) is None:
            assert time.monotonic() < deadline, "it was not asked for"
            working._loops._wakeup._follow(frozenset({("crm", "crm.upsert")}))
            await asyncio.sleep(0.03)

    asyncio.run(working_until(working, steps))


def test_a_hint_is_followed_before_the_end_of_a_long_round(
    sqlite: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite, where no other hints arrive."""
    monkeypatch.setattr(claim_loops, "CLAIM_LOOPS", 1)  # only the first loop follows hints
    names = [f"d{number}" for number in range(10 * MAX_DESTINATIONS)]
    working = dispatcher(sqlite, ob, adapters={name: MemoryAdapter() for name in names}, poll=HOUR)
    claims: list[set[str]] = []

    async def ask(self: DatabaseStore, settlements: Sequence[Any], request: ClaimRequest) -> Exchange:
        claims.append({quota.destination for quota in request.quotas})
        if len(claims) == 1:
            working._loops._wakeup._follow(frozenset({("d0:new", "d0.upsert")}))
        return Exchange()

    monkeypatch.setattr(DatabaseStore, "exchange", ask)

    asyncio.run(pumping(working, lambda: len(claims) > 10))

    assert [number for number, asked in enumerate(claims) if "d0:new" in asked][:1] == [1]
    assert set(names) <= set().union(*claims)
