"""Counts what waits for fair destinations, by scope. Each scope costs one step in the index, however many entries it has.

On PostgreSQL one statement checks whether there is anything to share out, and a second one reads the scopes. Plain SQL needs a
statement for each step. These queries lock nothing, so a claim may get fewer entries if other dispatchers claim meanwhile.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache

from sqlalchemy import ColumnElement, Connection, Table, TextClause, func, literal, or_, select, text

from dispatchers.flow_control.fair_share import MAX_SCOPES, Backlog, Waiting, max_counted
from dispatchers.flow_control.quota import Quota
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables

CLAIMABLE_OF = """c.fair = {name} AND c.scope = {scope}
    AND c.due_at >= {due_from} AND c.due_at <= LEAST(now(), CAST(:cutoff AS timestamptz))
    AND (c.lease_until IS NULL OR c.lease_until < now()){served}
    ORDER BY c.due_at"""
"""The condition and order for the entries of one scope that may be claimed, oldest first."""

SERVED = """
                    AND (c.outcome LIKE :cancelled OR NOT EXISTS (
                        SELECT FROM {entry} AS u WHERE u.id = c.id
                            AND (u.operation = ANY (CAST(:unserved AS text[])) OR u.schema_version > :readable)
                    ))"""
"""The condition that this process may serve the entry: see `ClaimRequest.unserved`."""


# --- on PostgreSQL


def read_fronts(
    connection: Connection, tables: Tables, quotas: Sequence[Quota], cutoff: datetime
) -> list[tuple[Quota, Backlog]]:
    """The backlog of each destination where an entry may be claimed, without its scopes."""
    asked = {
        "names": [quota.destination for quota in quotas],
        "due_from": [quota.due_from for quota in quotas],
        "permits": [quota.permits for quota in quotas],
        "cutoff": cutoff,
    }
    found = {row.name: Backlog(*row[1:]) for row in connection.execute(_front_statement(tables), asked)}
    return [(quota, found[quota.destination]) for quota in quotas if found[quota.destination].entries]


def read_scopes(
    connection: Connection, tables: Tables, quota: Quota, cutoff: datetime, after: str | None
) -> tuple[list[Waiting], list[Waiting]]:
    """The scopes after `after`, and the scopes up to it."""
    asked = {
        "name": quota.destination,
        "due_from": quota.due_from,
        "permits": quota.permits,
        "cutoff": cutoff,
        "after": after,
    }
    laps: tuple[list[Waiting], list[Waiting]] = ([], [])
    for scope, lap, entries in connection.execute(_walk_statement(tables), asked | {"max_scopes": MAX_SCOPES}):
        laps[lap].append(Waiting(scope, entries))
    return laps


@lru_cache(MAX_STATEMENTS)
def _front_statement(tables: Tables) -> TextClause:
    return text(
        f"""
        SELECT d.name, front.*
        FROM unnest(CAST(:names AS text[]), CAST(:due_from AS timestamptz[]), CAST(:permits AS integer[]))
            AS d(name, due_from, permits)
        CROSS JOIN LATERAL (
            SELECT min(f.due_at) AS oldest, count(*) AS entries, count(*) - count(f.fair) AS unscoped
            FROM (
                SELECT c.due_at, c.fair FROM {quoted_table(tables.queue)} AS c
                WHERE c.destination = d.name AND c.due_at >= d.due_from
                    AND c.due_at <= LEAST(now(), CAST(:cutoff AS timestamptz))
                    AND (c.lease_until IS NULL OR c.lease_until < now())
                ORDER BY c.due_at LIMIT d.permits + 1
            ) AS f
        ) AS front
        """
    )


@lru_cache(MAX_STATEMENTS)
def _walk_statement(tables: Tables) -> TextClause:
    """A loose index scan around the ring of scopes. Lap 0 begins after the scope `after`, lap 1 at the ring's beginning.

    found: how many scopes so far have an entry that may be claimed.
    """

    def claimable_of(scope: str) -> str:
        return CLAIMABLE_OF.format(name=":name", due_from=due_from, scope=scope, served="")

    queue, due_from = quoted_table(tables.queue), "CAST(:due_from AS timestamptz)"
    return text(
        f"""
        WITH RECURSIVE walk (step, scope, lap, found) AS (
            SELECT 0, CAST(:after AS text), CASE WHEN CAST(:after AS text) IS NULL THEN -1 ELSE 0 END, CAST(0 AS bigint)
            UNION ALL
            SELECT w.step + 1, next.scope, next.lap, w.found + it.claimable
            FROM walk AS w
            CROSS JOIN LATERAL (
                (
                    SELECT CAST(c.scope AS text) AS scope, w.lap AS lap FROM {queue} AS c
                    WHERE c.fair = :name AND c.scope > w.scope AND c.due_at >= {due_from} ORDER BY c.scope, c.due_at LIMIT 1
                )
                UNION ALL
                (
                    SELECT CAST(c.scope AS text), w.lap + 1 FROM {queue} AS c
                    WHERE c.fair = :name AND c.due_at >= {due_from} ORDER BY c.scope, c.due_at LIMIT 1
                )
                LIMIT 1
            ) AS next
            CROSS JOIN LATERAL (
                SELECT count(*) AS claimable FROM (SELECT FROM {queue} AS c WHERE {claimable_of("next.scope")} LIMIT 1) AS first
            ) AS it
            WHERE w.step < :max_scopes AND w.found < :permits
                AND (next.lap = 0 OR (next.lap = 1 AND next.scope <= CAST(:after AS text)))
        )
        SELECT w.scope, w.lap, (
            SELECT count(*) FROM (
                SELECT FROM (SELECT FROM {queue} AS c WHERE {claimable_of("w.scope")} LIMIT :permits + 1) AS few
                LIMIT :permits / GREATEST((SELECT max(found) FROM walk), 1) + 1
            ) AS counted
        ) AS entries
        FROM walk AS w WHERE w.step > 0 ORDER BY w.step
        """
    )


# --- in plain SQL


def read_backlog(
    connection: Connection, tables: Tables, quota: Quota, cutoff: datetime, now: datetime, after: str | None
) -> Backlog:
    """The backlog of one destination; its scopes begin after the scope `after`."""
    queue = tables.queue
    front = (
        select(queue.c.due_at, queue.c.fair)
        .where(*claimable_at(queue, quota, cutoff, now))
        .order_by(queue.c.due_at)
        .limit(quota.permits + 1)
        .subquery()
    )
    counted = select(func.min(front.c.due_at), func.count(), func.count() - func.count(front.c.fair))
    backlog = Backlog(*connection.execute(counted).one())
    if backlog.entries <= quota.permits:
        return backlog

    def count(scope: str, most: int) -> int:
        some = select(literal(1)).where(*claimable_at(queue, quota, cutoff, now, scope)).limit(most)
        return connection.execute(select(func.count()).select_from(some.subquery())).scalar_one()

    laps: tuple[list[str], list[str]] = ([], [])
    found = 0
    for lap, scope in enumerate((after, None) if after is not None else (None,)):
        while found < quota.permits and len(laps[0]) + len(laps[1]) < MAX_SCOPES:
            scope = _next_scope(connection, queue, quota, scope, up_to=after if lap else None)
            if scope is None:
                break
            laps[lap].append(scope)
            found += count(scope, 1)
    most = max_counted(quota.permits, found)
    behind, before = ([Waiting(scope, count(scope, most)) for scope in scopes] for scopes in laps)
    return backlog._replace(behind=behind, before=before)


def claimable_at(
    queue: Table, quota: Quota, cutoff: datetime, now: datetime, scope: str | None = None
) -> list[ColumnElement[bool]]:
    """The conditions for entries of a destination, or of one of its scopes, that may be claimed."""
    if quota.known:
        of = [queue.c.known == quota.destination]
    elif scope is None:
        of = [queue.c.destination == quota.destination]
    else:
        of = [queue.c.fair == quota.destination, queue.c.scope == scope]
    recent = [] if quota.recent is None else [queue.c.due_at >= now - quota.recent]
    return [
        *of,
        queue.c.due_at >= quota.due_from,
        *recent,
        queue.c.due_at <= min(now, cutoff),
        or_(queue.c.lease_until.is_(None), queue.c.lease_until < now),
    ]


def _next_scope(
    connection: Connection, queue: Table, quota: Quota, behind: str | None, *, up_to: str | None
) -> str | None:
    found = select(queue.c.scope).where(queue.c.fair == quota.destination, queue.c.due_at >= quota.due_from)
    if behind is not None:
        found = found.where(queue.c.scope > behind)
    if up_to is not None:
        found = found.where(queue.c.scope <= up_to)
    scope: str | None = connection.execute(found.order_by(queue.c.scope).limit(1)).scalar_one_or_none()
    return scope
