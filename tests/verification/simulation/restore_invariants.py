"""The invariants of a restored database: nothing is claimed of it until an operator resumes.

What was sent since the backup is still known here, so the other invariants are checked against that too.
"""

from copy import copy
from dataclasses import replace
from uuid import UUID

from dispatchers.transitions import ClaimedEntry
from simulation.trace import Send, Trace, Truth


class RestoreInvariants:
    """Keeps what the database has of each trace, so that it can be set back with it; what happened cannot be."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._is_set_back = False
        self._set_back_at = 0.0
        self._kept: dict[UUID, Trace] = {}

    def backup(self) -> None:
        self._kept = {id: replace(trace, reported=copy(trace.reported)) for id, trace in self._truth.traces.items()}

    def restored(self) -> None:
        self._truth.note("the database is set back")
        self._is_set_back = True
        self._set_back_at = self._truth.world.now
        for id, trace in self._truth.traces.items():
            kept = self._kept.get(id, Trace())
            trace.lease, trace.deliveries, trace.reported = kept.lease, kept.deliveries, copy(kept.reported)
            trace.was_in_doubt, trace.in_doubt = kept.was_in_doubt, kept.in_doubt
            trace.is_cancelled_by_app = kept.is_cancelled_by_app
            trace.sends_before = len(trace.sends)  # no dispatcher can count those that were lost
            trace.was_set_back = True
            row = self._truth.store.queue.get(id)
            if id not in self._truth.store.entries:
                self._forget(trace, 0)
            elif row is not None:
                self._forget(trace, row.key_epoch + 1)

    def _forget(self, trace: Trace, epoch: int) -> None:
        """That it was sent under this key, or a later one, is beyond what anyone can know: the key is lost with the rest.

        Likewise of an entry that is lost itself, should it be asked for once more.
        """
        trace.late_effects = sum(count for each, count in trace.effects.items() if each >= epoch)
        for send in trace.sends:
            if send.claimed.key_epoch >= epoch:
                send.harmless = send.too_late = send.is_forgotten = True

    def is_countable(self, send: Send) -> bool:
        """Whether a dispatcher can count it: not if a restore took its claim, a moment before it was sent."""
        return self._truth.instant(send.claimed.leased_at) >= self._set_back_at

    def resumed(self) -> None:
        self._truth.note("an operator resumes")
        self._is_set_back = False
        for id, row in self._truth.store.queue.items():
            trace = self._truth.trace(id)
            trace.was_in_doubt, trace.in_doubt = row.maybe_sent, (row.key_epoch, row.in_doubt_since)
            if row.callback is not None:
                # A process that has the callback may claim it at once: nothing is sent, and the earlier holder cannot settle it.
                trace.lease = None

    def claimed(self, entries: list[ClaimedEntry]) -> None:
        for entry in entries:
            self._truth.require(not self._is_set_back, entry.id, "claimed of a database that was set back")
