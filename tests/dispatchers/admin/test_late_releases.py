"""A claim whose lease ran out before anything was sent: the process that knows it may still release the entry without doubt."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.database import Database
from support.entries import HOUR, age, claim_one, put_one, queue_row, reasons, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline import claim_loops
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.transitions import Ending


@pytest.fixture(autouse=True)
def _one_claim_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second loop could claim the entry, whose lease has ended, before the first one releases it."""
    monkeypatch.setattr(claim_loops, "CLAIM_LOOPS", 1)


class Stalling(DatabaseStore):
    """The process stops for an hour after its first claim: its leases run out, and meanwhile others work."""

    def __init__(self, database: Database, ob: outbox.Outbox, meanwhile: Callable[[], Any]) -> None:
        super().__init__(database.dispatchers_engine, ob.configuration)
        self._database = database
        self._meanwhile = meanwhile
        self.seconds = 0.0

    def clock(self) -> float:
        return time.monotonic() + self.seconds

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        exchange = await super().exchange(settlements, request)
        if exchange.claimed and not self.seconds:
            self.seconds = HOUR.total_seconds()
            age(self._database, HOUR)
            await asyncio.to_thread(self._meanwhile)
        return exchange


def send_after_a_stall(database: Database, ob: outbox.Outbox, meanwhile: Callable[[], Any] = lambda: None) -> list[Any]:
    """What the adapter was given."""
    service, store = MemoryAdapter(), Stalling(database, ob, meanwhile)
    run_once(database, ob, adapters={"crm": service}, store=store, clock=store.clock)
    return service.deliveries


def test_an_unsent_entry_is_released_as_it_was_after_its_lease(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    before = queue_row(database, id)

    sent = send_after_a_stall(database, ob)

    row = queue_row(database, id)
    assert sent == []
    for name in ("state", "deliveries", "attempts", "maybe_sent", "in_doubt_since", "first_leased_at", "lease_token"):
        assert getattr(row, name) == getattr(before, name), name
    assert reasons(database, id) == []
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 1


def test_a_release_after_another_claim_has_no_effect(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Who claims it meanwhile cannot know that nothing was sent: its doubt and its lease stay."""
    id = put_one(database, ob)
    rows = []

    def claim_by_another() -> None:
        claim_one(DatabaseStore(database.dispatchers_engine, ob.configuration))
        rows.append(queue_row(database, id))

    with caplog.at_level(logging.WARNING):
        sent = send_after_a_stall(database, ob, claim_by_another)

    row = queue_row(database, id)
    assert sent == []
    assert [row] == rows
    assert (row.state, row.deliveries, row.attempts, row.maybe_sent) == ("sending", 2, 1, True)
    (lost,) = [message for message in caplog.messages if "leases were lost" in message]
    assert lost.startswith("1 outcomes were not stored (Release 1)")
    assert f"entry {id} " in lost
