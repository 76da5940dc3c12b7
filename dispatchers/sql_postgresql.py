"""Claim and settle on PostgreSQL: one statement for a batch, each row under its token."""

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.dialects import postgresql

from dispatchers.lifecycle import Claimed, ClaimRequest, HandBack, Park, Settle, Settlement, Wait
from outbox.batches import Batch, Shape, batch_query
from outbox.schema import NEVER, Tables


def claim(connection: Connection, tables: Tables, request: ClaimRequest) -> list[Claimed]:
    """Lease the oldest due entries of each wanted destination; an expired lease is taken over, and leaves doubt.

    Destinations are grouped by how many are wanted, in powers of two: a LIMIT cannot differ between rows.
    """
    groups: dict[int, list[tuple[str, Any]]] = {}
    for name, slots, hint in request.wants:
        groups.setdefault(1 << (slots.bit_length() - 1), []).append((name, hint))
    claimed: list[Claimed] = []
    for slots, wanted in groups.items():
        rows = connection.execute(
            _claim_statement(tables),
            {
                "names": [name for name, _ in wanted],
                "hints": [hint for _, hint in wanted],
                "slots": slots,
                "most": request.entries_max - len(claimed),
                "cutoff": request.cutoff,
                "token": request.token,
                "lease": request.lease,
                "prefixes": list(request.forms),
                "forms": list(request.forms.values()),
            },
        )
        claimed += [Claimed._make((*row, request.token)) for row in rows.all()]
    return claimed


def settle(connection: Connection, tables: Tables, settlements: Sequence[Settlement]) -> set[UUID]:
    """Record what became of claimed entries, each only if its lease is still ours; returns the ids for which it was.

    One exception: proof of success is taken late, from whoever brings it, while the key is the same.
    """
    ended = [_ended_row(entry, change) for entry, change in settlements if isinstance(change, Settle)]
    moved = [_moved_row(entry, change) for entry, change in settlements if not isinstance(change, Settle)]
    lost: set[UUID] = set()
    for statement, types, rows in ((_end_statement, _ENDED, ended), (_move_statement, _MOVED, moved)):
        if rows:
            batch = Batch(connection, types, rows)
            lost.update(connection.execute(statement(tables, batch.shape), batch.parameters).scalars())
    return {entry.id for entry, _ in settlements} - lost


# --- the values of one statement, column by column

_ENDED = {
    "id": "uuid",
    "token": "uuid",
    "key_epoch": "smallint",
    "state": "text",
    "attempts": "integer",
    "result": "text",
    "reason": "text",
}

_MOVED = {
    "id": "uuid",
    "token": "uuid",
    "state": "text",
    "attempts": "integer",
    "uncounted": "integer",
    "delay": "interval",
    "maybe_sent": "boolean",
    "in_doubt_since": "timestamptz",
    "reason": "text",
    "outcome": "text",
}


def _ended_row(entry: Claimed, change: Settle) -> tuple[Any, ...]:
    result = None if change.result is None else json.dumps(change.result)
    return (entry.id, entry.lease_token, entry.key_epoch, change.state, change.attempts, result, change.reason)


def _moved_row(entry: Claimed, change: Wait | Park | HandBack) -> tuple[Any, ...]:
    token = entry.lease_token
    if isinstance(change, HandBack):
        # Given back as it was: nothing is counted, doubt stays what the claim found.
        state = "pending" if entry.deliveries == 1 else "retry"
        doubt = (entry.maybe_sent, entry.in_doubt_since)
        return (entry.id, token, state, entry.attempts, 1, change.delay, *doubt, None, None)
    state, delay = ("retry", change.delay) if isinstance(change, Wait) else ("uncertain", timedelta(0))
    outcome = json.dumps({"reason": change.reason})
    doubt = (change.maybe_sent, change.in_doubt_since)
    return (entry.id, token, state, change.attempts, 0, delay, *doubt, change.reason, outcome)


def _ids(shape: Shape) -> str:
    return "ANY (CAST(:id AS uuid[]))" if "id" in shape.differing else "CAST(:id AS uuid)"


def _quoted(tables: Tables) -> dict[str, str]:
    quote = postgresql.dialect().identifier_preparer.format_table  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    return {name: quote(getattr(tables, name)) for name in ("entry", "queue", "settlement", "event")}


# --- the statements. `now()` is the transaction's start: an index condition needs a stable clock, and both a lease that
# ends a little early and a doubt that began a little early are on the safe side. `= ANY (ARRAY(...))`, not a join: on stale
# statistics a join flips to a sequential scan. `set_config`: an app's role may have synchronous_commit off, and a claim
# that a crash takes back would be a send that nobody remembers.


