"""Claim and settle row by row, for databases without arrays and UPDATE ... RETURNING: a few statements for a batch.

`claims_postgresql` explains the rules, which are equal. The same tests run for both modules. The statements are in
`rows_plain`, and as text in `rows_mariadb` and `rows_mysql`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import (
    Connection,
    Table,
    func,
    insert,
    or_,
    update,
)

from dispatchers.flow_control.fair_share import NO_CURSOR, FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.names import prefixes
from dispatchers.store.app_code import callback_registry
from dispatchers.store.connections.guards import GUARDS, Guards
from dispatchers.store.queue import rows_mariadb, rows_mysql, rows_plain
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.claimed_row import Lease, LockedRow, leased_entry
from dispatchers.store.queue.fair_share import read_backlog
from dispatchers.store.queue.queue_update import QueueUpdate, Unsettled, queue_update
from dispatchers.store.queue.rows_plain import is_suspended, proven
from dispatchers.transitions import ClaimedEntry, Ending, Settle
from outbox.sql.clock import database_now
from outbox.sql.dialect import Writes, dialect_of
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import change_in_order
from outbox.times import NEVER


class RowsSql(Protocol):
    """The statements of a claim and of a settlement; each may be several. A module has them as functions."""

    ENDS_ALONE: bool
    """Whether `end` compares the callbacks and reads the clock itself."""

    def allowed(
        self, connection: Connection, tables: Tables, request: ClaimRequest, rounds: FairCursor
    ) -> tuple[datetime, Sequence[Quota]]:
        """The clock, and the quotas for which entries may be claimed."""
        ...

    def lock_due(
        self,
        connection: Connection,
        tables: Tables,
        quota: Quota,
        request: ClaimRequest,
        scope: str | None,
        now: datetime,
    ) -> tuple[list[LockedRow], datetime]:
        """Lock the oldest due entries and read them; returns the time of this, too."""
        ...

    def lease(
        self,
        connection: Connection,
        tables: Tables,
        ids: Sequence[UUID],
        lease: Lease,
        request: ClaimRequest,
        now: datetime,
    ) -> None:
        """Lease these rows, which are locked."""
        ...

    def end(
        self,
        connection: Connection,
        tables: Tables,
        ended: Sequence[tuple[ClaimedEntry, Settle]],
        now: datetime,
        callbacks: str | None,
    ) -> set[UUID]:
        """Insert settlements and delete the queue rows, of entries of one claim with equal key epochs and states; returns the
        ids.
        """
        ...


def _sql(connection: Connection) -> RowsSql:
    return _MODULES.get(dialect_of(connection).writes, rows_plain)


_MODULES: dict[Writes, RowsSql] = {
    Writes.COMPOUND: rows_mariadb,
    Writes.BATCHES: rows_mysql,
}
"""The databases with statements of their own. The plain ones run on each of the others."""


def claim(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    rounds: FairCursor = NO_CURSOR,
    guards: Guards | None = None,
) -> list[ClaimedEntry]:
    """See `claims_postgresql.claim`. This one claims for each destination separately, and needs no guards."""
    now, quotas = _sql(connection).allowed(connection, tables, request, rounds)
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
    rows, now = _sql(connection).lock_due(connection, tables, quota, request, scope, now)
    return _lease(connection, tables, rows, request, now)


def _lease(
    connection: Connection, tables: Tables, rows: Sequence[LockedRow], request: ClaimRequest, now: datetime
) -> list[ClaimedEntry]:
    """Lease these locked rows. One statement for all whose new values are equal, or follow from their old ones."""
    leases = [_new_lease(row, request) for row in rows]
    alike: dict[Lease, list[UUID]] = {}
    for row, lease in zip(rows, leases, strict=True):
        alike.setdefault(lease, []).append(row.id)
    for lease, ids in alike.items():
        _sql(connection).lease(connection, tables, ids, lease, request, now)
    return [leased_entry(row, lease, request.token, now) for row, lease in zip(rows, leases, strict=True)]


def _new_lease(row: LockedRow, request: ClaimRequest) -> Lease:
    taken_over = row.lease_token is not None
    in_doubt_since = row.in_doubt_since or (row.leased_at if taken_over else None)
    sent_as = (in_doubt_since and row.sent_as) or _form(request.forms, row.operation)
    return Lease(taken_over, row.maybe_sent or taken_over, in_doubt_since, sent_as)


def _form(forms: Mapping[str, str], operation: str) -> str | None:
    return next((forms[prefix] for prefix in prefixes(operation) if prefix in forms), None)


def settle(
    connection: Connection,
    tables: Tables,
    settlements: Sequence[Ending],
    guards: Guards = GUARDS,
    callbacks: str | None = None,
) -> set[UUID]:
    """See `claims_postgresql.settle`. It needs no guards here."""
    ended = [(entry, change) for entry, change in settlements if isinstance(change, Settle)]
    moves = [(entry, change) for entry, change in settlements if not isinstance(change, Settle)]
    if not _sql(connection).ENDS_ALONE or moves or any(change.note for _, change in ended):
        now, on_record = database_now(connection), callback_registry.read(connection, tables)
        if callbacks is not None and callbacks != callback_registry.summary(on_record):
            return set()
    else:
        now = NEVER  # the statement that ends the entries reads the clock itself, and compares the callbacks
    moved = {entry.id for entry, change in moves if _move(connection, tables, entry, change, now)}
    return _end(connection, tables, ended, now, callbacks) | moved


def _move(connection: Connection, tables: Tables, entry: ClaimedEntry, change: Unsettled, now: datetime) -> bool:
    queue = tables.queue
    values = queue_update(entry, change)
    ours = (queue.c.lease_token == entry.lease_token) & ~is_suspended(tables)
    ours = or_(ours, proven(tables, entry.key_epoch)) if values.proof else ours
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
        settled |= _sql(connection).end(connection, tables, group, now, callbacks)
    notes = [
        _note(entry, change.reason, now, by_lookup=change.looked_up)
        for entry, change in ended
        if change.note is not None and entry.id in settled
    ]
    if notes:
        connection.execute(insert(tables.event), notes)
    return settled


def _row(queue: Table, values: QueueUpdate, now: datetime) -> dict[str, Any]:
    """The new values of the queue row, in the order in which they are set. Other columns keep their values."""
    released = func.coalesce(queue.c.waiting_since, queue.c.due_at)
    delivered = queue.c.deliveries - values.uncounted  # relative: later deliveries may have been counted meanwhile
    row = {
        "waiting_since": released if values.uncounted else None,
        "state": values.state,
        "due_at": NEVER if values.delay is None else now + values.delay,
        "lease_token": None,
        "lease_until": None,
        "leased_at": None,
        "deliveries": delivered,
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
