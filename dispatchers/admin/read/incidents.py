"""What needs an operator now. The dashboard shows it on every page, so it is one bounded query."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, ScalarSelect, Select, and_, func, select

from dispatchers.admin.read.counts import Count, doubtful_counted
from dispatchers.store.records.heartbeats import LIVE_FOR
from dispatchers.store.records.queries import read_lags
from outbox.sql.clock import clock, database_now, earlier, later
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

UNCLAIMED = timedelta(minutes=1)
"""An entry, or an instant of a schedule, that has been due for longer waits for more than the next claim."""
MAX_COUNTED = 1000
"""Up to this number things are counted: more of them do not change what an operator does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """Counts that are not exact are at least their value.

    suspended_reason: why sending is suspended, if it is. uncertain: entries. paused, broken: destinations that an operator has
    paused, and those whose circuit breaker is not closed. blocked_groups: ordering groups that an operator must release.
    late_schedules: those whose next instant has been due for a minute. proposals: those that wait for a second person.
    undispatched_seconds: how long the oldest due entry has waited, if no dispatcher is live; else None.
    """

    suspended_reason: str | None
    uncertain: Count
    paused: Count
    broken: Count
    blocked_groups: Count
    late_schedules: Count
    proposals: Count
    undispatched_seconds: float | None


def read_incidents(connection: Connection, tables: Tables) -> Incidents:
    """One query; a second one, which asks each destination for its oldest due entry, only while no dispatcher is live."""
    read_by_index(connection)
    destination, schedule, proposal, dispatcher = (
        tables.destination,
        tables.schedule,
        tables.proposal,
        tables.dispatcher,
    )
    doubtful, now = doubtful_counted(tables), clock()
    is_live = dispatcher.c.seen_at.between(earlier(now, LIVE_FOR), later(now, LIVE_FOR))
    is_late = and_(schedule.c.paused.is_(False), schedule.c.next_at < earlier(now, UNCLAIMED))
    counted = {
        "paused": select(destination.c.name).where(destination.c.paused),
        "broken": select(destination.c.name).where(destination.c.breaker != "closed"),
        "blocked_groups": select(tables.blocked_group.c.ordering_key),
        "late_schedules": select(schedule.c.name).where(is_late),
        "proposals": select(proposal.c.id).where(proposal.c.state == "open", proposal.c.expires_at > now),
    }
    row = connection.execute(
        select(
            doubtful.c.uncertain,
            doubtful.c.is_whole,
            select(tables.meta.c.suspended_reason).scalar_subquery().label("suspended_reason"),
            _count(select(dispatcher.c.id).where(is_live)).label("live"),
            *(_count(rows).label(name) for name, rows in counted.items()),
        )
    ).one()
    uncertain = _up_to_limit(row.uncertain)
    return Incidents(
        suspended_reason=row.suspended_reason,
        uncertain=uncertain if row.is_whole else Count(value=uncertain.value, is_exact=False),
        undispatched_seconds=None if row.live else _waited_seconds(connection, tables),
        **{name: _up_to_limit(getattr(row, name)) for name in counted},
    )


def _count(rows: Select[Any]) -> ScalarSelect[int]:
    return select(func.count()).select_from(rows.limit(MAX_COUNTED + 1).subquery()).scalar_subquery()


def _up_to_limit(counted: int) -> Count:
    return Count(value=min(counted, MAX_COUNTED), is_exact=counted <= MAX_COUNTED)


def _waited_seconds(connection: Connection, tables: Tables) -> float | None:
    waited = max(read_lags(connection, tables, database_now(connection)).values(), default=None)
    return None if waited is None or waited <= UNCLAIMED else waited.total_seconds()
