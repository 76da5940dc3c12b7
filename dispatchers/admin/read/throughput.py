"""The sends of all dispatchers within the last hour, and how long they took: sums of the counts in their heartbeats.

However large the outbox is, this reads only the counts: a row for each minute, destination, result and bucket of durations. The
last ten seconds, and what a process that crashed had not reported yet, are missing. `run_once()` reports nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from dispatchers.store.records.send_counts import read_counts
from dispatchers.telemetry.tally import BOUNDS, WAITED
from outbox.sql.clock import database_now
from outbox.sql.schema.tables import Tables

SHOWN = timedelta(hours=1)
DELIVERED = ("delivered", "replayed")
LOOKUPS = ("found", "absent", "cannot_tell")
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Percentiles, in seconds: the upper bound of the bucket in which each lies; None if nothing was counted.

    Beyond the last bound it is the last bound.
    """

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The sends of a destination, or of all together.

    results: how many sends had each result, as in the metric `outbox_sends_total`. lookups: status lookups by result.
    per_second: sends, over the whole time. took: from the call of the adapter to its answer. waited: from the enqueue, or the due
    time if that is later, to the first send.
    """

    destination: str | None
    results: dict[str, int]
    lookups: dict[str, int]
    per_second: float
    took: Durations
    waited: Durations


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteSent:
    """The sends of one minute, by result, and their durations."""

    minute: datetime
    results: dict[str, int]
    took: Durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The last hour. minutes: each one, also those without a send. destinations: the busiest first."""

    at: datetime
    since: datetime
    total: Sent
    minutes: list[MinuteSent]
    destinations: dict[str, Sent]


def read_throughput(connection: Connection, tables: Tables) -> Throughput:
    now = database_now(connection)
    last = now.replace(second=0, microsecond=0)
    since = last - SHOWN + MINUTE
    seconds = (now - since).total_seconds()
    by_destination = read_counts(connection, tables, since, "destination", "result", "bucket")
    by_minute = read_counts(connection, tables, since, "minute", "result", "bucket")
    names = {row["destination"] for row in by_destination}
    each = [_sent(name, [r for r in by_destination if r["destination"] == name], seconds) for name in names]
    minutes = {since + number * MINUTE: list[Mapping[str, Any]]() for number in range(int(SHOWN / MINUTE))}
    for row in by_minute:
        if row["result"] != WAITED and row["result"] not in LOOKUPS and row["minute"] in minutes:
            minutes[row["minute"]].append(row)
    return Throughput(
        at=now,
        since=since,
        total=_sent(None, by_destination, seconds),
        minutes=[
            MinuteSent(minute=minute, results=_by_result(rows), took=_durations(rows))
            for minute, rows in minutes.items()
        ],
        destinations={sent.destination or "": sent for sent in sorted(each, key=_busiest_first)},
    )


def _busiest_first(sent: Sent) -> tuple[int, str]:
    return -sum(sent.results.values()), sent.destination or ""


def _sent(destination: str | None, rows: Sequence[Mapping[str, Any]], seconds: float) -> Sent:
    sends = [row for row in rows if row["result"] != WAITED and row["result"] not in LOOKUPS]
    results = _by_result(sends)
    return Sent(
        destination=destination,
        results=results,
        lookups=_by_result([row for row in rows if row["result"] in LOOKUPS]),
        per_second=sum(results.values()) / seconds,
        took=_durations(sends),
        waited=_durations([row for row in rows if row["result"] == WAITED]),
    )


def _by_result(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[str(row["result"])] += row["sends"]
    return dict(counts)


def _durations(rows: Iterable[Mapping[str, Any]]) -> Durations:
    buckets: Counter[int] = Counter()
    for row in rows:
        buckets[row["bucket"]] += row["sends"]
    p50, p95, p99 = (percentile(buckets, share) for share in (0.50, 0.95, 0.99))
    return Durations(p50=p50, p95=p95, p99=p99)


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """The upper bound of the bucket in which this share of all is reached."""
    wanted, reached = sum(buckets.values()) * share, 0
    for bucket in sorted(buckets):
        reached += buckets[bucket]
        if reached >= wanted and reached:
            return BOUNDS[min(bucket, len(BOUNDS) - 1)]
    return None
