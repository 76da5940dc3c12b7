"""The reference store: what every store does, written to be read. It is the specification; the SQL must agree with it.

One method is one transaction, which is atomic. `test_reference_store.py` holds the stores of PostgreSQL and SQLite
to it, step by step; the simulation runs dispatchers against it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from dispatchers.flow_control import state as flow_state
from dispatchers.flow_control.quota import Quota
from dispatchers.flow_control.state import FlowState, FlowStates, FlowUpdate, Limits
from dispatchers.store.protocol import Survey
from dispatchers.store.queue import queue_update
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.claimed_row import read_object
from dispatchers.store.queue.ordering import MOMENT
from dispatchers.store.records.queries import Wanted
from dispatchers.stored_outcome import LookupState, read_outcome, write_outcome
from dispatchers.transitions import ClaimedEntry, Ending, Lease, Release, Settle, Transition
from outbox.sql.schema.tables import SCHEMA_VERSION
from outbox.times import NEVER
from simulation.reference_history import is_suspended
from simulation.reference_ordering import advance, advance_groups, next_is_locked, sort_out
from simulation.reference_rows import WAITING, Entry, Event, Row, Settlement, Tables

OPEN_TO_PROOF = ("sending", "retry", "uncertain")  # not `pending`: an operator has just requested another send


class Taken(NamedTuple):
    """What a claim brought. passed_over: how many were due, but are not the heads of their groups, or had ended before."""

    claimed: list[ClaimedEntry]
    passed_over: int = 0


class ReferenceStore(Tables):
    """What is done with the tables; the rules of groups are in `reference_ordering`, what people decide in `reference_people`."""

    # --- the app

    def enqueue(self, *entries: Entry) -> None:
        """Those of one flush: of each group the first one is due, the others wait for it."""
        groups: set[str] = set()
        for entry in entries:
            if entry.id not in self.entries:
                self.entries[entry.id] = entry
                self.queue[entry.id] = Row(due_at=entry.created_at)
                if entry.ordering_key is not None:
                    self._place(self.queue[entry.id], entry.ordering_key, is_first=entry.ordering_key not in groups)
                    groups.add(entry.ordering_key)

    def _place(self, row: Row, ordering_key: str, *, is_first: bool) -> None:
        self.last_position += 1
        row.ordering_key, row.position = ordering_key, self.last_position
        if not is_first:
            row.due_at = NEVER

    def cancel(self, id: UUID) -> bool:
        """Only what was never possibly sent."""
        row = self.queue.get(id)
        if row is None or not self._may_be_cancelled(row):
            return False
        self.end(id, row, Settle("cancelled", row.attempts))
        if row.position is not None:
            advance(self, row.ordering_key, row.position)
        return True

    def may_be_cancelled(self, id: UUID) -> bool:
        row = self.queue.get(id)
        return row is not None and self._may_be_cancelled(row)

    def _may_be_cancelled(self, row: Row) -> bool:
        return row.state in WAITING and row.lease_token is None and not row.maybe_sent and not is_suspended(self)

    # --- the dispatcher: claim

    def claim(self, request: ClaimRequest) -> Taken:
        """Lease the oldest due entries of each wanted destination, as far as they are the heads of their groups."""
        taken = self._take(request)
        claimed = [entry for entry in taken if not self._remove_ended(entry)]
        must_wait = sort_out(self, claimed)
        self.settle(must_wait)
        waiting = {entry.id for entry, _ in must_wait}
        claimed = [entry for entry in claimed if entry.id not in waiting]
        return Taken(claimed, len(taken) - len(claimed))

    def _remove_ended(self, entry: ClaimedEntry) -> bool:
        """Take it out of the queue if it has a settlement, which counts: it is in the queue by an operator's mistake."""
        ended = self.settlements.get(entry.id)
        if ended is None:
            return False
        if self.must_be_postponed(entry, Settle("delivered", 0)):
            self.settle([(entry, Release("the next one of its group is locked", MOMENT))])
            return True
        del self.queue[entry.id]
        self._note(entry.id, f"it was in the queue although it had ended as {ended.state}", by_lookup=False)
        if entry.position is not None:
            advance(self, entry.ordering_key, entry.position)
        return True

    def _take(self, request: ClaimRequest) -> list[ClaimedEntry]:
        """A lease that ran out is taken over."""
        now = self.clock()
        claimed: list[ClaimedEntry] = []
        called = 0
        for quota in request.quotas if self._is_trusted(request) else []:
            if not quota.known and self._is_shut(quota, now):
                continue
            permits = min(quota.permits, request.max_entries - len(claimed))
            if quota.called_back is not None:
                permits = min(permits, request.max_callbacks - called)
            claimable = self._claimable(quota, min(now, request.cutoff), now)
            ours = [id for id in claimable if self.queue[id].callback in (None, *request.callbacks)]
            due = sorted(self._served(iter(ours), request), key=lambda id: self.queue[id].due_at)
            leased = [self._lease(id, request, now) for id in due[: max(permits, 0)]]
            claimed += leased
            called += len(leased) if quota.called_back is not None else 0
        return claimed

    def _is_trusted(self, request: ClaimRequest) -> bool:
        """Whether nothing that was sent may have been forgotten, as far as anyone knows who asks."""
        return not is_suspended(self) and self.meta.number >= request.seen

    def _claimable(self, quota: Quota, latest: datetime, now: datetime) -> Iterator[UUID]:
        for id, row in self.queue.items():
            is_due = quota.due_from <= row.due_at <= latest and self.entries[id].destination == quota.destination
            is_due = is_due and (row.known is not None or not quota.known)
            if is_due and self._is_free(row, now) and id not in self.locked:
                yield id

    def _served(self, ids: Iterable[UUID], request: ClaimRequest) -> Iterator[UUID]:
        """Without what the process that asks does not serve, unless an operator has cancelled it."""
        for id in ids:
            entry = self.entries[id]
            passed_over = request.unserved is not None and (
                entry.operation in request.unserved or entry.schema_version > SCHEMA_VERSION
            )
            known = read_outcome(self.queue[id].outcome).known
            is_cancelled = known is not None and known.state == "cancelled" and known.decided_at is not None
            if is_cancelled or not passed_over:
                yield id

    def _is_free(self, row: Row, now: datetime) -> bool:
        return row.lease_until is None or row.lease_until < now

    def _lease(self, id: UUID, request: ClaimRequest, now: datetime) -> ClaimedEntry:
        row = self.queue[id]
        if row.lease_token is not None:
            self._take_over(row)
        if row.in_doubt_since is None or row.sent_as is None:
            row.sent_as = _form(request, self.entries[id].operation)
        row.state = "sending"
        row.lease_token, row.leased_at, row.lease_until = request.token, now, now + request.lease
        row.first_leased_at = row.first_leased_at or now
        row.deliveries += 1
        return self._claimed(self.entries[id], row)

    def _take_over(self, row: Row) -> None:
        """Its sender crashed at an unknown time: that counts as an attempt whose outcome is unknown, since its lease began."""
        row.attempts += 1
        row.maybe_sent = True
        row.in_doubt_since = row.in_doubt_since or row.leased_at

    def _claimed(self, entry: Entry, row: Row) -> ClaimedEntry:
        assert row.first_leased_at is not None
        assert row.leased_at is not None
        assert row.lease_token is not None
        return ClaimedEntry(
            id=entry.id,
            destination=entry.destination,
            env=entry.env,
            operation=entry.operation,
            payload=entry.payload,
            options=read_object(entry.options),
            headers=read_object(entry.headers),
            tag=entry.tag,
            kid=entry.kid,
            schema_version=entry.schema_version,
            due_at=entry.created_at,
            created_at=entry.created_at,
            first_leased_at=row.first_leased_at,
            queued_at=row.due_at,
            deliveries=row.deliveries,
            attempts=row.attempts,
            maybe_sent=row.maybe_sent,
            in_doubt_since=row.in_doubt_since,
            key_epoch=row.key_epoch,
            sent_as=row.sent_as,
            leased_at=row.leased_at,
            outcome=read_outcome(row.outcome),
            record_id=None,
            completion=None,
            ordering_key=row.ordering_key,
            position=row.position,
            ended=None,
            lease_token=row.lease_token,
        )

    # --- the dispatcher: settle

    def must_be_postponed(self, entry: ClaimedEntry, change: Transition, seen: Collection[UUID] | None = None) -> bool:
        """Whether it would leave its group while another transaction has locked the next entry."""
        return self.may_settle(entry, change) and next_is_locked(self, entry, change, seen)

    def settle(
        self, settlements: Sequence[Ending], cutoff: datetime = NEVER, seen: Collection[UUID] | None = None
    ) -> set[Lease]:
        """End these leases; returns those for which that took effect.

        cutoff: the claim that follows looks no further. seen: what was there when it began, if it took its time.
        """
        settled = [(entry, change) for entry, change in settlements if self._settle_one(entry, change)]
        advance_groups(self, settled, cutoff, seen)
        return {entry.lease for entry, _ in settled}

    def take_over(self, callbacks: Collection[str]) -> int:
        """Those who have these callbacks may have the entries at once that wait for them."""
        now = self.clock()
        waiting = [row for row in self.queue.values() if row.callback in callbacks and row.lease_token is None]
        for row in waiting:
            row.due_at = min(row.due_at, now)
        return len(waiting)

    def may_settle(self, entry: ClaimedEntry, change: Transition) -> bool:
        """Only the holder of the lease may settle; but proof of success is taken from anyone, while the key is the same."""
        row = self.queue.get(entry.id)
        if row is None:
            return False
        return self._holds_lease(row, entry) or (self._is_proof(change, entry) and self._takes_proof(row, entry))

    def _holds_lease(self, row: Row, entry: ClaimedEntry) -> bool:
        return row.lease_token == entry.lease_token and not is_suspended(self)

    def _is_proof(self, change: Transition, entry: ClaimedEntry) -> bool:
        return (
            change.state == "delivered"
            if isinstance(change, Settle)
            else queue_update.queue_update(entry, change).proof
        )

    def _takes_proof(self, row: Row, entry: ClaimedEntry) -> bool:
        return row.key_epoch == entry.key_epoch and row.state in OPEN_TO_PROOF

    def _settle_one(self, entry: ClaimedEntry, change: Transition) -> bool:
        if not self.may_settle(entry, change):
            return False
        row = self.queue[entry.id]
        if isinstance(change, Settle):
            self.end(entry.id, row, change)
        else:
            self._move(entry.id, row, queue_update.queue_update(entry, change))
        return True

    def end(self, id: UUID, row: Row, change: Settle) -> None:
        del self.queue[id]
        self.settlements[id] = Settlement(
            state=change.state,
            result=change.result,
            reason=change.reason,
            deliveries=row.deliveries,
            attempts=max(row.attempts, change.attempts),
            key_epoch=row.key_epoch,
        )
        if change.note is not None:
            self._note(id, change.reason, by_lookup=change.looked_up)

    def _move(self, id: UUID, row: Row, values: queue_update.QueueUpdate) -> None:
        row.state = values.state
        row.waiting_since = (row.waiting_since or row.due_at) if values.uncounted else None
        row.due_at = NEVER if values.delay is None else self.clock() + values.delay
        row.lease_token = row.lease_until = row.leased_at = None
        if values.resets_age:
            row.first_leased_at = None
        row.deliveries -= values.uncounted
        row.attempts = values.attempts
        row.maybe_sent = values.maybe_sent
        row.in_doubt_since = values.in_doubt_since
        row.callback = values.callback
        row.known = self.entries[id].destination if values.known else None
        row.key_epoch = values.key_epoch
        row.outcome = values.outcome or row.outcome
        if values.reason is not None:
            self._note(id, values.reason, by_lookup=values.by_lookup)

    def _note(self, id: UUID, reason: str | None, *, by_lookup: bool) -> None:
        self.events.append(Event(id, "lookup" if by_lookup else "attempt", reason))

    # --- the dispatcher: look

    def request_lookups(self, wanted: Wanted, fencing_delay: timedelta) -> None:
        """Schedule the first status lookup of uncertain entries, once no sender can be at work any more."""
        for id, row in self.queue.items():
            if id not in self.locked and self._is_given_up(row) and wanted(self.entries[id].operation, row.sent_as):
                outcome = read_outcome(row.outcome)
                why, fenced_at = outcome.reason or "", self.clock() + fencing_delay
                lookup = LookupState(why, 1, fenced_at, row.deliveries, outcome.stored)
                row.outcome, row.due_at = write_outcome(why, lookup=lookup), fenced_at

    def _is_given_up(self, row: Row) -> bool:
        is_left = row.state == "uncertain" and row.due_at == NEVER
        outcome = read_outcome(row.outcome)
        return is_left and outcome.lookup is None and outcome.known is None

    # --- the dispatcher: flow control

    def claim_throttled(self, request: ClaimRequest, flow_update: FlowUpdate) -> tuple[Taken, FlowStates]:
        """Write down what was heard of the destinations, then claim what they may be sent."""
        now = self.clock()
        names = sorted(flow_update.decided.union(flow_update.news))
        limits = {name: flow_update.limits.get(name, Limits()) for name in names}
        for name in names:
            row, news = self._flow(name), flow_update.news.get(name)
            self.flow[name] = row if news is None else flow_state.heard(row, news, limits[name], now)
        quotas = [self._admitted(quota, limits, now) for quota in request.quotas]
        taken = self.claim(replace(request, quotas=[quota for quota in quotas if quota.permits]))
        for name in names:
            count = sum(entry.destination == name and not entry.is_known for entry in taken.claimed)
            self.flow[name] = flow_state.claimed(
                self.flow[name], limits[name], now, count, request.token, request.lease
            )
        return taken, FlowStates(now, {name: self.flow[name] for name in names})

    def _admitted(self, quota: Quota, limits: Mapping[str, Limits], now: datetime) -> Quota:
        if quota.known or quota.destination not in limits:
            return quota
        permits = flow_state.admitted(self.flow[quota.destination], limits[quota.destination], now, quota.permits)
        return quota._replace(permits=permits, admitted=True)

    def _flow(self, destination: str) -> FlowState:
        return self.flow.get(destination, FlowState())

    def _is_shut(self, quota: Quota, now: datetime) -> bool:
        row = None if quota.admitted else self.flow.get(quota.destination)
        return row is not None and (row.breaker != "closed" or flow_state.closed_until(row, now) is not None)

    # --- questions

    def survey(self) -> Survey:
        now = self.clock()
        throttled = {name: row for name, row in self.flow.items() if row != FlowState()}
        known = {self.entries[id].destination for id, row in self.queue.items() if row.known and row.due_at <= now}
        destinations = {self.entries[id].destination for id in self.queue}
        return Survey(sorted(destinations), FlowStates(now, throttled), sorted(known))

    def states(self) -> list[str]:
        """Of every entry, ended ones included."""
        return [row.state for row in self.queue.values()] + [row.state for row in self.settlements.values()]

    def is_decided(self, id: UUID) -> bool:
        """Whether the entry's outcome is stored; it is never sent then."""
        return read_outcome(self.queue[id].outcome).known is not None


def _form(request: ClaimRequest, operation: str) -> str | None:
    """What the entry's first send is pinned to: its adapter's form, the longest prefix's."""
    serving = [prefix for prefix in request.forms if f"{operation}.".startswith(f"{prefix}.")]
    return request.forms[max(serving, key=len)] if serving else None
