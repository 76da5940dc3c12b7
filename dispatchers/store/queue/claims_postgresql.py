"""Claim and settle on PostgreSQL: one statement for a batch, each row under its token."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from dispatchers.flow_control.fair_share import NO_CURSOR, FairCursor
from dispatchers.flow_control.quota import Quota
from dispatchers.store.app_code.callback_registry import summary, summary_sql
from dispatchers.store.connections.guards import GUARDS, Guards, guard, guarding
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.claimed_row import claimed_entry
from dispatchers.store.queue.fair_share import CLAIMABLE_OF, SERVED, read_fronts, read_scopes
from dispatchers.store.queue.queue_update import queue_update
from dispatchers.stored_outcome import CANCELLED_PATTERN
from dispatchers.transitions import ClaimedEntry, Ending, Settle
from outbox.sql.postgresql.bulk_values import Batch, Shape, batch_query, typed_columns
from outbox.sql.postgresql.fast_execute import execute
from outbox.sql.schema.functions import suspended_sql
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.times import NEVER

MAX_LIMITS = 3  # different LIMITs in one claim, because each needs a statement of its own


def claim(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    rounds: FairCursor = NO_CURSOR,
    guards: Guards | None = None,
) -> list[ClaimedEntry]:
    """Lease the oldest due entries of each wanted destination. An entry with an expired lease is taken over, and is in doubt.

    One statement claims for all destinations with an equal quota. The quotas of the destinations in `rounds` are shared out
    over their scopes. guards: the limits to set, if this transaction has none yet.
    """
    claimed: list[ClaimedEntry] = []
    callbacks_left = request.max_callbacks
    groups = _alike(request.quotas, rounds)
    if guards is not None and _reads_by_one_index(request, groups):
        guards = guards._replace(keep=True)
    for (is_called, known, permits), wanted in groups.items():
        before, most = len(claimed), request.max_entries - len(claimed)
        left = replace(request, quotas=wanted, max_entries=min(most, callbacks_left) if is_called else most)
        if left.max_entries <= 0:
            continue
        if permits:
            due = _known(request) if known else _oldest(request)
            claimed += _lease(connection, tables, left, due, guards, permits=permits)
        else:
            if guards is not None:
                guard(connection, guards)
            claimed += _share_out(connection, tables, left, rounds)
        callbacks_left -= (len(claimed) - before) * is_called
        guards = None
    return claimed


def _alike(quotas: Sequence[Quota], rounds: FairCursor) -> dict[tuple[bool, bool, int], list[Quota]]:
    """Group the quotas by whether they have callbacks, which have a total of their own, by `known`, and by their LIMIT.

    The planner cannot estimate a LIMIT that differs between rows.

    The groups with LIMIT 0 have the destinations that are shared out. If there are too many different LIMITs, they are rounded
    down to powers of two.
    """
    several = len({quota.permits for quota in quotas}) > MAX_LIMITS
    alike: dict[tuple[bool, bool, int], list[Quota]] = {}
    for quota in quotas:
        permits = 1 << (quota.permits.bit_length() - 1) if several else quota.permits
        permits = 0 if quota.destination in rounds and not quota.known else permits
        alike.setdefault((quota.called_back is not None, quota.known, permits), []).append(quota)
    return alike


def _reads_by_one_index(request: ClaimRequest, groups: Collection[tuple[bool, bool, int]]) -> bool:
    """Whether each table has one index that the claim can use, so that its plan may be kept. To plan it takes the server longer
    than to claim one entry.
    """
    is_plain = request.unserved is None and request.only is None and not request.completions
    return is_plain and all(permits and not known for _, known, permits in groups)


def _share_out(connection: Connection, tables: Tables, request: ClaimRequest, rounds: FairCursor) -> list[ClaimedEntry]:
    """Claim for fair destinations: first each scope's share, then the oldest entries of any scope."""
    quotas = [quota._replace(due_from=rounds.due_from(quota)) for quota in request.quotas]
    claimed: list[ClaimedEntry] = []
    left: list[Quota] = []
    for quota, backlog in read_fronts(connection, tables, quotas, request.cutoff):
        quota = quota._replace(permits=min(quota.permits, request.max_entries - len(claimed)))
        if not quota.permits:
            break
        if backlog.entries > quota.permits:
            scopes = read_scopes(connection, tables, quota, request.cutoff, rounds.after(quota.destination))
            backlog = backlog._replace(behind=scopes[0], before=scopes[1])
        of = rounds.share_out(quota, backlog)
        given: dict[str, Any] = {"scopes": list(of), "shares": list(of.values()), "permits": quota.permits}
        due = _SHARES.format(served=SERVED if request.unserved is not None else "")
        shared = _lease(connection, tables, replace(request, quotas=[quota]), due, **given) if of else []
        claimed += shared
        left.append(quota._replace(permits=quota.permits - len(shared)))
    oldest = [quota for quota in left if quota.permits]
    most = request.max_entries - len(claimed)
    return claimed + claim(connection, tables, replace(request, quotas=oldest, max_entries=most))


