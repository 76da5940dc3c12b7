"""The guards of claiming, sending, settling and cancelling, each removed by itself: bugs that the simulation must find."""

from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from verification.mutations_decide import RULE_MUTANTS, moving

from dispatchers import decide as rules
from dispatchers.callbacks import Callbacks
from dispatchers.delivery import Deferred, Outcome
from dispatchers.flow_control.quota import Quota
from dispatchers.pipeline import triage
from dispatchers.pipeline.attempt import Attempt, Batch
from dispatchers.pipeline.claim_loops import ClaimLoops
from dispatchers.pipeline.destinations import CallbackPace, Destination, Destinations
from dispatchers.pipeline.scheduler import Turns
from dispatchers.pipeline.triage import Triage
from dispatchers.transitions import ClaimedEntry, Release, RetryCallback, Settle, Transition
from simulation import scenario
from simulation.database import AppSession, Database, RemoteStore, Transaction
from simulation.mutants import Patch, around, without
from simulation.mutations_flow_control import FLOW_CONTROL_MUTANTS
from simulation.mutations_hints import HINT_MUTANTS
from simulation.mutations_lookup import LOOKUP_GUARDS
from simulation.mutations_ordering import ORDERING_MUTANTS
from simulation.mutations_restore import RESTORE_GUARDS
from simulation.mutations_tenants import TENANT_MUTANTS
from simulation.reference import ReferenceStore, _form
from simulation.reference_rows import Row
from simulation.run import BrokenRun, simulate
from simulation.seeds import FOUND_BY, SEEDS_TO_FIND
from simulation.trace import InvariantViolated

END_SECONDS = 600  # a run that ends in them shows an entry that never ends as well as one of an hour does

# --- claiming


def leased_on_paper(original: Any, store: ReferenceStore, id: UUID, *rest: Any) -> ClaimedEntry:
    """The claim is handed out, but never committed."""
    before = replace(store.queue[id])
    claimed: ClaimedEntry = original(store, id, *rest)
    store.queue[id] = before
    return claimed


def pinned_again(original: Any, store: ReferenceStore, id: UUID, request: Any, now: Any) -> ClaimedEntry:
    claimed: ClaimedEntry = original(store, id, request, now)
    store.queue[id].sent_as = form = _form(request, store.entries[id].operation)
    return claimed._replace(sent_as=form)


def uncounted(original: Any, store: ReferenceStore, id: UUID, *rest: Any) -> ClaimedEntry:
    claimed: ClaimedEntry = original(store, id, *rest)
    store.queue[id].deliveries -= 1
    return claimed._replace(deliveries=claimed.deliveries - 1)


def expired_without_an_attempt(store: ReferenceStore, row: Row) -> None:
    row.maybe_sent = True
    row.in_doubt_since = row.in_doubt_since or row.leased_at


def expired_without_doubt(store: ReferenceStore, row: Row) -> None:
    row.attempts += 1


def expired_now(store: ReferenceStore, row: Row) -> None:
    row.attempts += 1
    row.maybe_sent = True
    row.in_doubt_since = row.in_doubt_since or store.clock()


def same_token(original: Any, working: ClaimLoops, *rest: Any) -> Any:
    return replace(original(working, *rest), token=UUID(int=1))


# --- sending


def without_a_deadline(original: Any, *arguments: Any) -> Transition | None:
    refusal = original(*arguments)
    return None if isinstance(refusal, Release) else refusal


def sorted_late(original: Any, working: Triage, claimed: Any, claimed_at: float) -> Any:
    """The lease is taken to begin when the claim's answer comes, not before it is asked for."""
    return original(working, claimed, working._context.clock())


def sorted_without(name: str) -> Any:
    """The claims are sorted as if nothing of this kind had been stored for them."""

    def sort(original: Any, working: Triage, claimed: Any, started: float) -> Any:
        blank = [entry._replace(outcome=replace(entry.outcome, **{name: None})) for entry in claimed]
        return original(working, blank, started)

    return sort


def left_as_not_sent(original: Any, batch: Batch, outcome: Outcome) -> None:
    original(batch, Deferred("the call ended without its outcome"))


def failed_for_want_of_an_adapter(original: Any, working: Triage, entry: ClaimedEntry, route: Any) -> None:
    if route is None:
        working._end(entry, Settle("failed", entry.attempts, reason="no adapter serves it"))
    else:
        original(working, entry, route)


# --- settling


def any_end_is_proof(store: ReferenceStore, change: Transition, entry: ClaimedEntry) -> bool:
    return isinstance(change, Settle)


def begun_without_the_fence(store: RemoteStore, entry: ClaimedEntry, end: Any, callbacks: Any) -> Transaction:
    transaction = Transaction(store._database, entry, end)
    store._open.append(transaction)
    return transaction


def reported_at_once(session: AppSession, id: UUID, state: str) -> None:
    session._database.invariants.reported(id, state)


def unlocked(transaction: Transaction, database: Any, entry: ClaimedEntry, end: Any) -> None:
    """The entry is settled in another transaction than its callback's, before it."""
    transaction._database, transaction._entry, transaction._end = database, entry, end
    transaction._is_over, transaction.writes, transaction._seen = False, [], set(database.store.queue)
    database.open.append(transaction)
    database.settle(entry, end)


def conclude_at_once(original: Any, entry: ClaimedEntry, known: Any, memory: Any) -> Transition:
    change: Transition = original(entry, known, replace(memory, fencing_delay=timedelta(0)))
    return change


