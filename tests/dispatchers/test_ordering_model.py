"""Any course of events, on both databases, against a reference that fits on a page: one list for each lane."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.database import TABLES, Database
from support.entries import HOUR, age, change, claim_request, quota
from support.ordering import halted

import outbox
from dispatchers.admin import decisions
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, Retry, Settle, Transition
from outbox.session import flush_all
from outbox.sql.dialect import clock

CLAIM_LOOPS = ["a", "b"]
OUTCOMES = st.sampled_from(["delivered", "failed", "uncertain", "retry", "handed back"])


@dataclass
class Lane:
    """What a lane is: who waits or is under way, in order; behind whom it is halted."""

    waiting: list[UUID] = field(default_factory=list)
    halted_by: UUID | None = None

    @property
    def head(self) -> UUID | None:
        """Who may be sent."""
        return None if self.halted_by is not None or not self.waiting else self.waiting[0]


class Lanes(RuleBasedStateMachine):
    database: Database
    ob: outbox.Outbox
    empty: Callable[[], None]

    @initialize()
    def begin(self) -> None:
        self.empty()
        self.store = DatabaseStore(self.database.engine, self.ob.configuration)
        self.lanes = {name: Lane() for name in CLAIM_LOOPS}
        self.under_way: dict[UUID, ClaimedEntry] = {}
        self.lane_of: dict[UUID, str] = {}
        self.enqueued = 0

    # --- the app

    @rule(names=st.lists(st.sampled_from(CLAIM_LOOPS), min_size=1, max_size=4), rolled_back=st.booleans())
    def enqueue(self, names: list[str], rolled_back: bool) -> None:
        with self.database.session() as session:
            entries = []
            for name in names:
                self.enqueued += 1
                parent = f"order:{self.enqueued}"
                entries.append(self.ob.enqueue(session, "crm.upsert", {}, parent=parent, ordering_key=name))
            flush_all(session)
            session.rollback() if rolled_back else session.commit()
        for name, entry in zip(names, entries, strict=True):
            if not rolled_back:
                self.lanes[name].waiting.append(entry.id)
                self.lane_of[entry.id] = name

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), rolled_back=st.booleans())
    def cancel(self, data: st.DataObject, rolled_back: bool) -> None:
        id = data.draw(st.sampled_from(self._idle()))
        with self.database.session() as session:
            assert self.ob.cancel(session, id)
            session.rollback() if rolled_back else session.commit()
        if not rolled_back:
            self.lanes[self.lane_of[id]].waiting.remove(id)

    # --- the dispatchers

    @rule(slots=st.integers(1, 4))
    def claim(self, slots: int) -> None:
        """Nobody but the heads goes, and of no lane two."""
        exchange = self._exchange(slots)
        for entry in exchange.claimed:
            lane = self.lanes[self.lane_of[entry.id]]
            assert entry.id == lane.head
            assert entry.id not in self.under_way
            self.under_way[entry.id] = entry

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=OUTCOMES, halts=st.booleans())
    def settle(self, data: st.DataObject, outcome: str, halts: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.under_way)))
        entry = self.under_way.pop(id)
        change = _change(entry, outcome, halts)
        assert asyncio.run(self.store.exchange([(entry, change)], None)).settled == {id}
        lane = self.lanes[self.lane_of[id]]
        if outcome in ("delivered", "failed", "uncertain"):
            lane.waiting.remove(id)
        if outcome in ("failed", "uncertain") and halts:
            lane.halted_by = id

    @precondition(lambda self: self._idle())
    @rule(data=st.data())
    def make_due(self, data: st.DataObject) -> None:
        """As nobody should: it may cost a claim, but no order."""
        change(self.database, data.draw(st.sampled_from(self._idle())), due_at=clock())

    # --- people

    @precondition(lambda self: any(lane.halted_by for lane in self.lanes.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in CLAIM_LOOPS if self.lanes[name].halted_by]))
        with self.database.engine.begin() as connection:
            decisions.release_group(connection, TABLES, name, actor="bob")
        self.lanes[name].halted_by = None

    # --- what always holds

    @invariant()
    def halts_are_those_of_the_reference(self) -> None:
        if hasattr(self, "lanes"):
            expected = {name: lane.halted_by for name, lane in self.lanes.items() if lane.halted_by}
            assert halted(self.database) == expected

    def teardown(self) -> None:
        """No lane stands still: whatever has come to be, every lane can be sent to its end."""
        if not hasattr(self, "lanes"):
            return
        with self.database.engine.begin() as connection:
            for name in [name for name in CLAIM_LOOPS if self.lanes[name].halted_by]:
                decisions.release_group(connection, TABLES, name, actor="bob")
        for lane in self.lanes.values():
            lane.halted_by = None
        for id in list(self.under_way):
            self._deliver(self.under_way.pop(id))
        age(self.database, HOUR)
        while any(lane.waiting for lane in self.lanes.values()):
            exchange = self._exchange(4)
            assert exchange.claimed or exchange.passed_over, "a lane stands still"
            for entry in exchange.claimed:
                assert entry.id == self.lanes[self.lane_of[entry.id]].head
                self._deliver(entry)

    def _exchange(self, slots: int) -> Exchange:
        return asyncio.run(self.store.exchange([], claim_request(quota(slots=slots))))

    def _deliver(self, entry: ClaimedEntry) -> None:
        asyncio.run(self.store.exchange([(entry, Settle("delivered", 1))], None))
        self.lanes[self.lane_of[entry.id]].waiting.remove(entry.id)

    def _idle(self) -> list[UUID]:
        """What may be cancelled: nobody has it, and it was never possibly sent."""
        ids = [id for lane in self.lanes.values() for id in lane.waiting if id not in self.under_way]
        return sorted(ids)


def _change(entry: ClaimedEntry, outcome: str, halts: bool) -> Transition:
    match outcome:
        case "delivered":
            return Settle("delivered", 1)
        case "failed":
            return Settle("failed", 1, reason="declined", failure_blocks_group=halts)
        case "uncertain":
            return MarkUncertain("reset", 1, True, entry.leased_at, failure_blocks_group=halts)
        case "retry":
            return Retry(timedelta(0), "busy", 0, False, None)
    return Release("no adapter")


@pytest.fixture
def emptying(database: Database) -> Callable[[], None]:
    tables = [TABLES.queue, TABLES.entry, TABLES.settlement, TABLES.halted, TABLES.event]

    def empty() -> None:
        with database.engine.begin() as connection:
            for table in tables:
                connection.execute(sa.delete(table))

    return empty


def test_every_course_of_events_agrees_with_a_list_for_each_lane(
    database: Database, ob: outbox.Outbox, emptying: Callable[[], None]
) -> None:
    found: dict[str, Any] = {"database": database, "ob": ob, "empty": staticmethod(emptying)}
    machine = type("LanesHere", (Lanes,), found)
    checks = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=checks),
    )
