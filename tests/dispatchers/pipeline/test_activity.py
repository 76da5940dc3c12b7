"""What a dispatcher reports to its observer; the databases are real."""

import asyncio
import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from support.callbacks import Shop
from support.database import TABLES, Database
from support.entries import HOUR, Blocking, age, change, dispatcher, pumping, put, put_one, run_once, states
from support.lookups import QUIET, keyless

import outbox
from dispatchers import Deferred, Delivered, Delivery, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import pause
from dispatchers.errors import Suspended
from dispatchers.pipeline import activity_log
from dispatchers.telemetry.events import Activity, Attempt, Backlog, Event, Levels
from outbox.errors import ConfigurationError
from outbox.times import NEVER


class Recorded(list[Event]):
    """An observer that keeps every event."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for event in self if isinstance(event, Activity) for attempt in event.attempts]

    def total(self, name: str) -> dict[Any, int]:
        """The counts of this field in all reports of activity."""
        found: Counter[Any] = Counter()
        for event in self:
            if isinstance(event, Activity):
                found.update(getattr(event, name))
        return dict(found)

    @property
    def levels(self) -> list[Levels]:
        return [event for event in self if isinstance(event, Levels)]


@pytest.fixture
def seen() -> Recorded:
    return Recorded()


# --- attempts


def test_each_send_is_reported_with_its_destination_operation_and_result(
    database: Database, ob: outbox.Outbox, seen: Recorded
) -> None:
    outcomes: dict[str, Outcome] = {
        "crm.upsert": Delivered(),
        "crm.again": Delivered(replayed=True),
        "crm.delete": Rejected("no"),
        "crm.merge": KeyConflict("another request"),
        "mail.send": Deferred("later", after=HOUR),
        "mail.lost": Unknown("no answer"),
    }
    for operation in outcomes:
        put_one(database, ob, operation)
    service = MemoryAdapter(lambda delivery: outcomes[delivery.operation])

    run_once(database, ob, adapters={"crm": service, "mail": service}, observe=seen)

    assert sorted((a.destination, a.operation, a.result) for a in seen.attempts) == [
        ("crm", "crm.again", "replayed"),
        ("crm", "crm.delete", "rejected"),
        ("crm", "crm.merge", "key_conflict"),
        ("crm", "crm.upsert", "delivered"),
        ("mail", "mail.lost", "unknown"),
        ("mail", "mail.send", "deferred"),
    ]
    assert not any(attempt.is_lookup for attempt in seen.attempts)
    assert seen.total("claims") == {"crm": 4, "mail": 2}
    assert seen.total("settlements") == {
        ("crm", "delivered"): 2,
        ("crm", "failed"): 1,
        ("crm", "uncertain"): 1,
        ("mail", "retry"): 2,
    }
    assert seen.total("lost_leases") == {}


def test_a_send_is_timed_until_its_adapter_answers(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    class Slow(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            await asyncio.sleep(0.1)
            return await super().send(delivery)

    put_one(database, ob)

    run_once(database, ob, adapters={"crm": Slow()}, observe=seen)

    (attempt,) = seen.attempts
    assert 0.09 <= attempt.seconds < 20


def test_only_a_first_send_has_a_delay_since_its_enqueue(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    service = MemoryAdapter([Deferred("later", after=HOUR)])
    put_one(database, ob)
    age(database, HOUR)

    run_once(database, ob, adapters={"crm": service}, observe=seen)
    age(database, 2 * HOUR)
    run_once(database, ob, adapters={"crm": service}, observe=seen)

    first, second = seen.attempts
    assert first.delay_seconds is not None
    assert 3600 <= first.delay_seconds < 3660
    assert (second.result, second.delay_seconds) == ("delivered", None)


def test_the_delay_of_an_entry_that_is_due_later_counts_from_then(
    database: Database, ob: outbox.Outbox, seen: Recorded
) -> None:
    put_one(database, ob, due=HOUR)
    age(database, HOUR + timedelta(minutes=1))

    run_once(database, ob, adapters={"crm": MemoryAdapter()}, observe=seen)

    (attempt,) = seen.attempts
    assert attempt.delay_seconds is not None
    assert 60 <= attempt.delay_seconds < 120


def test_a_status_lookup_is_reported_as_one(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    service = keyless("answer")
    put_one(database, ob)

    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, observe=seen)
        age(database, QUIET)

    assert [(a.is_lookup, a.result) for a in seen.attempts] == [(False, "unknown"), (True, "found")]
    assert seen.total("settlements") == {("crm", "await_lookup"): 1, ("crm", "delivered"): 1}


# --- leases and callbacks


def test_a_lost_lease_is_counted_and_not_taken_for_a_settlement(
    database: Database, ob: outbox.Outbox, seen: Recorded
) -> None:
    ids = put(database, ob, count=2)

    class Interrupted(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            if delivery.id == ids[0]:
                await asyncio.to_thread(change, database, delivery.id, lease_token=ids[0])
                return Rejected("no")  # a late success would be accepted
            return await super().send(delivery)

    assert run_once(database, ob, adapters={"crm": Interrupted()}, observe=seen) == 1

    assert seen.total("lost_leases") == {"crm": 1}
    assert seen.total("settlements") == {("crm", "delivered"): 1}


def test_a_settlement_with_a_callback_is_counted_once(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    shop = Shop(database, ob, is_async=False)
    failing, lost = put(database, ob, count=2)
    put_one(database, ob)

    def callback(session: Any, settlement: Any) -> None:
        if settlement.entry.id == failing:
            raise RuntimeError("a defect")

    class Interrupted(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            if delivery.id == lost:
                await asyncio.to_thread(change, database, delivery.id, lease_token=lost)
                return Rejected("no")
            return await super().send(delivery)

    shop.on_settled(callback)

    shop.run_once(adapters={"crm": Interrupted()}, observe=seen)

    assert seen.total("settlements") == {("crm", "delivered"): 1, ("crm", "callback_retry"): 1}
    assert seen.total("lost_leases") == {"crm": 1}


# --- levels and backlog


def test_the_levels_show_what_is_in_flight_and_what_may_be(
    database: Database, ob: outbox.Outbox, seen: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.pipeline.activity_log.REPORT_SECONDS", 0.01)
    put(database, ob, count=3)
    put_one(database, ob, "mail.send")
    with database.owner() as connection:
        pause(connection, TABLES, "mail", actor="ada", reason="asked")

    async def main() -> None:
        service = Blocking()
        working = dispatcher(database, ob, adapters={"crm": service, "mail": service}, concurrency=2, observe=seen)

        def is_full() -> bool:
            if not (seen.levels and seen.levels[-1].in_flight.get("crm") == 2):
                return False
            service.released.set()
            return True

        await pumping(working, is_full)
        await working.close()

    asyncio.run(main())

    full = next(levels for levels in seen.levels if levels.in_flight == {"crm": 2})
    assert full.permits == {"crm": 2, "mail": 2}
    assert full.throttled == {"mail": "paused"}
    assert not full.suspended
    last = seen.levels[-1]
    assert (last.in_flight, last.claimed_ahead, last.callbacks_waiting, last.unsettled) == ({}, {}, 0, 0)


def test_the_levels_show_that_sending_is_suspended(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, observe=seen)
    assert not seen.levels[-1].suspended
    database.execute(sa.update(TABLES.meta).values(suspended_reason="restored"))

    with pytest.raises(Suspended):
        run_once(database, ob, adapters={"crm": MemoryAdapter()}, observe=seen)

    assert seen.levels[-1].suspended


def test_the_backlog_is_reported_for_the_whole_database(database: Database, ob: outbox.Outbox, seen: Recorded) -> None:
    put(database, ob, count=2)
    change(database, put_one(database, ob, "mail.send"), state="uncertain", due_at=NEVER, maybe_sent=True)
    put_one(database, ob, "sms.send", ordering_key="ada")
    run_once(database, ob, adapters={"sms": MemoryAdapter([Rejected("no")])}, observe=Recorded())
    age(database, HOUR)

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, observe=seen)
        await working.report_backlog()
        await working.close()

    asyncio.run(main())

    (backlog,) = seen
    assert isinstance(backlog, Backlog)
    assert backlog.entries == {("crm", "pending"): 2, ("mail", "uncertain"): 1}
    assert backlog.oldest_due_seconds == {"crm": pytest.approx(3600, abs=60)}
    assert backlog.blocked_groups == 1


# --- the observer


def test_an_observer_that_raises_is_logged_once_and_delays_no_send(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Event] = []

    def observe(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("a defect of the observer")

    for _ in range(2):
        put(database, ob, count=3)

    async def main() -> None:
        working = dispatcher(database, ob, adapters={"crm": MemoryAdapter()}, observe=observe)
        assert await working.run_once() == 6
        assert await working.run_once() == 0
        await working.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())

    assert states(database) == {"delivered": 6}
    assert len(calls) > 2
    assert [record.getMessage() for record in caplog.records] == [
        "observe= raised; sending is not affected, and its further errors are not logged"
    ]


def test_without_an_observer_an_entry_is_only_counted(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("called without an observer")

    monkeypatch.setattr(activity_log, "Attempt", refuse)
    put(database, ob, count=2)

    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 2


async def _observe(event: Event) -> None: ...


@pytest.mark.parametrize("observe", [_observe, "prometheus"])
def test_an_observer_must_be_a_plain_function(ob: outbox.Outbox, observe: Any) -> None:
    with pytest.raises(ConfigurationError, match="observe must be a plain function of one event"):
        dispatcher("sqlite://", ob, adapters={"crm": MemoryAdapter()}, observe=observe)
