"""The outbox at one moment, read within bounds however long the queue is: the dashboard's overview.

`overview` is what `outbox status` shows; this reads less of each destination, as an open page asks again every five seconds.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from dispatchers.admin.read.counts import Count, count_rows, count_uncertain
from dispatchers.admin.read.destinations import DestinationState, most_urgent, read_destinations
from dispatchers.admin.read.dispatchers import Difference, differences
from dispatchers.admin.read.overview import Unserved, read_unserved
from dispatchers.admin.read.throughput import Throughput, read_throughput
from dispatchers.store.records.gauges import Gauge, read_gauges
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from outbox.sql.schema.tables import Tables, is_open
from outbox.sql.statements import read_by_index

MAX_STATES = 10_000  # counted by state: an open page asks again every five seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """waiting: entries that have not ended. states: of each destination, by state. blocked_groups: ordering groups that an
    operator must release. accepted: requests that wait for their entries. suspended_reason: why sending is suspended, if it is.
    unserved: as of `Overview`. destinations: the `most_urgent` ones of `destinations_in_all`.
    """

    at: datetime
    suspended_reason: str | None
    waiting: Count
    uncertain: Count
    blocked_groups: Count
    accepted: Count
    oldest_due_seconds: float | None
    unserved: list[Unserved] | None
    destinations: list[DestinationState]
    destinations_in_all: int
    states: dict[str, Gauge]
    throughput: Throughput
    dispatchers: list[DispatcherSeen]
    differences: list[Difference]


def read_summary(connection: Connection, tables: Tables) -> Summary:
    """Reads some 70,000 rows of indexes at most."""
    read_by_index(connection)
    queue, record = tables.queue, tables.record
    destinations = read_destinations(connection, tables)
    dispatchers = read_dispatchers(connection, tables, destinations.at)
    shown, states = most_urgent(destinations.destinations), read_gauges(connection, tables, MAX_STATES)
    lags = [each.oldest_due_seconds for each in destinations.destinations if each.oldest_due_seconds is not None]
    return Summary(
        at=destinations.at,
        suspended_reason=connection.execute(select(tables.meta.c.suspended_reason)).scalar_one_or_none(),
        waiting=count_rows(connection, select(queue.c.id)),
        uncertain=count_uncertain(connection, tables),
        blocked_groups=count_rows(connection, select(tables.blocked_group.c.ordering_key)),
        accepted=count_rows(connection, select(record.c.id).where(is_open(record, "accepted"))),
        oldest_due_seconds=max(lags, default=None),
        unserved=read_unserved(connection, tables, destinations.at),
        destinations=shown,
        destinations_in_all=len(destinations.destinations),
        states={each.name: states[each.name] for each in shown if each.name in states},
        throughput=read_throughput(connection, tables),
        dispatchers=dispatchers,
        differences=differences(dispatchers),
    )
