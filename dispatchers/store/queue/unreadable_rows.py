"""Suspends or removes queue rows that can neither be sent nor settled, so that they do not stop the dispatchers."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, and_, case, delete, func, insert, or_, select, update

from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.transitions import ClaimedEntry
from outbox.sql.clock import clock
from outbox.sql.ordering import Place, advance_unlocked
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import change_in_order
from outbox.times import NEVER


class Removed(NamedTuple):
    """ended: the entries that were removed from the queue, with the states of their settlements.

    locked: the entries that could not be removed, because another transaction has locked the next entry of their group.
    """

    ended: dict[UUID, str]
    locked: list[ClaimedEntry]


def remove_ended(connection: Connection, tables: Tables, claimed: Sequence[ClaimedEntry]) -> Removed:
    """Remove the claimed entries that have a settlement from the queue: the settlement is valid, so they are not sent again."""
    queue, settlement = tables.queue, tables.settlement
    found = select(queue.c.id, settlement.c.state).join(settlement, settlement.c.id == queue.c.id)
    ours = or_(*(and_(queue.c.id == entry.id, queue.c.lease_token == entry.lease_token) for entry in claimed))
    states = {row.id: row.state for row in connection.execute(found.where(ours).with_for_update(of=queue))}
    # These rows are locked now, so this transaction sees all entries that they block.
    places = {
        Place(entry.ordering_key, entry.position): entry
        for entry in claimed
        if entry.id in states and entry.ordering_key is not None and entry.position is not None
    }
    locked = [places[place] for place in advance_unlocked(connection, tables, [*places])]
    for entry in locked:
        del states[entry.id]
    if states:
        connection.execute(delete(queue).where(queue.c.id.in_(states)))
        events = [
            {"entry_id": id, "kind": "attempt", "reason": f"it was in the queue although it had ended as {state}"}
            for id, state in states.items()
        ]
        connection.execute(insert(tables.event).values(at=clock()), events)
    return Removed(states, locked)


def candidates(
    connection: Connection, *, tables: Tables, request: ClaimRequest, max_rows: int, page: int
) -> list[UUID]:
    """A page of the entries that may be claimed, oldest first. Only ids, because any other column may be unreadable."""
    queue, now = tables.queue, clock()
    found = (
        select(queue.c.id)
        .where(
            queue.c.destination.in_([quota.destination for quota in request.quotas]),
            queue.c.due_at <= now,
            or_(queue.c.lease_until.is_(None), queue.c.lease_until < now),
        )
        .order_by(queue.c.due_at, queue.c.id)
        .limit(max_rows)
        .offset(page * max_rows)
    )
    return list(connection.execute(found).scalars())


def set_aside(connection: Connection, tables: Tables, id: UUID, reason: str) -> bool:
    """Suspend an entry that cannot be claimed, until an operator releases it. If it was leased, it may have been sent."""
    queue = tables.queue
    is_free = or_(queue.c.lease_until.is_(None), queue.c.lease_until < clock())
    was_leased = queue.c.lease_token.is_not(None)
    values = {
        "state": case((was_leased, "uncertain"), else_=queue.c.state),
        "maybe_sent": or_(queue.c.maybe_sent, was_leased),
        "in_doubt_since": case(
            (was_leased, func.coalesce(queue.c.in_doubt_since, queue.c.leased_at)), else_=queue.c.in_doubt_since
        ),
    }
    setting = change_in_order(update(queue).where(queue.c.id == id, is_free), values | _suspended(reason))
    return bool(connection.execute(setting).rowcount)


def set_aside_claimed(connection: Connection, tables: Tables, entry: ClaimedEntry, reason: str) -> bool:
    """Suspend an entry whose outcome cannot be stored, if its lease is still valid. The entry is uncertain."""
    queue = tables.queue
    values = {
        "state": "uncertain",
        "maybe_sent": True,
        "in_doubt_since": func.coalesce(queue.c.in_doubt_since, queue.c.leased_at),
    }
    ours = (queue.c.id == entry.id) & (queue.c.lease_token == entry.lease_token)
    setting = change_in_order(update(queue).where(ours), values | _suspended(reason))
    return bool(connection.execute(setting).rowcount)


def _suspended(reason: str) -> dict[str, object]:
    return {"suspended_reason": reason, "due_at": NEVER, "lease_token": None, "lease_until": None, "leased_at": None}
