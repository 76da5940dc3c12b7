"""What a person decides, in the reference store. Everything raises `Refused` where the state does not allow it."""

import json
from dataclasses import replace
from typing import Any
from uuid import UUID

from dispatchers.decisions import Verdict
from dispatchers.lifecycle import SEND_AGAIN, Known, outcome_on_record
from dispatchers.pressure import Pressure, closed_until
from simulation.reference import ReferenceStore
from simulation.reference_lanes import advance
from simulation.reference_rows import WAITING, Event, Refused, Row


def resolve(store: ReferenceStore, id: UUID, verdict: Verdict, reason: str) -> None:
    """Put on record what becomes of an uncertain entry."""
    row = store.queue.get(id)
    if row is None or row.state != "uncertain":
        raise Refused
    state: Any = {"happened": "delivered", "did_not_happen": "failed", "send_again": SEND_AGAIN}[verdict]
    _know(store, id, row, Known(state=state, reason=reason), f"{verdict}: {reason}")


def cancel(store: ReferenceStore, id: UUID, reason: str) -> None:
    """Have a waiting entry cancelled by a dispatcher, callback included."""
    row = store.queue.get(id)
    if row is None or not store._may_be_cancelled(row):
        raise Refused
    _know(store, id, row, Known(state="cancelled", reason=reason), reason)


def retry(store: ReferenceStore, id: UUID) -> None:
    """Make a waiting entry due now; not while "send again" waits for earlier senders, nor behind another of its lane."""
    row = store.queue.get(id)
    if row is None or row.state not in WAITING or (row.state == "pending" and row.maybe_sent) or row.is_blocked:
        raise Refused
    row.due_at = store.clock()
    store.events.append(Event(id, "decision", "to be tried now"))


def release_lane(store: ReferenceStore, ordering_key: str, reason: str) -> None:
    """Let a lane go on that is halted."""
    halt = store.halted.pop(ordering_key, None)
    if halt is None:
        raise Refused
    advance(store, ordering_key, 0)
    store.events.append(Event(halt.entry_id, "decision", reason))


# --- destinations


def pause(store: ReferenceStore, destination: str) -> None:
    """Have nothing more claimed of it."""
    row = store.pressure.get(destination, Pressure())
    store.pressure[destination] = replace(row, paused=True, resumed_at=None)


def resume(store: ReferenceStore, destination: str) -> None:
    """Let it go on at once: without pause, cool-down or breaker; what is used up of its rate and its slots stays so."""
    row, now = store.pressure.get(destination, Pressure()), store.clock()
    if row.breaker == "closed" and closed_until(row, now) is None:
        raise Refused
    kept = {name: getattr(row, name) for name in ("rate_at", "rate_per_second", "slots_taken", "slots_max")}
    store.pressure[destination] = Pressure(resumed_at=now, **kept)


def _know(store: ReferenceStore, id: UUID, row: Row, known: Known, told: str) -> None:
    stored = json.loads(row.outcome or "{}").get("stored", False)
    row.outcome = outcome_on_record(known.reason or "", stored=stored, known=known)
    row.due_at = store.clock()
    store.events.append(Event(id, "decision", told))
