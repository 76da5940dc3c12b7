"""The guards of groups, each removed by itself."""

from typing import Any

import pytest

from dispatchers import decide, decide_lookup
from dispatchers.delivery import Memory
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, Settle, Transition
from simulation import reference
from simulation import reference_operators as reference_people
from simulation import reference_ordering as reference_ordering
from simulation.mutants import Patch, around, without
from simulation.reference import ReferenceStore


def blocking_only(kind: type[Any]) -> Any:
    """Only what failed, or only what is uncertain, blocks a group."""
    blocks = reference_ordering._blocks
    return lambda change: blocks(change) and isinstance(change, kind)


def never_lifted(original: Any, tables: Any, *rest: Any) -> None:
    before = dict(tables.blocked_group)
    original(tables, *rest)
    tables.blocked_group.update({key: block for key, block in before.items() if key not in tables.blocked_group})


def blocked_for_good(original: Any, tables: Any, entry: ClaimedEntry) -> Release | None:
    """Also behind a head that is just being taken out."""
    wait: Release | None = original(tables, entry)
    return wait and Release(wait.reason, None)


def first_of_all(tables: Any, ordering_key: str) -> Any:
    return reference_ordering._group(tables, ordering_key)[0][0]


def blocking_in_spite(change: Transition, memory: Memory) -> Transition:
    return change


def leaving_behind_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves passes over a next one that is locked, and goes all the same."""

    def advanced(original: Any, tables: Any, ordering_key: Any, position: int, *rest: Any) -> None:
        if reference_ordering._following(tables, ordering_key, position) not in tables.locked:
            original(tables, ordering_key, position, *rest)

    without(ReferenceStore, "must_be_postponed", lambda *arguments: False)(monkeypatch)
    around(reference_ordering, "advance", advanced)(monkeypatch)


ORDERING_MUTANTS: dict[str, Patch] = {
    "who is followed by a locked one leaves all the same": leaving_behind_a_lock,
    "nobody asks whose turn it is": without(reference, "sort_out", lambda tables, claimed: []),
    "a group goes on behind what failed": without(reference_ordering, "_blocks", blocking_only(MarkUncertain)),
    "a group goes on behind what is uncertain": without(reference_ordering, "_blocks", blocking_only(Settle)),
    "a block holds nobody back": without(reference_ordering, "_is_behind", lambda tables, entry, block: False),
    "what ends lets nobody come": without(reference_ordering, "advance", lambda *arguments: None),
    "what is cancelled lets nobody come": without(reference, "advance", lambda *arguments: None),
    "a release lets nobody come": without(reference_people, "advance", lambda *arguments: None),
    "what is delivered after all leaves its group blocked": around(reference, "leave", never_lifted),
    "a head that is being taken out is waited for like any other": around(
        reference_ordering, "_wait", blocked_for_good
    ),
    "what is uncertain is waited for even after a release": without(reference_ordering, "_head", first_of_all),
    "what is absent does not wait for those that were let by": without(
        decide_lookup, "_may_be_overtaken", lambda *_: False
    ),
    "an adapter's word that groups go on is not heeded": without(decide, "_in_group", blocking_in_spite),
}
