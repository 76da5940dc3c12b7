"""Groups in the reference store: which may leave, and what an end does to those after it."""

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from dispatchers.store.queue import queue_update
from dispatchers.store.queue.ordering import MOMENT
from dispatchers.transitions import ClaimedEntry, Ending, MarkUncertain, Release, RetryCallback, Settle, Transition
from outbox.times import NEVER
from simulation.reference_rows import WAITING, Block, Row, Tables


def sort_out(tables: Tables, claimed: Sequence[ClaimedEntry]) -> list[Ending]:
    """Those of the claims that must wait, each with how it is released; an entry whose outcome is known need not wait."""
    return [
        (entry, wait)
        for entry in claimed
        if entry.position is not None and entry.outcome.known is None
        if (wait := _wait(tables, entry)) is not None
    ]


def _wait(tables: Tables, entry: ClaimedEntry) -> Release | None:
    """Why it may not go yet, and until when.

    The transaction that takes the head out makes the next one due; a head that is just being taken out does not know
    of this one.
    """
    block = tables.blocked_group.get(entry.ordering_key or "")
    if block is not None and _is_after(tables, entry, block):
        return Release(f"it waits after {block.entry_id}", None)
    head = _head(tables, entry.ordering_key)
    if head == entry.id:
        return None
    if head in tables.locked:
        return Release(f"it waits after {head}", MOMENT)
    _unblock(tables, head, NEVER)
    return Release(f"it waits after {head}", None)


def _is_after(tables: Tables, entry: ClaimedEntry, block: Block) -> bool:
    """The one that blocked the group, and those before it, may be sent again when an operator decides so."""
    blocking = tables.queue.get(block.entry_id)
    return blocking is None or _position(tables.queue[entry.id]) > _position(blocking)


def _head(tables: Tables, ordering_key: str | None) -> UUID:
    """The first that is not uncertain."""
    return next(id for id, row in _group(tables, ordering_key) if row.state != "uncertain")


def _group(tables: Tables, ordering_key: str | None) -> list[tuple[UUID, Row]]:
    rows = [(id, row) for id, row in tables.queue.items() if row.ordering_key == ordering_key]
    return sorted(rows, key=lambda item: _position(item[1]))


def _position(row: Row) -> int:
    return row.position or 0


# --- what an end does to its group


def next_is_locked(tables: Tables, entry: ClaimedEntry, change: Transition, seen: Collection[UUID] | None) -> bool:
    """Whether it would leave its group now, and another transaction has locked the row of the next one."""
    if entry.ordering_key is None or entry.position is None or _blocks(change) or not _leaves(entry, change):
        return False
    return _following(tables, entry.ordering_key, entry.position, seen) in tables.locked


def advance_groups(tables: Tables, settled: Sequence[Ending], cutoff: datetime, seen: Collection[UUID] | None) -> None:
    """After the settling: block the groups of what ended badly, let the next of the others come.

    seen: what the transaction can see of the queue; None for all of it.
    """
    left: list[tuple[str, int]] = []
    for entry, change in settled:
        if entry.ordering_key is None or entry.position is None:
            continue
        if _blocks(change):
            tables.blocked_group[entry.ordering_key] = Block(entry.id, change.reason or "it failed")
        elif _leaves(entry, change):
            block = tables.blocked_group.get(entry.ordering_key)
            if isinstance(change, Settle) and change.state == "delivered" and block and block.entry_id == entry.id:
                del tables.blocked_group[entry.ordering_key]
            left.append((entry.ordering_key, entry.position))
    for ordering_key, position in sorted(left):
        advance(tables, ordering_key, position, cutoff, seen)


def _blocks(change: Transition) -> bool:
    """One that failed, or that became uncertain, also if its callback is yet to run."""
    end = change.end if isinstance(change, RetryCallback) and isinstance(change.end, MarkUncertain) else change
    is_bad = isinstance(end, MarkUncertain) or (isinstance(end, Settle) and end.state == "failed")
    return is_bad and end.failure_blocks_group  # type: ignore[union-attr]  # both have it


def _leaves(entry: ClaimedEntry, change: Transition) -> bool:
    return isinstance(change, Settle) or queue_update.queue_update(entry, change).state == "uncertain"


def advance(
    tables: Tables,
    ordering_key: str | None,
    position: int,
    cutoff: datetime = NEVER,
    seen: Collection[UUID] | None = None,
) -> None:
    """Make the next one after this place due, if it is blocked."""
    following = _following(tables, ordering_key, position, seen)
    if following is not None:
        _unblock(tables, following, cutoff)


def _following(
    tables: Tables, ordering_key: str | None, position: int, seen: Collection[UUID] | None = None
) -> UUID | None:
    """The next one that waits after this place."""
    after = (id for id, row in _group(tables, ordering_key) if _position(row) > position and row.state in WAITING)
    return next((id for id in after if seen is None or id in seen), None)


def _unblock(tables: Tables, id: UUID, cutoff: datetime) -> None:
    row = tables.queue[id]
    if row.is_blocked:
        row.due_at = max(tables.entries[id].created_at, min(tables.clock(), cutoff))
