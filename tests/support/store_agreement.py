"""A database and the reference store, to which the same is done step by step, and which must agree after each."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields as fields_of
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation import reference_history
from simulation import reference_operators as reference_people
from simulation.reference import ReferenceStore
from simulation.reference_rows import Block, Entry, Refused, Row

import outbox
from dispatchers.admin.decide import decisions
from dispatchers.admin.decide import resume as admin_resume
from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.flow_control.state import FlowUpdate, Taken, on_record
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue.claim_request import ClaimRequest, Forms
from dispatchers.store.records import identity as store_identity
from dispatchers.store.records import queries
from dispatchers.stored_outcome import StoredOutcome, read_outcome
from dispatchers.transitions import ClaimedEntry
from outbox.sessions.session import flush_all
from outbox.sql.clock import clock
from outbox.times import MICROSECOND, NEVER
from support.database import TABLES, Database
from support.entries import age, change, quota
from support.store_transitions import (
    FENCING_DELAY,
    HOUR,
    INSTANTS,
    KINDS,
    LEASE,
    LIMITS,
    NEAR,
    NEWS,
    OPERATIONS,
    START,
    transition,
)

COMPARED = (TABLES.queue, TABLES.settlement, TABLES.event, TABLES.blocked_group, TABLES.destination)
READ = [sa.select(table).order_by(*table.primary_key) for table in COMPARED]


class Agreement(RuleBasedStateMachine):
    """A database and the reference store, to which the same is done. claims: every claim there was, as each handed it out."""

    def __init__(self, database: Database, ob: outbox.Outbox) -> None:
        super().__init__()
        self.database = database
        self.ob = ob
        self.store = DatabaseStore(database.engine, ob.configuration)
        with database.owner() as connection:
            for table in (TABLES.entry, TABLES.meta, *COMPARED):
                connection.execute(table.delete())
        self.now = START
        self.reference = ReferenceStore(self._tick)
        self.claims: list[tuple[ClaimedEntry, ClaimedEntry]] = []
        self.ids: list[UUID] = []
        self.requests = 0

    def _tick(self) -> datetime:
        self.now += timedelta(milliseconds=1)
        return self.now

    @rule(
        operation=st.sampled_from(OPERATIONS),
        groups=st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=3),
        rolled_back=st.booleans(),
    )
    def enqueue(self, operation: str, groups: list[str | None], rolled_back: bool = False) -> None:
        """As many as there are groups, in one flush."""
        first = len(self.ids)
        with self.database.session() as session:
            entries = [
                self.ob.enqueue(session, operation, {}, parent=f"order:{first + number}", ordering_key=group)
                for number, group in enumerate(groups)
            ]
            flush_all(session)
            session.rollback() if rolled_back else session.commit()
        if rolled_back:
            return
        self.ids += [entry.id for entry in entries]
        self._spread(entry.id for entry in entries)
        now = self._tick()
        self.reference.enqueue(
            *(
                Entry(id=entry.id, operation=operation, tag=b"", created_at=now, ordering_key=group)
                for entry, group in zip(entries, groups, strict=True)
            )
        )

    def _spread(self, ids: Iterable[UUID]) -> None:
        """Of those that are due at the same instant a database may take any first."""
        due_at = {row.id: row.due_at for row in self.database.queue}
        for number, id in enumerate(ids):
            if number and due_at[id] != NEVER:
                change(self.database, id, due_at=due_at[id] + number * MICROSECOND)

    @rule(hours=st.sampled_from([1, 2, 4, 12]))
    def time_passes(self, hours: int) -> None:
        age(self.database, hours * HOUR)
        self.claims = [(_aged(of_sql, hours * HOUR), of_reference) for of_sql, of_reference in self.claims]
        self.now += hours * HOUR

    @rule(
        form=st.sampled_from(["native", "hex"]),
        news=st.sampled_from([None, *NEWS]),
        names=st.sampled_from([("crm", "mail"), ("mail",), ()]),
    )
    def claim(self, form: str, news: str | None = None, names: Sequence[str] = ("crm", "mail")) -> None:
        """news: what is reported of crm, whose limits are then checked. names: of the others only what needs no send."""
        self.requests += 1
        quotas = {"crm": quota("crm"), "mail": quota("mail")._replace(called_back=64)}
        known = [each._replace(known=True, admitted=True) for name, each in quotas.items() if name not in names]
        request = ClaimRequest(
            quotas=[*known, *(quotas[name] for name in names)],
            max_entries=500,
            max_callbacks=2,
            token=UUID(int=self.requests),
            lease=LEASE,
            forms=Forms({"crm": form, "mail.send": form}),
            flow_update=news and FlowUpdate(news=NEWS[news], decided=frozenset({"crm"}), limits=LIMITS),
        )
        of_sql = asyncio.run(self.store.exchange([], request))
        if request.flow_update is None:
            of_reference = self.reference.claim(request)
        else:
            of_reference, _ = self.reference.claim_throttled(request, request.flow_update)
        assert of_sql.passed_over == of_reference.passed_over
        pairs = list(zip(_by_id(of_sql.claimed), _by_id(of_reference.claimed), strict=True))
        for one, other in pairs:
            self._same(_compared(one), _compared(other))
        self.claims += pairs

    @precondition(lambda self: self.claims)
    @rule(form=st.sampled_from(["native", "hex"]))
    def senders_crash(self, form: str) -> None:
        self.time_passes(2)
        self.claim(form)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def settle(self, data: st.DataObject, kind: str) -> None:
        """By a dispatcher that claimed it once, its lease lost or not."""
        self.settle_one(kind, data.draw(st.sampled_from(self.claims[-8:])))

    def settle_one(self, kind: str, claims: tuple[ClaimedEntry, ClaimedEntry]) -> None:
        of_sql, of_reference = claims
        settled = asyncio.run(self.store.exchange([(of_sql, transition(kind, of_sql))], None)).settled
        assert settled == self.reference.settle([(of_reference, transition(kind, of_reference))])

    @precondition(lambda self: self.ids)
    @rule(form=st.sampled_from(["native", "hex"]))
    def request_lookups(self, form: str) -> None:
        def wanted(operation: str, sent_as: str | None) -> bool:
            return sent_as == form

        with self.database.engine.begin() as connection:
            queries.request_lookups(connection, TABLES, wanted, FENCING_DELAY, None)
        self.reference.request_lookups(wanted, FENCING_DELAY)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), rolled_back=st.booleans())
    def cancel(self, data: st.DataObject, rolled_back: bool) -> None:
        self.cancel_one(data.draw(st.sampled_from(self.ids)), rolled_back)

    def cancel_one(self, id: UUID, rolled_back: bool = False) -> None:
        if id in self.reference.settlements and id in self.reference.queue:
            return  # it is the app's transaction that fails then
        with self.database.session() as session:
            cancelled = self.ob.cancel(session, id)
            session.rollback() if rolled_back else session.commit()
        if not rolled_back:
            assert cancelled == self.reference.cancel(id)

    @precondition(lambda self: self._never_claimed())
    @rule(data=st.data())
    def make_due(self, data: st.DataObject) -> None:
        """No program should do this: it may cost a claim, but no order."""
        id = data.draw(st.sampled_from(self._never_claimed()))
        change(self.database, id, due_at=clock())
        self.reference.queue[id].due_at = self._tick()

    def _never_claimed(self) -> list[UUID]:
        return sorted(id for id, row in self.reference.queue.items() if row.deliveries == 0)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), what=st.sampled_from(["happened", "did_not_happen", "send_again", "cancel", "retry"]))
    def decide(self, data: st.DataObject, what: Any) -> None:
        self.decide_one(data.draw(st.sampled_from(self.ids)), what)

    def decide_one(self, id: UUID, what: Any) -> None:
        said: Callable[[], None]
        if what == "cancel":
            said = lambda: reference_people.cancel(self.reference, id, "looked")  # noqa: E731
        elif what == "retry":
            said = lambda: reference_people.retry(self.reference, id)  # noqa: E731
        else:
            said = lambda: reference_people.resolve(self.reference, id, what, "looked")  # noqa: E731
        assert self._say(id, what) == _is_allowed(said)

    def _say(self, id: UUID, what: Any) -> bool:
        try:
            with self.database.engine.begin() as connection:
                if what == "cancel":
                    decisions.cancel(connection, TABLES, id, actor="ada", reason="looked")
                elif what == "retry":
                    decisions.retry(connection, TABLES, id, actor="ada", reason="asked")
                else:
                    decisions.resolve(connection, TABLES, id, what, actor="ada", reason="looked")
        except (DecisionRefused, EntryNotFound):
            return False
        return True

    @precondition(lambda self: self.reference.settlements)
    @rule(data=st.data())
    def restore_to_the_queue(self, data: st.DataObject) -> None:
        """An entry that has ended is in the queue again, as after the restore of a part."""
        id = data.draw(st.sampled_from(sorted(self.reference.settlements)))
        if id in self.reference.queue:
            return
        row = {"state": "pending", "deliveries": 0, "attempts": 0, "maybe_sent": False, "key_epoch": 0}
        with self.database.engine.begin() as connection:
            if self.database.name == "postgresql":
                connection.exec_driver_sql("SET LOCAL session_replication_role = replica")  # no trigger stops a restore
            destination = self.reference.entries[id].destination
            connection.execute(TABLES.queue.insert().values(id=id, destination=destination, due_at=clock(), **row))
        self.reference.queue[id] = Row(due_at=self._tick())

    @rule(group=st.sampled_from(["a", "b"]))
    def release(self, group: str) -> None:
        try:
            with self.database.engine.begin() as connection:
                decisions.release_group(connection, TABLES, group, actor="ada", reason="looked")
            released = True
        except EntryNotFound:
            released = False
        assert released == _is_allowed(lambda: reference_people.release_group(self.reference, group, "looked"))

    @rule(destination=st.sampled_from(["crm", "mail"]))
    def pause(self, destination: str) -> None:
        with self.database.engine.begin() as connection:
            decisions.pause(connection, TABLES, destination, actor="ada", reason="asked")
        reference_people.pause(self.reference, destination)

    @rule(destination=st.sampled_from(["crm", "mail"]))
    def resume(self, destination: str) -> None:
        try:
            with self.database.engine.begin() as connection:
                decisions.resume(connection, TABLES, destination, actor="ada", reason="asked")
            resumed = True
        except DecisionRefused:
            resumed = False
        assert resumed == _is_allowed(lambda: reference_people.resume(self.reference, destination))

    @precondition(lambda self: self.claims)
    @rule(hours=st.sampled_from([1, 3]), data=st.data(), kind=st.sampled_from(KINDS))
    def suspend_and_resume(self, hours: int, data: st.DataObject, kind: str) -> None:
        """As after a restore; meanwhile a dispatcher claims, settles and cancels all the same."""
        self.suspend()
        self.claim("native")
        self.settle_one(kind, data.draw(st.sampled_from(self.claims[-8:])))
        self.cancel_one(data.draw(st.sampled_from(self.ids)))
        self.resume_after_restore(hours)

    def suspend(self) -> None:
        with self.database.engine.begin() as connection:
            store_identity.suspend(connection, TABLES, store_identity.read_identity(connection, TABLES)[0], "set back")
        self.reference.meta = replace(self.reference.meta, suspended="set back")

    def resume_after_restore(self, hours: int) -> None:
        word = admin_resume.OperatorDecision(
            env=self.ob.configuration.env, actor="ada", reason="looked", since=hours * HOUR
        )
        admin_resume.resume(self.database.engine, TABLES, word)
        reference_history.resume(self.reference, word.env, word.reason, self.now - hours * HOUR)

    @invariant()
    def they_agree(self) -> None:
        queued, settled, events, blocked, destinations = self._rows()
        queue = {row.id: row for row in queued}
        assert queue.keys() == self.reference.queue.keys()
        for id, row in self.reference.queue.items():
            fields = _fields(row)
            del fields["position"]  # of which only the order counts
            self._same({name: getattr(queue[id], name) for name in fields}, fields)
        assert _in_order(queue) == _in_order(self.reference.queue)
        blocks = {row.ordering_key: Block(row.entry_id, row.reason) for row in blocked}
        assert blocks == self.reference.blocked_group
        flow_states = {row.name: row for row in destinations}
        assert flow_states.keys() == self.reference.flow.keys()
        for destination, flow in self.reference.flow.items():
            fields = _fields(flow)
            del fields["resumed_at"], fields["permits_taken"]
            self._same_permits(on_record(flow_states[destination].permits_taken), flow.permits_taken)
            self._same({name: getattr(flow_states[destination], name) for name in fields}, fields)
        settlements = {row.id: row for row in settled}
        assert settlements.keys() == self.reference.settlements.keys()
        for id, settlement in self.reference.settlements.items():
            for name in ("state", "reason", "deliveries", "attempts", "key_epoch"):
                assert getattr(settlements[id], name) == getattr(settlement, name), name
        assert _histories(events) == _histories(self.reference.events)

    def _rows(self) -> list[Sequence[Any]]:
        """Of each table that is compared; in one transaction, which a check after each step would otherwise spend most on."""
        with self.database.observer.connect() as connection:
            return [connection.execute(query).all() for query in READ]

    def _same_permits(self, of_sql: Sequence[Taken], of_reference: Sequence[Taken]) -> None:
        now = datetime.now(UTC)
        assert [each[:2] for each in of_sql] == [each[:2] for each in of_reference]
        for found, taken in zip(of_sql, of_reference, strict=True):
            assert abs((now - found.until) - (self.now - taken.until)) < NEAR

    def _same(self, of_sql: dict[str, Any], of_reference: dict[str, Any]) -> None:
        """Equal, instants as far as they lie back."""
        now = datetime.now(UTC)
        for name, value in of_reference.items():
            found = of_sql[name]
            if name == "outcome":
                found, value = _without_instant(found, now), _without_instant(value, self.now)
            if name in INSTANTS and value not in (None, NEVER) and found not in (None, NEVER):
                assert abs((now - found) - (self.now - value)) < NEAR, name
            else:
                assert found == value, name


def _fields(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields_of(row)}


def _without_instant(outcome: str | StoredOutcome | None, now: datetime) -> Any:
    """What is stored, with how many quarters of an hour its instants lie back: nothing here waits for less."""
    record = deepcopy(outcome.members) if isinstance(outcome, StoredOutcome) else json.loads(outcome or "{}")
    if "lookup" in record:
        record["lookup"]["fenced_at"] = round(
            (now - datetime.fromisoformat(record["lookup"]["fenced_at"])) / (HOUR / 4)
        )
    if "decided_at" in record.get("known", {}):
        record["known"]["decided_at"] = round(
            (now - datetime.fromisoformat(record["known"]["decided_at"])) / (HOUR / 4)
        )
    return record


def _aged(claimed: ClaimedEntry, by: timedelta) -> ClaimedEntry:
    """A claim that was handed out earlier, now that its row has been aged."""
    instants: dict[str, Any] = {
        name: value - by for name in INSTANTS if (value := getattr(claimed, name, None)) is not None
    }
    record = deepcopy(claimed.outcome.members)
    if "lookup" in record:
        record["lookup"]["fenced_at"] = (datetime.fromisoformat(record["lookup"]["fenced_at"]) - by).isoformat()
        instants["outcome"] = read_outcome(json.dumps(record))
    return claimed._replace(**instants)


def _by_id(claimed: list[ClaimedEntry]) -> list[ClaimedEntry]:
    return sorted(claimed, key=lambda entry: entry.id)


def _compared(claimed: ClaimedEntry) -> dict[str, Any]:
    as_enqueued = ("tag", "payload", "options", "headers", "position")
    return {name: value for name, value in claimed._asdict().items() if name not in as_enqueued}


def _histories(events: Sequence[Any]) -> list[tuple[UUID, str, str | None]]:
    """Entry by entry, without times."""
    fields = [
        (event.entry_id, event.kind, event.reason and re.sub(" after .* UTC", "", event.reason)) for event in events
    ]
    return sorted(fields, key=lambda event: event[0])


def _in_order(queue: Mapping[UUID, Any]) -> list[tuple[str, UUID]]:
    """The groups, from their heads on."""
    places = [(row.ordering_key, row.position, id) for id, row in queue.items() if row.ordering_key is not None]
    return [(ordering_key, id) for ordering_key, _, id in sorted(places)]


def _is_allowed(decide: Callable[[], None]) -> bool:
    try:
        decide()
    except Refused:
        return False
    return True
