"""Claim and settle in plain SQL, for databases without arrays and UPDATE ... RETURNING: a few statements for a batch.

`claims_postgresql` explains the rules, which are equal. The same tests run for both modules.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Column, Connection, Table, delete, exists, func, insert, literal, or_, select, update

from dispatchers.flow_control.fair_share import NO_CURSOR, FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store import callback_registry
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.claimed_row import claimed_entry
from dispatchers.store.fair_share import claimable_at, read_backlog
from dispatchers.store.flow_control import is_throttled
from dispatchers.store.queue_update import QueueUpdate, Unsettled, queue_update
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Ending, Settle
from outbox.sql.dialect import change_in_order, clock, database_now
from outbox.sql.schema import SCHEMA_VERSION, Tables
from outbox.times import NEVER, Instant


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
    """Lock the oldest due entries first, then read them: a lock on a join would lock the entries' own rows too."""
    queue = tables.queue
    allowed = [] if request.only is None else [queue.c.id.in_(request.only)]
    due = (
        select(queue.c.id)
        .where(*claimable_at(queue, quota, request.cutoff, now, scope), *_served(tables, request), *allowed)
        .where(or_(queue.c.callback.is_(None), queue.c.callback.in_(sorted(request.callbacks))))
        .order_by(queue.c.due_at)
        .limit(quota.permits)
        .with_for_update(skip_locked=True)
    )
    ids = connection.execute(due).scalars().all()
    if not ids:
        return []
    entry, record, settlement = tables.entry, tables.record, tables.settlement
    accepted = (record.c.id == entry.c.record_id) & (record.c.state == "accepted")
    locked = (
        select(*_read(tables), record.c.completion, settlement.c.state.label("ended"))
        .join(entry, entry.c.id == queue.c.id)
        .outerjoin(record, accepted)
        .outerjoin(settlement, settlement.c.id == queue.c.id)
        .where(queue.c.id.in_(ids))
    )
    rows = {row[queue.c.id]: row for row in connection.execute(locked).mappings()}
    return _lease(connection, tables, [rows[id] for id in ids if id in rows], request, now)


_OF_QUEUE = (
    *("id", "destination", "due_at", "first_leased_at", "leased_at", "lease_token", "deliveries", "attempts"),
    *("maybe_sent", "in_doubt_since", "key_epoch", "sent_as", "ordering_key", "position", "outcome"),
)


def _read(tables: Tables) -> list[Column[Any]]:
    """What a claim needs of the queue's row and of the entry. Pure drivers take long to decode a column."""
    return [*(tables.queue.c[name] for name in _OF_QUEUE), *_of_entry(tables)]


def _of_entry(tables: Tables) -> list[Column[Any]]:
    """The fields of a claimed entry that its own row has; its due time is the one with which it was enqueued."""
    own = tables.entry.c
    return [own[name] for name in ClaimedEntry._fields if name in own and (name == "due_at" or name not in _OF_QUEUE)]


def _served(tables: Tables, request: ClaimRequest) -> list[Any]:
    """The condition that this process may serve the entry: see `ClaimRequest.unserved`."""
    entry, queue = tables.entry, tables.queue
    if request.unserved is None:
        return []
    unserved = or_(entry.c.operation.in_(request.unserved), entry.c.schema_version > SCHEMA_VERSION)
    return [or_(queue.c.outcome.like(CANCELLED_PATTERN), ~exists().where(entry.c.id == queue.c.id, unserved))]


def _is_suspended(tables: Tables) -> Any:
    return exists().where(tables.meta.c.suspended_reason.is_not(None))


def _throttled(connection: Connection, tables: Tables, request: ClaimRequest, now: Any) -> set[str]:
    names = [quota.destination for quota in request.quotas if not quota.admitted]
    rows = select(tables.destination.c.name).where(tables.destination.c.name.in_(names), is_throttled(tables, now))
    return set(connection.execute(rows).scalars())


def _lease(
    connection: Connection, tables: Tables, rows: Sequence[Mapping[Any, Any]], request: ClaimRequest, now: datetime
) -> list[ClaimedEntry]:
    """Lease these locked rows. One statement for all whose new values are equal, or follow from their old ones."""
    queue = tables.queue
    leases = {row[queue.c.id]: _new_lease(tables, row, request, now) for row in rows}
    alike: dict[_Lease, list[UUID]] = {}
    for id, lease in leases.items():
        alike.setdefault(lease, []).append(id)
    for lease, ids in alike.items():
        values = {
            "state": "sending",
            "lease_token": request.token,
            "lease_until": now + request.lease,
            "leased_at": now,
            "first_leased_at": func.coalesce(queue.c.first_leased_at, literal(now, Instant)),
            "deliveries": queue.c.deliveries + 1,
            "attempts": queue.c.attempts + int(lease.taken_over),
            "maybe_sent": lease.maybe_sent,
            "in_doubt_since": lease.in_doubt_since,
            "sent_as": lease.sent_as,
        }
        connection.execute(update(queue).where(queue.c.id.in_(ids)).values(values))
    return [_claimed(tables, row, leases[row[queue.c.id]], request, now) for row in rows]


class _Lease(NamedTuple):
    taken_over: bool
    maybe_sent: bool
    in_doubt_since: datetime | None
    sent_as: str | None