def _lease(
    connection: Connection,
    tables: Tables,
    request: ClaimRequest,
    due: str,
    guards: Guards | None = None,
    **given: Any,
) -> list[ClaimedEntry]:
    wanted = request.quotas
    found = execute(
        connection,
        _claim_statement(tables, request.completions, request.forms.words, due),
        _asked(wanted, due)
        | {
            "most": request.max_entries,
            "cutoff": request.cutoff,
            "token": request.token,
            "lease": request.lease,
            "seen": request.seen,
            "called": summary(request.callbacks),
        }
        | ({"forms": request.forms.json} if request.forms else {})
        | _unserved_parameters(request)
        | ({} if request.only is None else {"only": list(request.only)})
        | given,
        before=None if guards is None else guarding(guards),
    )
    return [claimed_entry(row, request.token) for row in found.rows]


def _asked(quotas: Sequence[Quota], due: str) -> dict[str, Any]:
    """The destinations as parameters. psycopg converts an array many times slower than its only value."""
    if due is _OLDEST_OF_ONE:
        (quota,) = quotas
        return {"name": quota.destination, "due_from": quota.due_from, "admitted": quota.admitted}
    return {
        "names": [quota.destination for quota in quotas],
        "due_from": [quota.due_from for quota in quotas],
        "admitted": [quota.admitted for quota in quotas],
    }


def _unserved_parameters(request: ClaimRequest) -> dict[str, Any]:
    if request.unserved is None:
        return {}
    return {
        "recent": [quota.recent for quota in request.quotas],
        "unserved": list(request.unserved),
        "cancelled": CANCELLED_PATTERN,
        "readable": request.readable,
    }


def settle(
    connection: Connection,
    tables: Tables,
    settlements: Sequence[Ending],
    guards: Guards = GUARDS,
    callbacks: str | None = None,
) -> set[UUID]:
    """Record the outcomes of claimed entries whose leases are still valid, one of each entry at most; returns their ids.

    One exception: proof of success is also accepted after the lease, as long as the key is the same.
    callbacks: the recorded callbacks as this process has read them. If they have changed, nothing is settled. None: no check.
    """
    ended = [_ended_row(entry, change) for entry, change in settlements if isinstance(change, Settle)]
    moved = [
        (entry.id, entry.lease_token, *queue_update(entry, change))
        for entry, change in settlements
        if not isinstance(change, Settle)
    ]
    lost: set[UUID] = set()
    for statement, types, rows in ((_end_statement, _ENDED, ended), (_move_statement, _MOVED, moved)):
        if rows:
            batch = Batch(connection, types, rows)
            asked = statement(tables, batch.shape, guards)
            lost.update(id for (id,) in execute(connection, asked, {**batch.parameters, "callbacks": callbacks}).rows)
    ids = {entry.id for entry, _ in settlements}
    return ids - lost if lost else ids


# --- the columns of the statements' values

_ENDED = typed_columns(
    "id uuid, token uuid, key_epoch smallint, state text, attempts integer, result text, reason text, note text"
)

