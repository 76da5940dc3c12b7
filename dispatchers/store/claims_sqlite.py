"""Claim and settle on SQLite, row by row in plain SQL: a statement costs no round trip there.

`claims_postgresql` explains the rules, which are equal. The same tests run for both modules.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, delete, exists, func, insert, or_, select, update

from dispatchers.flow_control.fair_share import NO_CURSOR, FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store import callback_registry
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.claimed_row import claimed_entry
from dispatchers.store.fair_share import claimable_at, read_backlog
from dispatchers.store.flow_control import is_throttled
from dispatchers.store.queue_update import QueueUpdate, queue_update
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Ending, Settle, Transition
from outbox.sql.dialect import clock, database_now
from outbox.sql.schema import SCHEMA_VERSION, Tables
from outbox.times import NEVER


def claim(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    rounds: FairCursor = NO_CURSOR,
    guards: object = None,
) -> list[ClaimedEntry]:
    """See `claims_postgresql.claim`. This one claims for each destination separately, and needs no guards."""
    stored = select(tables.meta.c.number).scalar_subquery()
    now, is_suspended, number = connection.execute(select(clock(), _is_suspended(tables), stored)).one()
    if is_suspended or (number or 0) < request.seen:
        return []
    claimed: list[ClaimedEntry] = []
    throttled = _throttled(connection, tables, request, now)
    for quota in request.quotas:
        left = request.entries_max - len(claimed)
        if left <= 0:
            break
        if quota.destination in throttled and not quota.admitted:
            continue
        quota = quota._replace(permits=min(quota.permits, left))
        if quota.destination in rounds:
            quota = quota._replace(due_from=rounds.due_from(quota))
            shared = _share_out(connection, tables, quota, request, now, rounds)
            claimed += shared
            quota = quota._replace(permits=quota.permits - len(shared))
        if quota.permits:
            claimed += _take(connection, tables, quota, request, now)
    return claimed


def _share_out(
    connection: Connection, tables: Tables, quota: Quota, request: ClaimRequest, now: Any, rounds: FairCursor
) -> list[ClaimedEntry]:
    backlog = read_backlog(connection, tables, quota, request.cutoff, now, rounds.after(quota.destination))
    claimed: list[ClaimedEntry] = []
    for scope, permits in rounds.share_out(quota, backlog).items():
        claimed += _take(connection, tables, quota._replace(permits=permits), request, now, scope)
    return claimed


def _take(
    connection: Connection, tables: Tables, quota: Quota, request: ClaimRequest, now: Any, scope: str | None = None
) -> list[ClaimedEntry]:
    queue, entry, record = tables.queue, tables.entry, tables.record
    accepted = (record.c.id == entry.c.record_id) & (record.c.state == "accepted")
    settlement = tables.settlement
    allowed = [] if request.only is None else [queue.c.id.in_(request.only)]
    due = (
        select(queue, entry, record.c.completion, settlement.c.state.label("ended"))
        .join(entry, entry.c.id == queue.c.id)
        .outerjoin(record, accepted)
        .outerjoin(settlement, settlement.c.id == queue.c.id)
        .where(*claimable_at(queue, quota, request.cutoff, now, scope), *_served(tables, request), *allowed)
        .where(or_(queue.c.callback.is_(None), queue.c.callback.in_(sorted(request.callbacks))))
        .order_by(queue.c.due_at)
        .limit(quota.permits)
        .with_for_update(of=queue, skip_locked=True)
    )
    rows = connection.execute(due).all()
    return [_lease(connection, tables, row._mapping, request, now) for row in rows]


def _served(tables: Tables, request: ClaimRequest) -> list[Any]:
    """The condition that this process may serve the entry: see `ClaimRequest.unserved`."""
    entry = tables.entry
    if request.unserved is None:
        return []
    served = entry.c.operation.not_in(request.unserved) & (entry.c.schema_version <= SCHEMA_VERSION)
    return [or_(tables.queue.c.outcome.like(CANCELLED_PATTERN), served)]


def _is_suspended(tables: Tables) -> Any:
    return exists().where(tables.meta.c.suspended_reason.is_not(None))


def _throttled(connection: Connection, tables: Tables, request: ClaimRequest, now: Any) -> set[str]:
    names = [quota.destination for quota in request.quotas if not quota.admitted]
    rows = select(tables.destination.c.name).where(tables.destination.c.name.in_(names), is_throttled(tables, now))
    return set(connection.execute(rows).scalars())


def _lease(
    connection: Connection, tables: Tables, row: Mapping[Any, Any], request: ClaimRequest, now: Any
) -> ClaimedEntry:
    queue, entry = tables.queue, tables.entry
    taken_over = row[queue.c.lease_token] is not None
    in_doubt_since = row[queue.c.in_doubt_since] or (row[queue.c.leased_at] if taken_over else None)
    lease = {
        "state": "sending",
        "lease_token": request.token,
        "lease_until": now + request.lease,
        "leased_at": now,
        "first_leased_at": row[queue.c.first_leased_at] or now,
        "deliveries": row[queue.c.deliveries] + 1,
        "attempts": row[queue.c.attempts] + taken_over,
        "maybe_sent": row[queue.c.maybe_sent] or taken_over,
        "in_doubt_since": in_doubt_since,
        "sent_as": (in_doubt_since and row[queue.c.sent_as]) or _form(request.forms, row[entry.c.operation]),
    }
    connection.execute(update(queue).where(queue.c.id == row[queue.c.id]).values(lease))
    written = {name: row[entry.c[name]] for name in ClaimedEntry._fields if name in entry.c}
    kept_names = ("id", "destination", "key_epoch", "outcome", "ordering_key", "position")
    kept = {name: row[queue.c[name]] for name in kept_names}
    leased = {name: value for name, value in lease.items() if name in ClaimedEntry._fields}
    more = {"queued_at": row[queue.c.due_at], "completion": row[tables.record.c.completion], "ended": row["ended"]}
    values = written | kept | leased | more
    return claimed_entry([values[name] for name in ClaimedEntry._fields[:-1]], request.token)


def _form(forms: Mapping[str, str], operation: str) -> str | None:
    serving = [prefix for prefix in forms if f"{operation}.".startswith(f"{prefix}.")]
    return forms[max(serving, key=len)] if serving else None


def settle(
    connection: Connection,
    tables: Tables,
    settlements: Sequence[Ending],
    guards: object = None,
    callbacks: str | None = None,
) -> set[UUID]:
    """See `claims_postgresql.settle`. It needs no guards here."""
    if callbacks is not None and callbacks != callback_registry.summary(callback_registry.read(connection, tables)):
        return set()
    return {entry.id for entry, change in settlements if _settle_one(connection, tables, entry, change)}


def _settle_one(connection: Connection, tables: Tables, entry: ClaimedEntry, change: Transition) -> bool:
    queue = tables.queue
    ours = (queue.c.lease_token == entry.lease_token) & ~_is_suspended(tables)
    late = (queue.c.key_epoch == entry.key_epoch) & queue.c.state.in_(("sending", "retry", "uncertain"))
    if isinstance(change, Settle):
        return _end(connection, tables, entry, change, or_(ours, late) if change.state == "delivered" else ours)
    values = queue_update(entry, change)
    ours = or_(ours, late) if values.proof else ours
    row = _row(queue, values, database_now(connection))
    updated = connection.execute(update(queue).where(queue.c.id == entry.id, ours).values(row))
    if updated.rowcount and values.reason is not None:
        _note(connection, tables, entry, values.reason, by_lookup=values.by_lookup)
    return bool(updated.rowcount)


def _end(connection: Connection, tables: Tables, entry: ClaimedEntry, change: Settle, ours: Any) -> bool:
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
    if change.note is not None:
        _note(connection, tables, entry, change.reason, by_lookup=change.looked_up)
    return True


def _row(queue: Table, values: QueueUpdate, now: datetime) -> dict[str, Any]:
    """The new values of the queue row. Other columns keep their values."""
    row = {
        "state": values.state,
        "due_at": NEVER if values.delay is None else now + values.delay,
        "lease_token": None,
        "lease_until": None,
        "leased_at": None,
        "deliveries": queue.c.deliveries
        - values.uncounted,  # relative: later deliveries may have been counted meanwhile
        "attempts": values.attempts,
        "maybe_sent": values.maybe_sent,
        "in_doubt_since": values.in_doubt_since,
        "key_epoch": values.key_epoch,
        "callback": values.callback,
    }
    released = func.coalesce(queue.c.waiting_since, queue.c.due_at)
    row["waiting_since"] = released if values.uncounted else None
    if values.resets_age:
        row["first_leased_at"] = None
    if values.outcome is not None:
        row["outcome"] = values.outcome
    return row


def _note(connection: Connection, tables: Tables, entry: ClaimedEntry, reason: str | None, *, by_lookup: bool) -> None:
    kind = "lookup" if by_lookup else "attempt"
    connection.execute(
        insert(tables.event).values(entry_id=entry.id, at=clock(), kind=kind, delivery=entry.deliveries, reason=reason)
    )
