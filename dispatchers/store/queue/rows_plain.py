"""The statements of `claims_rows` in SQLAlchemy's constructs, for databases without arrays and compound statements."""

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
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from dispatchers.flow_control.fair_share import FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store.connections.transactions import CONFLICTED
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.claimed_row import Lease, LockedRow
from dispatchers.store.queue.fair_share import claimable_at
from dispatchers.store.queue.throttling import is_throttled
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sql.clock import clock
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import Tables

CANDIDATES = 4  # for each entry that is claimed in the portable mode after a conflict

ENDS_ALONE: bool = False


def allowed(
    connection: Connection, tables: Tables, request: ClaimRequest, rounds: FairCursor
) -> tuple[datetime, Sequence[Quota]]:
    """The clock, and the quotas for which entries may be claimed."""
    stored = select(tables.meta.c.number).scalar_subquery()
    now, suspended, number = connection.execute(select(clock(), is_suspended(tables), stored)).one()
    if suspended or (number or 0) < request.seen:
        return now, []
    asked = [quota.destination for quota in request.quotas if not quota.admitted]
    found = select(tables.destination.c.name).where(tables.destination.c.name.in_(asked), is_throttled(tables, now))
    throttled = set(connection.execute(found).scalars())
    return now, [quota for quota in request.quotas if quota.admitted or quota.destination not in throttled]


def lock_due(
    connection: Connection, tables: Tables, quota: Quota, request: ClaimRequest, scope: str | None, now: datetime
) -> tuple[list[LockedRow], datetime]:
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
        return [], now
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
    return [rows[id] for id in ids if id in rows], now


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
    unserved = or_(entry.c.operation.in_(request.unserved), entry.c.schema_version > request.readable)
    return [or_(queue.c.outcome.like(CANCELLED_PATTERN), ~exists().where(entry.c.id == queue.c.id, unserved))]


def is_suspended(tables: Tables) -> Any:
    return exists().where(tables.meta.c.suspended_reason.is_not(None))


def lease(
    connection: Connection, tables: Tables, ids: Sequence[UUID], lease: Lease, request: ClaimRequest, now: datetime
) -> None:
    """Lease these rows, which are locked."""
    queue = tables.queue
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


def proven(tables: Tables, key_epoch: int) -> Any:
    """The condition under which proof of success is accepted after the lease: the key is the same."""
    queue = tables.queue
    return (queue.c.key_epoch == key_epoch) & queue.c.state.in_(("sending", "retry", "uncertain"))


def end(
    connection: Connection,
    tables: Tables,
    ended: Sequence[tuple[ClaimedEntry, Settle]],
    now: datetime,
    callbacks: str | None,
) -> set[UUID]:
    """Insert settlements and delete the queue rows. The callbacks were compared before."""
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
    ours = (queue.c.lease_token == token) & ~is_suspended(tables)
    ours = or_(ours, proven(tables, key_epoch)) if is_proof else ours
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