_MOVED = typed_columns(
    "id uuid, token uuid, state text, delay interval, attempts integer, uncounted integer, maybe_sent boolean,"
    " in_doubt_since timestamptz, key_epoch smallint, reason text, outcome text, proof boolean, by_lookup boolean,"
    " resets_age boolean, callback text, known boolean"
)


def _ended_row(entry: ClaimedEntry, change: Settle) -> tuple[Any, ...]:
    result = None if change.result is None else json.dumps(change.result)
    state, attempts, reason, note = change.state, change.attempts, change.reason, change.note
    return (entry.id, entry.lease_token, entry.key_epoch, state, attempts, result, reason, note)


_NAMES = ("entry", "queue", "settlement", "destination", "event", "record", "meta")


def _batch_parts(tables: Tables, types: Mapping[str, str], shape: Shape, guards: Guards) -> dict[str, str]:
    ids = "ANY (CAST(:id AS uuid[]))" if "id" in shape.differing else "CAST(:id AS uuid)"
    return _quoted(tables) | {"rows": batch_query(types, shape), "ids": ids, "guards": guards.sql}


def _quoted(tables: Tables) -> dict[str, str]:
    quoted = {name: quoted_table(getattr(tables, name)) for name in _NAMES}
    unchanged = f"(CAST(:callbacks AS text) IS NULL OR CAST(:callbacks AS text) = {summary_sql(tables)})"
    return quoted | {"unchanged": unchanged, "is_suspended": suspended_sql(quoted["meta"])}


# --- the statements
# `now()` is the start of the transaction. An index condition needs a stable clock. A lease that ends a little early, and a
# doubt that begins a little early, are both safe.
# `= ANY (ARRAY(...))` instead of a join: with stale statistics the planner runs a join as a sequential scan.
# `= ANY (ARRAY[q.id])` instead of `= q.id`: if the table was empty at its last vacuum, the planner expects that a merge over the
# whole index is as cheap as reading one row.
# `is_suspended`: the statement itself checks whether the database may have forgotten commits. So the check runs on the server
# that leases the entry, even if the connection leads to another server than before. Until an operator resumes sending, only
# proof of success is accepted for entries that were sent before.


# Selected only if this process has completions: it costs about 3 % of a claim of entries without a record, and 11 % of a claim
# of entries with a record (medians of 40 batches of 500).
_COMPLETION = """e.record_id, CASE WHEN e.record_id IS NOT NULL
            THEN (SELECT r.completion FROM {record} AS r WHERE r.id = e.record_id AND r.state = 'accepted') END"""


# An entry that waits for a callback is claimed only by a process that has this callback.
_CALLED_HERE = "(c.callback IS NULL OR c.callback = ANY (string_to_array(CAST(:called AS text), ',')))"

_OLDEST = """{quotas} CROSS JOIN LATERAL (
                SELECT c.id FROM {{queue}} AS c
                WHERE c.destination = d.name AND {called_here} AND c.due_at >= {since}
                    AND c.due_at <= LEAST(now(), CAST(:cutoff AS timestamptz))
                    AND (c.lease_until IS NULL OR c.lease_until < now()){served}
                ORDER BY c.due_at LIMIT :permits FOR UPDATE SKIP LOCKED
            ) AS due"""

# Its own index, which has few rows: neither the backlog of a destination is read, nor what holds it.
_KNOWN = """{quotas} CROSS JOIN LATERAL (
                SELECT c.id FROM {{queue}} AS c
                WHERE c.known = d.name AND {called_here}
                    AND c.due_at <= LEAST(now(), CAST(:cutoff AS timestamptz))
                    AND (c.lease_until IS NULL OR c.lease_until < now()){served}
                ORDER BY c.due_at LIMIT :permits FOR UPDATE SKIP LOCKED
            ) AS due"""

_QUOTAS = """unnest(CAST(:names AS text[]), CAST(:due_from AS timestamptz[]), CAST(:admitted AS boolean[]))
                    AS d(name, due_from, admitted)"""

