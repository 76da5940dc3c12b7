"""Claim and settle in plain SQL, for databases without arrays and UPDATE ... RETURNING: a few statements for a batch. For
MariaDB `claims_mariadb` has these statements as text.

`claims_postgresql` explains the rules, which are equal. The same tests run for both modules.
"""

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Column,
    Connection,
    Select,
    Table,
    Update,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from dispatchers.flow_control.fair_share import NO_CURSOR, FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store import callback_registry, claims_mariadb
from dispatchers.store.claim_request import ClaimRequest
from dispatchers.store.claimed_row import Lease, LockedRow, leased_entry
from dispatchers.store.fair_share import claimable_at, read_backlog
from dispatchers.store.flow_control import is_throttled
from dispatchers.store.queue_update import QueueUpdate, Unsettled, queue_update
from dispatchers.store.transactions import CONFLICTED
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Ending, Settle
from outbox.sql.clock import clock, database_now
from outbox.sql.column_types import Instant
from outbox.sql.dialect import Writes, dialect_of
from outbox.sql.schema import SCHEMA_VERSION, Tables
from outbox.sql.statements import change_in_order
from outbox.times import NEVER

CANDIDATES = 4  # for each entry that is claimed in the portable mode after a conflict


def claim(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    rounds: FairCursor = NO_CURSOR,
    guards: object = None,
) -> list[ClaimedEntry]:
    """See `claims_postgresql.claim`. This one claims for each destination separately, and needs no guards."""
    now, quotas = _allowed(connection, tables, request, rounds)
    claimed: list[ClaimedEntry] = []
    callbacks_left = request.max_callbacks
    for quota in quotas:
        before, left = len(claimed), request.max_entries - len(claimed)
        is_called = quota.called_back is not None
        quota = quota._replace(permits=min(quota.permits, left, callbacks_left if is_called else left))
        if quota.permits <= 0:
            continue
        if quota.destination in rounds and not quota.known:
            quota = quota._replace(due_from=rounds.due_from(quota))
            shared = _share_out(connection, tables, quota, request, now, rounds)
            claimed += shared
            quota = quota._replace(permits=quota.permits - len(shared))
        if quota.permits:
            claimed += _take(connection, tables, quota, request, now)
        callbacks_left -= (len(claimed) - before) * is_called
    return claimed


def _allowed(
    connection: Connection, tables: Tables, request: ClaimRequest, rounds: FairCursor
) -> tuple[datetime, Sequence[Quota]]:
    """The clock, and the quotas for which entries may be claimed."""
    if (
        dialect_of(connection).writes is Writes.COMPOUND
    ):  # each statement that claims reads the clock itself, and checks this
        is_fair = any(quota.destination in rounds for quota in request.quotas)
        return database_now(connection) if is_fair else NEVER, request.quotas
    stored = select(tables.meta.c.number).scalar_subquery()
    now, is_suspended, number = connection.execute(select(clock(), _is_suspended(tables), stored)).one()
    if is_suspended or (number or 0) < request.seen:
        return now, []
    asked = [quota.destination for quota in request.quotas if not quota.admitted]
    found = select(tables.destination.c.name).where(tables.destination.c.name.in_(asked), is_throttled(tables, now))
    throttled = set(connection.execute(found).scalars())
    return now, [quota for quota in request.quotas if quota.admitted or quota.destination not in throttled]


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
    if dialect_of(connection).writes is Writes.COMPOUND:
        rows, now = claims_mariadb.lock_due(connection, tables, quota, request, scope)
    else:
        rows = _lock_due(connection, tables, quota, request, now, scope)
    return _lease(connection, tables, rows, request, now)


def _lock_due(
    connection: Connection, tables: Tables, quota: Quota, request: ClaimRequest, now: Any, scope: str | None
) -> list[LockedRow]:
    """Lock the oldest due entries first, then read them: a lock on a join would lock the entries' own rows too."""
    queue = tables.queue
    allowed = [] if request.only is None else [queue.c.id.in_(request.only)]
    due = (
        select(queue.c.id)
        .where(*claimable_at(queue, quota, request.cutoff, now, scope), *_served(tables, request), *allowed)
        .where(or_(queue.c.callback.is_(None), queue.c.callback.in_(sorted(request.callbacks))))
        .order_by(queue.c.due_at)
    )
    ids = _chosen(connection, due, quota.permits)
    if not ids:
        return []
    entry, record, settlement = tables.entry, tables.record, tables.settlement
    accepted = (record.c.id == entry.c.record_id) & (record.c.state == "accepted")
    locked = (
        select(*_read(tables))
        .join(entry, entry.c.id == queue.c.id)
        .outerjoin(record, accepted)
        .outerjoin(settlement, settlement.c.id == queue.c.id)
        .where(queue.c.id.in_(ids))
    )
    rows = {row[0]: LockedRow._make(row) for row in connection.execute(locked)}
    return [rows[id] for id in ids if id in rows]


def _chosen(connection: Connection, due: Select[UUID], permits: int) -> Sequence[UUID]:
    """The oldest of the due ids, locked. In the portable mode nothing is locked, and the commit decides: after a conflict with
    another dispatcher this one chooses at random among more, so that the two seldom meet again.
    """
    if not connection.info.get(CONFLICTED):
        return connection.execute(due.limit(permits).with_for_update(skip_locked=True)).scalars().all()
    ids = connection.execute(due.limit(permits * CANDIDATES)).scalars().all()
    chosen = set(random.sample(ids, min(permits, len(ids))))
    return [id for id in ids if id in chosen]