def _new_lease(tables: Tables, row: Mapping[Any, Any], request: ClaimRequest, now: datetime) -> _Lease:
    queue = tables.queue
    taken_over = row[queue.c.lease_token] is not None
    in_doubt_since = row[queue.c.in_doubt_since] or (row[queue.c.leased_at] if taken_over else None)
    form = _form(request.forms, row[tables.entry.c.operation])
    sent_as = (in_doubt_since and row[queue.c.sent_as]) or form
    return _Lease(taken_over, row[queue.c.maybe_sent] or taken_over, in_doubt_since, sent_as)


def _claimed(
    tables: Tables, row: Mapping[Any, Any], lease: _Lease, request: ClaimRequest, now: datetime
) -> ClaimedEntry:
    queue = tables.queue
    kept_names = ("id", "destination", "key_epoch", "outcome", "ordering_key", "position")
    values = {name: row[queue.c[name]] for name in kept_names} | lease._asdict()
    values |= {column.name: row[column] for column in _of_entry(tables)}
    values |= {
        "queued_at": row[queue.c.due_at],
        "first_leased_at": row[queue.c.first_leased_at] or now,
        "leased_at": now,
        "deliveries": row[queue.c.deliveries] + 1,
        "attempts": row[queue.c.attempts] + lease.taken_over,
        "completion": row[tables.record.c.completion],
        "ended": row["ended"],
    }
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
    now = database_now(connection)
    ended = [(entry, change) for entry, change in settlements if isinstance(change, Settle)]
    moved = [
        entry.id
        for entry, change in settlements
        if not isinstance(change, Settle) and _move(connection, tables, entry, change, now)
    ]
    return _end(connection, tables, ended, now) | set(moved)


def _proven(tables: Tables, key_epoch: int) -> Any:
    """The condition under which proof of success is accepted after the lease: the key is the same."""
    queue = tables.queue
    return (queue.c.key_epoch == key_epoch) & queue.c.state.in_(("sending", "retry", "uncertain"))


def _move(connection: Connection, tables: Tables, entry: ClaimedEntry, change: Unsettled, now: datetime) -> bool:
    queue = tables.queue
    values = queue_update(entry, change)
    ours = (queue.c.lease_token == entry.lease_token) & ~_is_suspended(tables)
    ours = or_(ours, _proven(tables, entry.key_epoch)) if values.proof else ours
    changing = change_in_order(update(queue).where(queue.c.id == entry.id, ours), _row(queue, values, now))
    updated = connection.execute(changing)
    if updated.rowcount and values.reason is not None:
        noted = _note(entry, values.reason, now, by_lookup=values.by_lookup)
        connection.execute(insert(tables.event).values(noted))
    return bool(updated.rowcount)


def _end(
    connection: Connection, tables: Tables, ended: Sequence[tuple[ClaimedEntry, Settle]], now: datetime
) -> set[UUID]:
    """Delete the queue rows of all entries of one claim with one statement, then insert the settlements."""
    queue = tables.queue
    changes = {entry.id: (entry, change) for entry, change in ended}
    alike: dict[tuple[UUID, int, bool], list[UUID]] = {}
    for entry, change in ended:
        alike.setdefault((entry.lease_token, entry.key_epoch, change.state == "delivered"), []).append(entry.id)
    settled: list[dict[str, Any]] = []
    for (token, key_epoch, is_proof), ids in alike.items():
        ours = (queue.c.lease_token == token) & ~_is_suspended(tables)
        ours = or_(ours, _proven(tables, key_epoch)) if is_proof else ours
        gone = delete(queue).where(queue.c.id.in_(ids), ours)
        rows = connection.execute(gone.returning(queue.c.id, queue.c.deliveries, queue.c.attempts, queue.c.key_epoch))
        settled += [_settlement(row._asdict(), changes[row.id][1], now) for row in rows]
    if settled:
        connection.execute(insert(tables.settlement), settled)
    ids_settled = {row["id"] for row in settled}
    notes = [
        _note(entry, change.reason, now, by_lookup=change.looked_up)
        for entry, change in ended
        if change.note is not None and entry.id in ids_settled
    ]
    if notes:
        connection.execute(insert(tables.event), notes)
    return ids_settled


def _settlement(row: Mapping[str, Any], change: Settle, now: datetime) -> dict[str, Any]:
    return {
        **row,
        "state": change.state,
        "result": None if change.result is None else json.dumps(change.result),
        "reason": change.reason,
        "attempts": max(row["attempts"], change.attempts),
        "settled_at": now,
    }


def _row(queue: Table, values: QueueUpdate, now: datetime) -> dict[str, Any]:
    """The new values of the queue row, in the order in which they are set. Other columns keep their values."""
    released = func.coalesce(queue.c.waiting_since, queue.c.due_at)
    row = {
        "waiting_since": released if values.uncounted else None,
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
    if values.resets_age:
        row["first_leased_at"] = None
    if values.outcome is not None:
        row["outcome"] = values.outcome
    return row


def _note(entry: ClaimedEntry, reason: str | None, now: datetime, *, by_lookup: bool) -> dict[str, Any]:
    kind = "lookup" if by_lookup else "attempt"
    return {"entry_id": entry.id, "at": now, "kind": kind, "delivery": entry.deliveries, "reason": reason}
