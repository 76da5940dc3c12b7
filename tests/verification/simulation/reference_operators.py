"""The decisions of operators, in the reference store. Everything raises `Refused` where the state does not allow it."""

from dataclasses import replace
from typing import Any
from uuid import UUID

from dispatchers.admin.decide.rules import Verdict
from dispatchers.decide import CANCEL_UNSERVED_AFTER
from dispatchers.flow_control.state import FlowState, closed_until
from dispatchers.stored_outcome import SEND_AGAIN, Known, read_outcome, write_outcome
from dispatchers.transitions import Settle
from simulation.reference import ReferenceStore
from simulation.reference_ordering import advance
from simulation.reference_rows import WAITING, Event, Refused, Row


def resolve(store: ReferenceStore, id: UUID, verdict: Verdict, reason: str) -> None:
    """Store the outcome of an uncertain entry."""
    row = store.queue.get(id)
    if row is None or row.state != "uncertain":
        raise Refused
    state: Any = {"happened": "delivered", "did_not_happen": "failed", "send_again": SEND_AGAIN}[verdict]
    _know(store, id, row, Known(state=state, reason=reason), f"{verdict}: {reason}")


def cancel(store: ReferenceStore, id: UUID, reason: str) -> None:
    """Have a waiting entry cancelled: by a dispatcher, callback included, or at once where none has served it for long."""
    row = store.queue.get(id)
    if row is None or not store._may_be_cancelled(row):
        raise Refused
    now = store.clock()
    if _is_unserved_for_long(store, id, row):
        store.end(id, row, Settle("cancelled", row.attempts, reason=reason))
        if row.position is not None and row.ordering_key is not None:
            advance(store, row.ordering_key, row.position)
        store.events.append(Event(id, "decision", reason))
        return
    known = read_outcome(row.outcome).known
    decided_at = now if known is None or known.decided_at is None else known.decided_at
    _know(store, id, row, Known(state="cancelled", reason=reason, decided_at=decided_at), reason)


def _is_unserved_for_long(store: ReferenceStore, id: UUID, row: Row) -> bool:
    """Whether it, or another one of its operation, was only released since it became due, and it was never tried."""
    due_before = store.clock() - CANCEL_UNSERVED_AFTER
    if row.first_leased_at is not None or row.attempts or (row.waiting_since or row.due_at) > due_before:
        return False
    entry = store.entries[id]
    alike = [
        other
        for other_id, other in store.queue.items()
        if (store.entries[other_id].destination, store.entries[other_id].operation)
        == (entry.destination, entry.operation)
        and other.waiting_since is not None
        and other.waiting_since <= due_before
    ]
    return read_outcome(row.outcome).is_unserved or any(read_outcome(other.outcome).is_unserved for other in alike)


def retry(store: ReferenceStore, id: UUID) -> None:
    """Make a waiting entry due now; not while "send again" waits for earlier senders, nor after another of its group."""
    row = store.queue.get(id)
    if row is None or row.state not in WAITING or (row.state == "pending" and row.maybe_sent) or row.is_blocked:
        raise Refused
    known = read_outcome(row.outcome).known
    if known is not None and known.attempts is None:  # an operator has decided
        raise Refused
    row.due_at = store.clock()
    store.events.append(Event(id, "decision", "asked"))


def release_group(store: ReferenceStore, ordering_key: str, reason: str) -> None:
    """Release a blocked group."""
    block = store.blocked_group.pop(ordering_key, None)
    if block is None:
        raise Refused
    advance(store, ordering_key, 0)
    store.events.append(Event(block.entry_id, "decision", reason))


# --- destinations


def pause(store: ReferenceStore, destination: str) -> None:
    """Have nothing more claimed of it."""
    row = store.flow.get(destination, FlowState())
    store.flow[destination] = replace(row, paused=True, resumed_at=None)


def resume(store: ReferenceStore, destination: str) -> None:
    """Resume it at once: without pause, cooldown or breaker; what is used up of its rate and its permits stays so."""
    row, now = store.flow.get(destination, FlowState()), store.clock()
    if row.breaker == "closed" and closed_until(row, now) is None:
        raise Refused
    kept = {name: getattr(row, name) for name in ("rate_at", "rate_per_second", "permits_taken", "max_permits")}
    store.flow[destination] = FlowState(resumed_at=now, **kept)


def _know(store: ReferenceStore, id: UUID, row: Row, known: Known, decision: str) -> None:
    row.outcome = write_outcome(known.reason or "", stored=read_outcome(row.outcome).stored, known=known)
    row.known = store.entries[id].destination
    row.due_at = store.clock()
    store.events.append(Event(id, "decision", decision))
