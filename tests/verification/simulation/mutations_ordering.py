"""The guards of groups, each removed by itself."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from dispatchers import decide, decide_lookup
from dispatchers.time_limits import Memory
from dispatchers.transitions import ClaimedEntry, Ending, MarkUncertain, Release, Settle, Transition
from simulation import reference
from simulation import reference_operators as reference_people
from simulation import reference_ordering as reference_ordering
from simulation.database import Database
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


def blocked_permanently(original: Any, tables: Any, entry: ClaimedEntry) -> Release | None:
    """Also after a head that is just being taken out."""
    wait: Release | None = original(tables, entry)
    return wait and Release(wait.reason, None)


def first_of_all(tables: Any, ordering_key: str) -> Any:
    return reference_ordering._group(tables, ordering_key)[0][0]


def blocking_in_spite(change: Transition, memory: Memory) -> Transition:
    return change


def leaving_before_a_locked_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose next entry is locked leaves the group without making it due."""

    def advanced(original: Any, tables: Any, ordering_key: Any, position: int, *rest: Any) -> None:
        if reference_ordering._following(tables, ordering_key, position) not in tables.locked:
            original(tables, ordering_key, position, *rest)

    without(ReferenceStore, "must_be_postponed", lambda *arguments: False)(monkeypatch)
    around(reference_ordering, "advance", advanced)(monkeypatch)


def keyed_by_entry(original: Any, database: Database, settlements: Sequence[Ending], *rest: Any) -> Any:
    """Of two claims of one entry in one batch one is lost, so neither counts as settled, and the group stays as it is."""
    counts = Counter(entry.id for entry, _ in settlements)

    def advance_groups(tables: Any, settled: Any, *more: Any) -> None:
        reference_ordering.advance_groups(tables, [ending for ending in settled if counts[ending[0].id] < 2], *more)

    with patch.object(reference, "advance_groups", advance_groups):
        return original(database, settlements, *rest)


ORDERING_MUTANTS: dict[str, Patch] = {
    "two claims of one entry in a batch are taken for one": around(Database, "exchange", keyed_by_entry),
    "who is followed by a locked one leaves all the same": leaving_before_a_locked_entry,
    "the order within a group is not checked": without(reference, "sort_out", lambda tables, claimed: []),
    "a failed entry does not block its group": without(reference_ordering, "_blocks", blocking_only(MarkUncertain)),
    "an uncertain entry does not block its group": without(reference_ordering, "_blocks", blocking_only(Settle)),
    "a block keeps no entry waiting": without(reference_ordering, "_is_after", lambda tables, entry, block: False),
    "an end makes no next entry due": without(reference_ordering, "advance", lambda *arguments: None),
    "a cancellation makes no next entry due": without(reference, "advance", lambda *arguments: None),
    "a release makes no next entry due": without(reference_people, "advance", lambda *arguments: None),
    "what is delivered after all leaves its group blocked": around(reference, "advance_groups", never_lifted),
    "a head that is being taken out is waited for like any other": around(
        reference_ordering, "_wait", blocked_permanently
    ),
    "what is uncertain is waited for even after a release": without(reference_ordering, "_head", first_of_all),
    "what is absent does not wait for those that were let by": without(
        decide_lookup, "_may_be_overtaken", lambda *_: False
    ),
    "failure_blocks_group=False of an adapter is ignored": without(decide, "_in_group", blocking_in_spite),
}
