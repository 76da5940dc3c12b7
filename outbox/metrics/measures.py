"""The measures of claims and of the tables, with their names in Prometheus and in OpenTelemetry."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from outbox.metrics.gauges import OpenRecords, TableSize, read_days_ahead, read_open_records, read_table_sizes

LOCK_WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""The bounds of the histogram of lock waits. A request in one transaction takes milliseconds; a wait lasts 5 s at most, unless
the app gives it another budget."""

CLAIMS = "Claims on an idempotency key, by result."
LOCK_WAITS = "How long claims waited for a key that another transaction had locked."


class Gauge(NamedTuple):
    """One gauge. values: its labels' values and its value, each, of what the gauge's group has read."""

    prometheus: str
    opentelemetry: str
    unit: str
    description: str
    labels: tuple[str, ...]
    values: Callable[[Any], Iterable[tuple[tuple[str, ...], float | None]]]


def _ages(records: Iterable[OpenRecords]) -> Iterable[tuple[tuple[str, ...], float]]:
    for record in records:
        yield (record.state, "0.95"), record.age_p95.total_seconds()
        yield (record.state, "0.99"), record.age_p99.total_seconds()


def _of_sizes(field: str) -> Callable[[Iterable[TableSize]], Iterable[tuple[tuple[str, ...], float | None]]]:
    return lambda sizes: [((size.table,), getattr(size, field)) for size in sizes]


OPEN_RECORDS = Gauge(
    "outbox_idempotency_open_records",
    "outbox.idempotency.open_records",
    "{record}",
    "Requests that have no final answer yet.",
    ("state",),
    lambda records: [((record.state,), record.count) for record in records],
)
OPEN_RECORD_AGE = Gauge(
    "outbox_idempotency_open_record_age_seconds",
    "outbox.idempotency.open_record.age",
    "s",
    "Age of those requests at this quantile.",
    ("state", "quantile"),
    _ages,
)
TABLE_ROWS = Gauge(
    "outbox_table_rows",
    "outbox.table.rows",
    "{row}",
    "Rows of a table; on PostgreSQL an estimate.",
    ("table",),
    _of_sizes("rows"),
)
TABLE_BYTES = Gauge(
    "outbox_table_bytes",
    "outbox.table.size",
    "By",
    "A table's size with its indexes.",
    ("table",),
    _of_sizes("size_bytes"),
)
DAYS_AHEAD = Gauge(
    "outbox_body_days_ahead",
    "outbox.body.days_ahead",
    "d",
    "Coming days that have a partition for bodies.",
    (),
    lambda days: [((), days)],
)

GROUPS: Mapping[Callable[..., Any], tuple[Gauge, ...]] = {
    read_open_records: (OPEN_RECORDS, OPEN_RECORD_AGE),
    read_table_sizes: (TABLE_ROWS, TABLE_BYTES),
    read_days_ahead: (DAYS_AHEAD,),
}
"""The gauges, by the function that reads them from the database. A value of None is left out."""
