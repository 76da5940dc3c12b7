"""What must never be seen, checked at every step and at the end. It knows the truth: what was really executed, and when.

What the simulation grants, because the invariants do: windows are declared truthfully, clocks go at rates within 1 %, a
request arrives within its timeout and half a margin of the last check before it, and services and operators report the
truth. A process may freeze between that check and the call; a request that so arrives when the service may have
forgotten its key is beyond what anyone here can prevent, and is the only one that may repeat an effect.
"""

from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from dispatchers.delivery import Delivery, Finding
from dispatchers.flow_control.state import service_of
from dispatchers.store.queue import queue_update
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, RetryCallback, SendAgain, Settle
from outbox.times import NEVER
from simulation.flow_control_invariants import FlowControlInvariants
from simulation.hint_invariants import HintInvariants
from simulation.ordering_invariants import OrderingInvariants
from simulation.reference_rows import Row
from simulation.restore_invariants import RestoreInvariants
from simulation.tenant_invariants import TenantInvariants
from simulation.trace import FENCING_DELAY, LEASE, MARGIN, TIMEOUT, Declared, Send, Trace, Truth
from simulation.world import Process, World


class Invariants(Truth):
    """Hears of everything, and raises `InvariantViolated`."""

    def __init__(self, world: World, start: datetime) -> None:
        super().__init__(world, start)
        self.on_uncertain: Callable[[], object] = lambda: None
        self.holding: dict[
            tuple[int, UUID, timedelta], ClaimedEntry
        ] = {}  # by process, entry, and its age at the claim
        self.never: set[UUID] = set()  # no adapter serves these
        self.groups = OrderingInvariants(self)
        self.flow = FlowControlInvariants(self)
        self.restore = RestoreInvariants(self)
        self.tenants = TenantInvariants(self)
        self.hints = HintInvariants(self)

    def _now(self) -> float:
        return self.world.now

    # --- the database

    def claimed(self, claimed: list[ClaimedEntry], lease: timedelta, process: Process) -> None:
        self.flow.claimed(claimed)
        self.restore.claimed(claimed)
        for entry in claimed:
            self.note(f"{entry.id.hex[:6]} claimed by {process.name} ({entry.deliveries})")
            trace = self.trace(entry.id)
            is_free = trace.lease is None or trace.lease[1] < self._now()
            self.require(is_free, entry.id, "two live leases")
            trace.lease = (entry.lease_token, self._now() + lease.total_seconds())
            trace.deliveries += 1
            self.holding[id(process), entry.id, entry.leased_at - entry.created_at] = entry
            self._check_row(entry.id)
            self.groups.claimed(entry)

    def settled(self, entry: ClaimedEntry, change: Any, took_effect: bool) -> None:
        word = type(change).__name__ + (f" {change.state}" if isinstance(change, Settle) else "")
        self.note(f"{entry.id.hex[:6]} {word}{'' if took_effect else ': lost'}")
        if not took_effect:
            return
        trace = self.trace(entry.id)
        trace.lease = None
        if not isinstance(change, Settle):
            trace.deliveries -= queue_update.queue_update(entry, change).uncounted
        if isinstance(change, SendAgain) and not change.absent:
            trace.sends_before = len(trace.sends)
        if getattr(change, "absent", False) or (
            isinstance(change, Settle) and change.looked_up and change.state == "failed"
        ):
            self._disprove(entry, trace)
        if isinstance(change, Retry):
            self._check_age(entry, change, trace)
        if isinstance(change, MarkUncertain):
            self.on_uncertain()
        self._check_end(entry, change)
        self._check_row(entry.id)
        self.groups.settled(entry, change)
        self.flow.settled(entry, change)
        self.tenants.settled(entry, change)

    def settling_without_callback(self, entry: ClaimedEntry, change: Any) -> None:
        """In a batch. No dispatcher can call what none had stored by then."""
        if isinstance(change, Settle | MarkUncertain):
            kind = "on_settled" if isinstance(change, Settle) else "on_uncertain"
            is_on_record = f"{kind} {service_of(entry.destination)}" in self.store.callbacks
            self.require(not is_on_record, entry.id, f"it ended without its {kind}, which is on record")
            self.trace(entry.id).ended_before_its_callback = isinstance(change, Settle)

    def _disprove(self, entry: ClaimedEntry, trace: Trace) -> None:
        """A status lookup has proved that nothing happened under the present key. A frozen sender may still send."""
        for send in trace.sends:
            if send.claimed.key_epoch == entry.key_epoch:
                froze = send.process.frozen_seconds(send.began) > 0
                self.require(froze or not send.may_happen, entry.id, "proved absent, and it may still happen")
                send.harmless, send.too_late = True, send.too_late or send.may_happen
        trace.was_in_doubt, trace.in_doubt = False, (0, None)

    def cancelled(self, id: UUID) -> None:
        self.note(f"{id.hex[:6]} cancelled")
        trace = self.trace(id)
        trace.is_cancelled_by_app = True
        self.require(not self._may_happen(trace), id, "cancelled, and it may have been sent")

    def _check_age(self, entry: ClaimedEntry, change: Retry, trace: Trace) -> None:
        """It waits no longer than its age allows, counted from when that was decided."""
        for send in trace.sends:
            if send.claimed.lease_token == entry.lease_token and send.decided_at is not None:
                tried = self.flow.age(entry) - (self._now() - send.decided_at) + change.delay.total_seconds()
                most = send.service.max_age.total_seconds() + MARGIN.total_seconds()
                self.require(tried <= most, entry.id, "it waits beyond its age")

    def reported(self, id: UUID, state: str) -> None:
        """A callback's row was committed."""
        self.note(f"{id.hex[:6]} reported {state}")
        trace = self.trace(id)
        ended = self.store.settlements.get(id)
        if state == "uncertain":
            is_true = id in self.store.queue and self.store.queue[id].state == "uncertain"
        else:
            is_true = ended is not None and ended.state == state
            self.require(not any(word != "uncertain" for word in trace.reported), id, "its end was reported twice")
        self.require(is_true, id, f"a callback's {state} was committed, and it is not so")
        trace.reported.append(state)

    def _check_end(self, entry: ClaimedEntry, change: Any) -> None:
        end = change.end if isinstance(change, RetryCallback) else change
        if not isinstance(end, Settle):
            return
        trace, effects = self.trace(entry.id), self.trace(entry.id).effects.total()
        is_decided = entry.outcome.known is not None  # by an operator who cancelled it
        self.require(is_decided or entry.id not in self.never, entry.id, "it ended, and no adapter serves it")
        if end.state == "delivered":
            self.require(effects > 0, entry.id, "delivered, and nothing happened")
        else:
            self.require(effects == trace.late_effects, entry.id, f"{end.state}, and it happened")
        if end.state == "cancelled":
            self.require(not self._may_happen(trace), entry.id, "cancelled, and it may have been sent")

    def _check_row(self, id: UUID) -> None:
        row = self.store.queue.get(id)
        if row is None:
            return
        trace = self.trace(id)
        self._check_shape(id, row)
        self.require(row.deliveries == trace.deliveries, id, "a delivery was miscounted")
        self.require(row.maybe_sent or not trace.was_in_doubt, id, "its doubt was forgotten")
        trace.was_in_doubt = row.maybe_sent
        epoch, since = trace.in_doubt
        is_sticky = row.key_epoch != epoch or since is None or row.in_doubt_since == since or self.store.is_decided(id)
        self.require(is_sticky, id, "since when it is in doubt was changed")
        trace.in_doubt = (row.key_epoch, row.in_doubt_since)
        if row.state != "sending" and not row.maybe_sent:
            self.require(not self._may_happen(trace), id, "it may have been sent, and nothing says so")

    def _check_shape(self, id: UUID, row: Row) -> None:
        self.require((row.state == "sending") == (row.lease_token is not None), id, "a lease without sending")
        self.require(row.in_doubt_since is None or row.maybe_sent, id, "in doubt, and not maybe sent")
        self.require(row.state != "uncertain" or row.maybe_sent, id, "uncertain without a doubt")
        self.require(
            (row.known is not None) == self.store.is_decided(id), id, "it cannot be found by what is known of it"
        )
        is_counted = row.deliveries >= row.attempts or self.trace(id).was_set_back
        self.require(is_counted, id, "more attempts than deliveries")

    # --- the sends

    def sending(self, delivery: Delivery, process: Process, service: Declared, form: str, keys: list[str]) -> Send:
        """An adapter is called: this moment is the last check. keys: of each epoch that there may be."""
        claimed = self.holding[id(process), delivery.id, delivery.age]
        trace = self.trace(delivery.id)
        send = Send(claimed, process, self._now(), service, form)
        self.note(f"{delivery.id.hex[:6]} sent by {process.name} to {service.name}")
        self.require(claimed.outcome.known is None, delivery.id, "sent although its outcome is recorded")
        self.require(claimed.outcome.lookup is None, delivery.id, "sent though it awaits a status lookup")
        self.require(delivery.key == keys[claimed.key_epoch], delivery.id, "sent under another key")
        self.require(delivery.id not in self.never, delivery.id, "sent though it is not to be read here")
        self._check_lease(send)
        self._check_repetition(send, trace)
        self.groups.sending(send)
        self.tenants.sending(delivery.id, delivery.key)
        self.flow.sending(send)
        trace.sends.append(send)
        return send

    def _check_lease(self, send: Send) -> None:
        """The end of the timeout lies within the lease."""
        until = self.instant(send.claimed.leased_at) + LEASE.total_seconds()
        is_covered = self._now() + TIMEOUT.total_seconds() <= until
        self.require(is_covered, send.claimed.id, "sent when its lease could end meanwhile")

    def _check_repetition(self, send: Send, trace: Trace) -> None:
        id, service = send.claimed.id, send.service
        since = trace.sends[trace.sends_before :]
        counted = [each for each in since if not each.harmless and self.restore.is_countable(each)]
        self.require(len(counted) < service.max_attempts, id, "sent more often than allowed")
        earlier = list(self._maybe_executed(trace, send.claimed.key_epoch))
        self.require(all(each.form == send.form for each in earlier), id, "sent again in another form")
        if earlier and service.window is None:
            self.require(service.at_least_once, id, "sent again to a service that keeps no keys")
        if earlier and isinstance(service.window, timedelta):
            arrives = self._now() + TIMEOUT.total_seconds()
            forgets = min(self.instant(each.claimed.leased_at) for each in earlier) + service.window.total_seconds()
            self.require(arrives < forgets, id, "sent again when the service may have forgotten the key")
        for each in trace.sends:
            if each.claimed.key_epoch < send.claimed.key_epoch and each.may_arrive:
                waited = self._now() - self.instant(each.claimed.leased_at)
                waited_out = waited >= (LEASE + FENCING_DELAY).total_seconds()
                self.require(waited_out, id, "sent under a new key while the old one is under way")

    def arrived(self, send: Send) -> None:
        send.has_arrived = True
        trace, window = self.trace(send.claimed.id), send.service.window
        froze = send.process.frozen_seconds(send.began) > 0
        if (
            window is None
        ):  # no status lookup can rule out what a sender does that was frozen beyond lease and margin: docs/how-it-works.md
            waited = self._now() - self.instant(send.claimed.leased_at)
            send.too_late |= froze and waited >= (LEASE + FENCING_DELAY).total_seconds()
        if not isinstance(window, timedelta):
            return
        first = min(
            (self.instant(each.claimed.leased_at) for each in self._maybe_executed(trace, send.claimed.key_epoch)),
            default=self._now(),
        )
        forgets = first + window.total_seconds()
        self.require(
            froze or self._now() < forgets, send.claimed.id, "it arrived when the service may have forgotten the key"
        )
        # A service whose clock goes fast forgets a little sooner: the margin is for that, and a frozen sender has used it up.
        send.too_late |= self._now() >= forgets - MARGIN.total_seconds() * froze

    def executed(self, send: Send) -> None:
        entry_id, epoch = send.claimed.id, send.claimed.key_epoch
        self.note(f"{entry_id.hex[:6]} happened")
        trace = self.trace(entry_id)
        trace.effects[epoch] += 1
        trace.late_effects += send.too_late
        ended = self.store.settlements.get(entry_id)
        is_false = ended is not None and ended.state != "delivered" and not send.too_late
        self.require(not is_false, entry_id, f"{ended.state if ended else ''}, and it happened later")
        if trace.effects[epoch] > 1 and self._invariants_one_effect(trace, send):
            self.require(False, entry_id, "it happened twice under one key")
        self.groups.executed(send)

    def by_lookup(self, delivery: Delivery, found: Finding) -> None:
        self.note(f"{delivery.id.hex[:6]} lookup returned {type(found).__name__}")

    def answered(self, send: Send, *, harmless: bool) -> None:
        send.harmless = harmless or send.is_forgotten
        send.decided_at = self._now()

    def _invariants_one_effect(self, trace: Trace, send: Send) -> bool:
        if any(each.too_late for each in trace.sends if each.claimed.key_epoch == send.claimed.key_epoch):
            return False
        return send.service.window is not None or not send.service.at_least_once

    def _maybe_executed(self, trace: Trace, epoch: int) -> Iterator[Send]:
        return (send for send in trace.sends if send.claimed.key_epoch == epoch and not send.harmless)

    def _may_happen(self, trace: Trace) -> bool:
        return any(not send.harmless for send in trace.sends)

    def is_under_way(self, id: UUID) -> bool:
        return any(send.may_happen for send in self.trace(id).sends)

    # --- the end

    def all_ended(self) -> bool:
        """Whether each waiting entry needs an operator or an adapter, or is after such an entry."""
        return all(
            (row.state == "uncertain" and row.due_at == NEVER and not self.store.is_decided(id))
            or id in self.never
            or self.groups.is_stuck(id, self.never)
            for id, row in self.store.queue.items()
        )

    def check_all(self, called_back: Collection[str]) -> None:
        """called_back: the destinations with callbacks."""
        self.tenants.check_all()
        for id, ended in self.store.settlements.items():
            trace = self.trace(id)
            effects = trace.effects.total()
            is_true = effects > 0 if ended.state == "delivered" else effects == trace.late_effects
            self.require(is_true, id, "its end is false")
            is_reported = not (trace.is_cancelled_by_app or trace.ended_before_its_callback)
            if service_of(self.store.entries[id].destination) in called_back and is_reported:
                said = [word for word in trace.reported if word != "uncertain"]
                self.require(said == [ended.state], id, f"its end was reported {len(said)} times")
        for id in self.never & self.store.queue.keys():
            row = self.store.queue[id]
            self.require(row.state != "uncertain", id, "unserved, and changed")