def _read(tables: Tables) -> list[Column[Any]]:
    """The columns of a `LockedRow`."""
    named = {"queue": tables.queue, "entry": tables.entry, "record": tables.record, "settlement": tables.settlement}
    columns = [name.split(".") for name in LockedRow.columns(**{name: name for name in named})]
    return [named[table].c[column] for table, column in columns]


def _served(tables: Tables, request: ClaimRequest) -> list[Any]:
    """The condition that this process may serve the entry: see `ClaimRequest.unserved`."""
    entry, queue = tables.entry, tables.queue
    if request.unserved is None:
        return []
    unserved = or_(entry.c.operation.in_(request.unserved), entry.c.schema_version > SCHEMA_VERSION)
    return [or_(queue.c.outcome.like(CANCELLED_PATTERN), ~exists().where(entry.c.id == queue.c.id, unserved))]


def _is_suspended(tables: Tables) -> Any:
    return exists().where(tables.meta.c.suspended_reason.is_not(None))


def _lease(
    connection: Connection, tables: Tables, rows: Sequence[LockedRow], request: ClaimRequest, now: datetime
) -> list[ClaimedEntry]:
    """Lease these locked rows. One statement for all whose new values are equal, or follow from their old ones."""
    leases = [_new_lease(row, request) for row in rows]
    alike: dict[Lease, list[UUID]] = {}
    for row, lease in zip(rows, leases, strict=True):
        alike.setdefault(lease, []).append(row.id)
    for lease, ids in alike.items():
        if dialect_of(connection).writes is Writes.COMPOUND:
            claims_mariadb.lease(connection, tables, ids, lease, request, now)
        else:
            connection.execute(_leasing(tables.queue, ids, lease, request, now))
    return [leased_entry(row, lease, request.token, now) for row, lease in zip(rows, leases, strict=True)]


def _leasing(queue: Table, ids: Sequence[UUID], lease: Lease, request: ClaimRequest, now: datetime) -> Update:
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
    return update(queue).where(queue.c.id.in_(ids)).values(values)


def _new_lease(row: LockedRow, request: ClaimRequest) -> Lease:
    taken_over = row.lease_token is not None
    in_doubt_since = row.in_doubt_since or (row.leased_at if taken_over else None)
    sent_as = (in_doubt_since and row.sent_as) or _form(request.forms, row.operation)
    return Lease(taken_over, row.maybe_sent or taken_over, in_doubt_since, sent_as)


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
    ended = [(entry, change) for entry, change in settlements if isinstance(change, Settle)]
    moves = [(entry, change) for entry, change in settlements if not isinstance(change, Settle)]
    if dialect_of(connection).writes is not Writes.COMPOUND or moves or any(change.note for _, change in ended):
        now, on_record = database_now(connection), callback_registry.read(connection, tables)
        if callbacks is not None and callbacks != callback_registry.summary(on_record):
            return set()
    else:
        now = NEVER  # the statement that ends the entries reads the clock itself, and compares the callbacks
    moved = {entry.id for entry, change in moves if _move(connection, tables, entry, change, now)}
    return _end(connection, tables, ended, now, callbacks) | moved


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
    connection: Connection,
    tables: Tables,
    ended: Sequence[tuple[ClaimedEntry, Settle]],
    now: datetime,
    callbacks: str | None,
) -> set[UUID]:
    """End all entries of one claim together."""
    alike: dict[tuple[UUID, int, str], list[tuple[ClaimedEntry, Settle]]] = {}
    for entry, change in ended:
        alike.setdefault((entry.lease_token, entry.key_epoch, change.state), []).append((entry, change))
    settled: set[UUID] = set()
    for group in alike.values():
        if dialect_of(connection).writes is Writes.COMPOUND:
            settled |= claims_mariadb.end(connection, tables, group, callbacks)
        else:
            settled |= _end_alike(connection, tables, group, now)
    notes = [
        _note(entry, change.reason, now, by_lookup=change.looked_up)
        for entry, change in ended
        if change.note is not None and entry.id in settled
    ]
    if notes:
        connection.execute(insert(tables.event), notes)
    return settled


def _end_alike(
    connection: Connection, tables: Tables, ended: Sequence[tuple[ClaimedEntry, Settle]], now: datetime
) -> set[UUID]:
    changes = {entry.id: change for entry, change in ended}
    entry, change = ended[0]
    is_proof = change.state == "delivered"
    gone = _delete_ended(connection, tables, list(changes), entry.lease_token, entry.key_epoch, is_proof=is_proof)
    if gone:
        connection.execute(insert(tables.settlement), [_settlement(row, changes[row["id"]], now) for row in gone])
    return {row["id"] for row in gone}


def _delete_ended(
    connection: Connection, tables: Tables, ids: Sequence[UUID], token: UUID, key_epoch: int, *, is_proof: bool
) -> list[dict[str, Any]]:
    queue = tables.queue
    ours = (queue.c.lease_token == token) & ~_is_suspended(tables)
    ours = or_(ours, _proven(tables, key_epoch)) if is_proof else ours
    gone = delete(queue).where(queue.c.id.in_(ids), ours)
    rows = connection.execute(gone.returning(queue.c.id, queue.c.deliveries, queue.c.attempts, queue.c.key_epoch))
    return [row._asdict() for row in rows]


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
        "known": queue.c.destination if values.known else None,
    }
    if values.resets_age:
        row["first_leased_at"] = None
    if values.outcome is not None:
        row["outcome"] = values.outcome
    return row


def _note(entry: ClaimedEntry, reason: str | None, now: datetime, *, by_lookup: bool) -> dict[str, Any]:
    kind = "lookup" if by_lookup else "attempt"
    return {"entry_id": entry.id, "at": now, "kind": kind, "delivery": entry.deliveries, "reason": reason}