_QUOTA = """(SELECT CAST(:name AS text) AS name, CAST(:due_from AS timestamptz) AS due_from,
                    CAST(:admitted AS boolean) AS admitted) AS d"""

_OLDEST_OF_ONE = _OLDEST.format(called_here=_CALLED_HERE, quotas=_QUOTA, since="d.due_from", served="")

_RECENT_QUOTAS = """unnest(CAST(:names AS text[]), CAST(:due_from AS timestamptz[]), CAST(:admitted AS boolean[]),
                    CAST(:recent AS interval[])) AS d(name, due_from, admitted, recent)"""

_SHARES = f"""{_QUOTAS},
                unnest(CAST(:scopes AS text[]), CAST(:shares AS integer[])) AS s(scope, share)
            CROSS JOIN LATERAL (
                SELECT few.id FROM (
                    SELECT c.id FROM {{{{queue}}}} AS c
                    WHERE {_CALLED_HERE} AND
                        {CLAIMABLE_OF.format(name="d.name", due_from="d.due_from", scope="s.scope", served="{served}")}
                    LIMIT :permits FOR UPDATE SKIP LOCKED
                ) AS few LIMIT s.share
            ) AS due"""


def _oldest(request: ClaimRequest) -> str:
    """The due entries, oldest first. Entries that this process cannot serve are passed over, and read again only sometimes."""
    if request.unserved is None and request.only is None and len(request.quotas) == 1:
        return _OLDEST_OF_ONE
    if request.unserved is None:
        return _OLDEST.format(called_here=_CALLED_HERE, quotas=_QUOTAS, since="d.due_from", served=_only(request))
    since, served = "GREATEST(d.due_from, now() - d.recent)", SERVED + _only(request)
    return _OLDEST.format(called_here=_CALLED_HERE, quotas=_RECENT_QUOTAS, since=since, served=served)


def _known(request: ClaimRequest) -> str:
    """The due entries whose end is stored, which are not sent. The condition names them all to the planner: see the index."""
    served = ("" if request.unserved is None else SERVED) + _only(request)
    quotas = _QUOTAS if request.unserved is None else _RECENT_QUOTAS
    return _KNOWN.format(called_here=_CALLED_HERE, quotas=quotas, served=served)


def _only(request: ClaimRequest) -> str:
    return " AND c.id = ANY (CAST(:only AS uuid[]))" if request.only is not None else ""


