"""Claim and settle in plain SQL, row by row: SQLite's way, where a statement costs no round trip.

The same rules as `sql_postgresql`, which says why; one suite of tests runs over both.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, delete, insert, or_, select, update

from dispatchers.lifecycle import Claimed, ClaimRequest, HandBack, Settle, Settlement, Transition, Wait
from outbox.databases import clock
from outbox.schema import NEVER, Tables


def claim(connection: Connection, tables: Tables, request: ClaimRequest) -> list[Claimed]:
    """Lease the oldest due entries of each wanted destination; an expired lease is taken over, and leaves doubt."""
    now = connection.execute(select(clock())).scalar_one()
    queue, entry = tables.queue, tables.entry
    claimed: list[Claimed] = []
    for name, slots, hint in request.wants:
        due = (
            select(queue, entry)
            .join(entry, entry.c.id == queue.c.id)
            .where(
                queue.c.destination == name,
                queue.c.due_at >= hint,
                queue.c.due_at <= min(now, request.cutoff),
                or_(queue.c.lease_until.is_(None), queue.c.lease_until < now),
            )
            .order_by(queue.c.due_at)
            .limit(min(slots, request.entries_max - len(claimed)))
            .with_for_update(of=queue, skip_locked=True)
        )
        rows = connection.execute(due).all()
        claimed += [_lease(connection, tables, row._mapping, request, now) for row in rows]
    return claimed


def _lease(connection: Connection, tables: Tables, row: Mapping[Any, Any], request: ClaimRequest, now: Any) -> Claimed:
    queue, entry = tables.queue, tables.entry
    taken_over = row[queue.c.lease_token] is not None
    maybe_sent = row[queue.c.maybe_sent] or taken_over
    lease = {
        "state": "sending",
        "lease_token": request.token,
        "lease_until": now + request.lease,
        "leased_at": now,
        "first_leased_at": row[queue.c.first_leased_at] or now,
        "deliveries": row[queue.c.deliveries] + 1,
        "attempts": row[queue.c.attempts] + taken_over,
        "maybe_sent": maybe_sent,
        "in_doubt_since": row[queue.c.in_doubt_since] or (row[queue.c.leased_at] if taken_over else None),
        "sent_as": (maybe_sent and row[queue.c.sent_as]) or _form(request.forms, row[entry.c.operation]),
    }
    connection.execute(update(queue).where(queue.c.id == row[queue.c.id]).values(lease))
    written = {name: row[entry.c[name]] for name in Claimed._fields if name in entry.c}
    kept = {name: row[queue.c[name]] for name in ("id", "destination", "key_epoch")}
    leased = {name: value for name, value in lease.items() if name in Claimed._fields}
    return Claimed(**written | kept | leased, queued_at=row[queue.c.due_at])


def _form(forms: Mapping[str, str], operation: str) -> str | None:
    serving = [prefix for prefix in forms if f"{operation}.".startswith(f"{prefix}.")]
    return forms[max(serving, key=len)] if serving else None


def settle(connection: Connection, tables: Tables, settlements: Sequence[Settlement]) -> set[UUID]:
    """Record what became of claimed entries, each only if its lease is still ours; returns the ids for which it was.

    One exception: proof of success is taken late, from whoever brings it, while the key is the same.
    """
    return {entry.id for entry, change in settlements if _settle_one(connection, tables, entry, change)}


def _settle_one(connection: Connection, tables: Tables, entry: Claimed, change: Transition) -> bool:
    queue = tables.queue
    ours = queue.c.lease_token == entry.lease_token
    if isinstance(change, Settle):
        if change.state == "delivered":
            states = ("sending", "retry", "uncertain")
            ours = or_(ours, (queue.c.key_epoch == entry.key_epoch) & queue.c.state.in_(states))
        return _end(connection, tables, entry, change, ours)
    values = _moved(entry, change, connection.execute(select(clock())).scalar_one())
    moved = connection.execute(update(queue).where(queue.c.id == entry.id, ours).values(values))
    if moved.rowcount and not isinstance(change, HandBack):
        _note(connection, tables, entry, change.reason)
    return bool(moved.rowcount)


def _end(connection: Connection, tables: Tables, entry: Claimed, change: Settle, ours: Any) -> bool:
    queue = tables.queue
    ended = delete(queue).where(queue.c.id == entry.id, ours)
    row = connection.execute(ended.returning(queue.c.deliveries, queue.c.attempts, queue.c.key_epoch)).one_or_none()
    if row is None:
        return False
    connection.execute(
        insert(tables.settlement).values(
            id=entry.id,
            state=change.state,
            result=None if change.result is None else json.dumps(change.result),
            reason=change.reason,
            deliveries=row.deliveries,
            attempts=max(row.attempts, change.attempts),
            key_epoch=row.key_epoch,
            settled_at=clock(),
        )
    )
    if change.state == "failed":
        _note(connection, tables, entry, change.reason)
    return True


def _moved(entry: Claimed, change: Any, now: Any) -> dict[str, Any]:
    """The queue row's new values; what is not named stays."""
    unleased = {"lease_token": None, "lease_until": None, "leased_at": None}
    if isinstance(change, HandBack):
        # Given back as it was: nothing is counted, doubt stays what the claim found.
        back = {"due_at": now + change.delay, "deliveries": entry.deliveries - 1}
        if entry.deliveries == 1:
            return unleased | back | {"state": "pending", "first_leased_at": None}
        return unleased | back | {"state": "retry"}
    waits = isinstance(change, Wait)
    return unleased | {
        "state": "retry" if waits else "uncertain",
        "due_at": now + change.delay if waits else NEVER,
        "attempts": change.attempts,
        "maybe_sent": change.maybe_sent,
        "in_doubt_since": change.in_doubt_since,
        "outcome": json.dumps({"reason": change.reason}),
    }


def _note(connection: Connection, tables: Tables, entry: Claimed, reason: str | None) -> None:
    connection.execute(
        insert(tables.event).values(
            entry_id=entry.id, at=clock(), kind="attempt", delivery=entry.deliveries, reason=reason
        )
    )