@cache
def _claim_statement(tables: Tables) -> TextClause:
    return text(
        """
        UPDATE {queue} AS q SET
            state = 'sending',
            lease_token = :token,
            lease_until = now() + CAST(:lease AS interval),
            leased_at = now(),
            first_leased_at = COALESCE(q.first_leased_at, now()),
            deliveries = q.deliveries + 1,
            attempts = q.attempts + CAST(q.lease_token IS NOT NULL AS integer),
            maybe_sent = q.maybe_sent OR q.lease_token IS NOT NULL,
            in_doubt_since = CASE WHEN q.lease_token IS NULL THEN q.in_doubt_since
                                  ELSE COALESCE(q.in_doubt_since, q.leased_at) END,
            sent_as = CASE WHEN q.sent_as IS NOT NULL AND (q.maybe_sent OR q.lease_token IS NOT NULL) THEN q.sent_as
                           ELSE (SELECT f.form
                                 FROM unnest(CAST(:prefixes AS text[]), CAST(:forms AS text[])) AS f(prefix, form)
                                 WHERE starts_with(e.operation || '.', f.prefix || '.')
                                 ORDER BY length(f.prefix) DESC LIMIT 1) END
        FROM {entry} AS e
        WHERE e.id = q.id AND q.id = ANY (ARRAY(
            SELECT due.id
            FROM (SELECT set_config('synchronous_commit', 'on', true)) AS durable,
                unnest(CAST(:names AS text[]), CAST(:hints AS timestamptz[])) AS d(name, hint)
            CROSS JOIN LATERAL (
                SELECT c.id FROM {queue} AS c
                WHERE c.destination = d.name AND c.due_at >= d.hint
                    AND c.due_at <= LEAST(now(), CAST(:cutoff AS timestamptz))
                    AND (c.lease_until IS NULL OR c.lease_until < now())
                ORDER BY c.due_at LIMIT :slots FOR UPDATE SKIP LOCKED
            ) AS due
            LIMIT :most
        ))
        RETURNING q.id, q.destination, e.operation, e.payload, e.options, e.headers, e.tag, e.kid, e.schema_version,
            q.first_leased_at, q.due_at AS queued_at, q.deliveries, q.attempts, q.maybe_sent, q.in_doubt_since, q.key_epoch,
            q.sent_as, q.leased_at
        """.format(**_quoted(tables))
    )


@cache
def _end_statement(tables: Tables, shape: Shape) -> TextClause:
    return text(
        """
        WITH o AS (
            SELECT b.* FROM ({rows}) AS b, (SELECT set_config('synchronous_commit', 'on', true)) AS durable
        ), ended AS (
            DELETE FROM {queue} AS q USING o
            WHERE q.id = o.id AND q.id = {ids} AND (
                q.lease_token = o.token
                OR (o.state = 'delivered' AND q.key_epoch = o.key_epoch AND q.state IN ('sending', 'retry', 'uncertain'))
            )
            RETURNING q.id, o.state, o.result, o.reason, q.deliveries, GREATEST(q.attempts, o.attempts) AS attempts,
                q.key_epoch
        ), noted AS (
            INSERT INTO {event} (entry_id, at, kind, delivery, reason)
            SELECT id, clock_timestamp(), 'attempt', deliveries, reason FROM ended WHERE state = 'failed'
        ), stored AS (
            INSERT INTO {settlement} (id, state, result, reason, deliveries, attempts, key_epoch, settled_at)
            SELECT id, state, result, reason, deliveries, attempts, key_epoch, clock_timestamp() FROM ended
        )
        SELECT id FROM o EXCEPT SELECT id FROM ended
        """.format(rows=batch_query(_ENDED, shape), ids=_ids(shape), **_quoted(tables))
    )


@cache
def _move_statement(tables: Tables, shape: Shape) -> TextClause:
    return text(
        """
        WITH o AS (
            SELECT b.* FROM ({rows}) AS b, (SELECT set_config('synchronous_commit', 'on', true)) AS durable
        ), moved AS (
            UPDATE {queue} AS q SET
                state = o.state,
                due_at = CASE WHEN o.state = 'uncertain' THEN CAST('{never}' AS timestamptz)
                              ELSE clock_timestamp() + o.delay END,
                lease_token = NULL, lease_until = NULL, leased_at = NULL,
                first_leased_at = CASE WHEN o.state = 'pending' THEN NULL ELSE q.first_leased_at END,
                deliveries = q.deliveries - o.uncounted,
                attempts = o.attempts,
                maybe_sent = o.maybe_sent,
                in_doubt_since = o.in_doubt_since,
                outcome = COALESCE(o.outcome, q.outcome)
            FROM o
            WHERE q.id = o.id AND q.id = {ids} AND q.lease_token = o.token
            RETURNING q.id, q.deliveries, o.reason
        ), noted AS (
            INSERT INTO {event} (entry_id, at, kind, delivery, reason)
            SELECT id, clock_timestamp(), 'attempt', deliveries, reason FROM moved WHERE reason IS NOT NULL
        )
        SELECT id FROM o EXCEPT SELECT id FROM moved
        """.format(rows=batch_query(_MOVED, shape), ids=_ids(shape), never=NEVER.isoformat(), **_quoted(tables))
    )