@lru_cache(MAX_STATEMENTS)
def _claim_statement(tables: Tables, completions: bool, words: tuple[int, ...], due: str) -> TextClause:
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
            sent_as = CASE WHEN q.sent_as IS NOT NULL AND (q.in_doubt_since IS NOT NULL OR q.lease_token IS NOT NULL)
                           THEN q.sent_as
                           ELSE {form} END
        FROM {entry} AS e
        WHERE e.id = ANY (ARRAY[q.id]) AND q.id = ANY (ARRAY(
            SELECT due.id
            FROM (
                SELECT WHERE NOT {is_suspended} AND COALESCE((SELECT m.number FROM {meta} AS m), 0) >= CAST(:seen AS bigint)
            ) AS trusted,
                {due}
            WHERE d.admitted OR NOT COALESCE((
                SELECT p.paused OR p.breaker <> 'closed' OR p.cooldown_until > now() FROM {destination} AS p WHERE p.name = d.name
            ), false)
            LIMIT :most
        ))
        RETURNING q.id, q.destination, e.env, e.operation, e.payload, e.tag, e.kid, e.schema_version,
            e.due_at, e.created_at,
            q.first_leased_at, q.due_at AS queued_at, q.deliveries, q.attempts, q.maybe_sent, q.in_doubt_since, q.key_epoch,
            q.sent_as, q.leased_at, {completion}, q.ordering_key, q.position,
            (SELECT s.state FROM {settlement} AS s WHERE s.id = q.id) AS ended, q.outcome, e.options, e.headers
        """.format(
            completion=_COMPLETION.format(**_quoted(tables)) if completions else "NULL, NULL",
            form=_form(words),
            due=due.format(**_quoted(tables)),
            **_quoted(tables),
        )
    )


def _form(words: Sequence[int]) -> str:
    """The form of the longest prefix with so many words that is registered.

    The server parses the JSON once, in a subquery that depends on no row. One that did would run once for each entry.
    """
    prefixes = (f"array_to_string((string_to_array(e.operation, '.'))[1:{count}], '.')" for count in words)
    return (
        f"COALESCE({', '.join(f'(SELECT CAST(:forms AS jsonb)) ->> {prefix}' for prefix in prefixes)})"
        if words
        else "NULL"
    )


@lru_cache(MAX_STATEMENTS)
def _end_statement(tables: Tables, shape: Shape, guards: Guards) -> TextClause:
    return text(
        """
        WITH o AS (
            SELECT b.* FROM ({rows}) AS b, (SELECT {guards}) AS guarded
        ), ended AS (
            DELETE FROM {queue} AS q USING o
            WHERE q.id = o.id AND q.id = {ids} AND {unchanged} AND (
                (q.lease_token = o.token AND NOT {is_suspended})
                OR (o.state = 'delivered' AND q.key_epoch = o.key_epoch AND q.state IN ('sending', 'retry', 'uncertain'))
            )
            RETURNING q.id, o.state, o.result, o.reason, q.deliveries, GREATEST(q.attempts, o.attempts) AS attempts,
                q.key_epoch, o.note
        ), noted AS (
            INSERT INTO {event} (entry_id, at, kind, delivery, reason)
            SELECT id, clock_timestamp(), note, deliveries, reason FROM ended WHERE note IS NOT NULL
        ), stored AS (
            INSERT INTO {settlement} (id, state, result, reason, deliveries, attempts, key_epoch, settled_at)
            SELECT id, state, result, reason, deliveries, attempts, key_epoch, clock_timestamp() FROM ended
        )
        SELECT id FROM o EXCEPT SELECT id FROM ended
        """.format(**_batch_parts(tables, _ENDED, shape, guards))
    )


@lru_cache(MAX_STATEMENTS)
def _move_statement(tables: Tables, shape: Shape, guards: Guards) -> TextClause:
    return text(
        """
        WITH o AS (
            SELECT b.* FROM ({rows}) AS b, (SELECT {guards}) AS guarded
        ), moved AS (
            UPDATE {queue} AS q SET
                state = o.state,
                due_at = COALESCE(clock_timestamp() + o.delay, CAST('{never}' AS timestamptz)),
                lease_token = NULL, lease_until = NULL, leased_at = NULL,
                first_leased_at = CASE WHEN o.resets_age THEN NULL ELSE q.first_leased_at END,
                deliveries = q.deliveries - o.uncounted,
                attempts = o.attempts,
                maybe_sent = o.maybe_sent,
                in_doubt_since = o.in_doubt_since,
                key_epoch = o.key_epoch,
                outcome = COALESCE(o.outcome, q.outcome),
                callback = o.callback,
                known = CASE WHEN o.known THEN q.destination END,
                waiting_since = CASE WHEN o.uncounted > 0 THEN COALESCE(q.waiting_since, q.due_at) END
            FROM o
            WHERE q.id = o.id AND q.id = {ids} AND {unchanged} AND (
                (q.lease_token = o.token AND NOT {is_suspended})
                OR (o.proof AND q.key_epoch = o.key_epoch AND q.state IN ('sending', 'retry', 'uncertain'))
            )
            RETURNING q.id, q.deliveries, o.reason, o.by_lookup
        ), noted AS (
            INSERT INTO {event} (entry_id, at, kind, delivery, reason)
            SELECT id, clock_timestamp(), CASE WHEN by_lookup THEN 'lookup' ELSE 'attempt' END, deliveries, reason
            FROM moved WHERE reason IS NOT NULL
        )
        SELECT id FROM o EXCEPT SELECT id FROM moved
        """.format(never=NEVER.isoformat(), **_batch_parts(tables, _MOVED, shape, guards))
    )