# --- cancelling


def cancelled_despite_doubt(store: ReferenceStore, row: Row) -> bool:
    return row.state in ("pending", "retry") and row.lease_token is None


def cancelled_despite_a_lease(store: ReferenceStore, row: Row) -> bool:
    return not row.maybe_sent


def callbacks_reserved_for_the_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quota takes as much of the total as it asks for; who finds nothing left has had its turn."""

    def free_of(original: Any, pace: CallbackPace, destination: Destination) -> int:
        return min(original(pace, destination), pace.free)

    def reserved(original: Any, destinations: Destinations, quota: Quota) -> Any:
        called = None if quota.called_back is None else quota.permits
        return original(destinations, quota._replace(called_back=called))

    around(CallbackPace, "free_of", free_of)(monkeypatch)
    around(Destinations, "reserve_quota", reserved)(monkeypatch)
    without(Turns, "hold", lambda turns, name: None)(monkeypatch)


GUARDED_TWICE = {
    # The deadline of the send, too, keeps an answer out that comes so late; the tables of `test_decide` find this one.
    "a conclusive rejection clears doubt past the window",
}

GUARDS: dict[str, Patch] = {
    **{name: patch for name, patch in RULE_MUTANTS.items() if name not in GUARDED_TWICE},
    "a claim is sent before it is committed": around(ReferenceStore, "_lease", leased_on_paper),
    "a lease is taken over while it lasts": without(ReferenceStore, "_is_free", lambda store, row, now: True),
    "an expired lease counts as no attempt": without(ReferenceStore, "_take_over", expired_without_an_attempt),
    "an expired lease leaves no doubt": without(ReferenceStore, "_take_over", expired_without_doubt),
    "doubt begins when the expired lease is found": without(ReferenceStore, "_take_over", expired_now),
    "a delivery is not counted at the claim": around(ReferenceStore, "_lease", uncounted),
    "the pin changes after a possible send": around(ReferenceStore, "_lease", pinned_again),
    "what a batch leaves without an outcome counts as not sent": around(Batch, "end_with", left_as_not_sent),
    "every claim bears the same token": around(ClaimLoops, "_request", same_token),
    "the lease is not checked before the call": around(Attempt, "refusal", without_a_deadline),
    "the lease is measured from the claim's answer": around(Triage, "sort", sorted_late),
    "what is on record is not heeded": around(Triage, "sort", sorted_without("known")),
    "an entry that awaits a status lookup is sent": around(Triage, "sort", sorted_without("lookup")),
    "an entry of a newer release is sent": without(triage, "SCHEMA_VERSION", 10**6),
    "an entry without an adapter fails": around(Triage, "_skip", failed_for_want_of_an_adapter),
    "the fence is gone": without(ReferenceStore, "_holds_lease", lambda store, row, entry: True),
    "a late failure is taken": without(ReferenceStore, "_is_proof", any_end_is_proof),
    "a release without an attempt counts as an attempt": moving(Release, uncounted=0),
    "a release without an attempt clears doubt": moving(Release, maybe_sent=False, in_doubt_since=None),
    "an end that waits for its callback is not found by its column": moving(RetryCallback, known=False),
    "a callback runs without the fence": without(RemoteStore, "_begin", begun_without_the_fence),
    "a callback that raised leaves what it wrote": without(AppSession, "add", reported_at_once),
    "a callback that only another process has is skipped": without(Callbacks, "missing", lambda *_: None),
    "the record of callbacks is read at the start only": without(Database, "is_changed", lambda *_: False),
    "an entry settles before its callback": without(Transaction, "__init__", unlocked),
    "send again does not wait for earlier senders": around(rules, "conclude", conclude_at_once),
    "what may have been sent is cancelled": without(ReferenceStore, "_may_be_cancelled", cancelled_despite_doubt),
    "what is being sent is cancelled": without(ReferenceStore, "_may_be_cancelled", cancelled_despite_a_lease),
    "an idle destination keeps what all with callbacks share": callbacks_reserved_for_the_idle,
    **LOOKUP_GUARDS,
    **ORDERING_MUTANTS,
    **FLOW_CONTROL_MUTANTS,
    **RESTORE_GUARDS,
    **TENANT_MUTANTS,
    **HINT_MUTANTS,
}


def first_broken(guard: str, *, begin_at: int | None = None) -> BrokenRun | None:
    """The run of a seed that breaks an invariant without this guard, if there is one. It begins at the recorded seed.

    With the guard, the same run breaks none within the same time.
    """
    begin_at = FOUND_BY.get(guard, 0) if begin_at is None else begin_at
    with patch.object(scenario, "END_SECONDS", END_SECONDS):
        for seed in (begin_at, *range(SEEDS_TO_FIND)):
            broken = _broken_without(guard, seed)
            if broken is not None and _is_sound(seed):
                return broken
    return None


def _broken_without(guard: str, seed: int) -> BrokenRun | None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        GUARDS[guard](monkeypatch)
        try:
            simulate(seed)
        except BrokenRun as broken:
            # Where the mutant makes the dispatcher raise, no invariant has shown it: another seed may.
            return broken if isinstance(broken.problem, InvariantViolated) else None
    return None


@cache
def _is_sound(seed: int) -> bool:
    try:
        simulate(seed)
    except BrokenRun:
        return False
    return True
