"""OpenTelemetry: a counter and a histogram of claims, and gauges that read the database when they are collected."""

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import Engine

from outbox.default_outbox import default
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.metrics.buckets import LOCK_WAIT_SECONDS
from outbox.metrics.gauges import (
    OpenRecords,
    TableSize,
    check_engine,
    read_days_ahead,
    read_open_records,
    read_table_sizes,
    read_through,
)
from outbox.observer import ObservedClaim, Observer
from outbox.startup_checks import AsyncEngineLike

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ModuleNotFoundError as error:
    raise missing("outbox.metrics.opentelemetry", "opentelemetry", error) from error


def observer(meter: Meter | None = None) -> Observer:
    """Count claims: what `outbox.configure(observe=...)` takes. meter: by default the global provider's, named `outbox`."""
    meter = meter or get_meter("outbox")
    claims = meter.create_counter("outbox.idempotency.claims", "{claim}", "Claims on an idempotency key, by result.")
    waits = meter.create_histogram(
        "outbox.idempotency.lock_wait",
        "s",
        "How long claims waited for a key that another transaction had locked.",
        explicit_bucket_boundaries_advisory=LOCK_WAIT_SECONDS,
    )

    def observe(claim: ObservedClaim) -> None:
        claims.add(1, {"outcome": claim.outcome, "source": claim.source})
        if claim.waited is not None:
            waits.record(claim.waited.total_seconds())

    return observe


def register_gauges(engine: Engine | AsyncEngineLike, *, outbox: Outbox = default, meter: Meter | None = None) -> None:
    """Read the age of open requests and the tables' sizes at each collection.

    engine: an Engine or an AsyncEngine, whose role may SELECT the records. Each of the five gauges takes one connection, for one
    short transaction that writes nothing: of the Engine's pool, or for an AsyncEngine one that is opened for it. What the
    database raises goes to OpenTelemetry, which logs it and continues. Raises `ConfigurationError` for what is no engine.
    """
    check_engine(engine)
    meter = meter or get_meter("outbox")

    def records() -> list[OpenRecords]:
        return read_through(engine, lambda connection: read_open_records(connection, outbox.configuration.tables))

    def sizes() -> list[TableSize]:
        return read_through(engine, lambda connection: read_table_sizes(connection, outbox.configuration.tables))

    def days_ahead() -> list[int]:
        days = read_through(engine, lambda connection: read_days_ahead(connection, outbox.configuration.tables))
        return [] if days is None else [days]

    def gauge(name: str, unit: str, description: str, observe: Callable[[], Iterable[Observation]]) -> None:
        def callback(options: CallbackOptions) -> Iterable[Observation]:
            return observe()

        meter.create_observable_gauge(name, [callback], unit, description)

    gauge(
        "outbox.idempotency.open_records",
        "{record}",
        "Requests that have no final answer yet.",
        lambda: [Observation(record.count, {"state": record.state}) for record in records()],
    )
    gauge(
        "outbox.idempotency.open_record.age",
        "s",
        "Age of those requests at this quantile.",
        lambda: [age for record in records() for age in _ages(record)],
    )
    gauge(
        "outbox.table.rows",
        "{row}",
        "Rows of a table; on PostgreSQL an estimate.",
        lambda: [Observation(size.rows, {"table": size.table}) for size in sizes() if size.rows is not None],
    )
    gauge(
        "outbox.table.size",
        "By",
        "A table's size with its indexes.",
        lambda: [
            Observation(size.size_bytes, {"table": size.table}) for size in sizes() if size.size_bytes is not None
        ],
    )
    gauge(
        "outbox.body.days_ahead",
        "d",
        "Coming days that have a partition for bodies.",
        lambda: [Observation(days) for days in days_ahead()],
    )


def _ages(record: OpenRecords) -> Iterator[Observation]:
    yield Observation(record.age_p95.total_seconds(), {"state": record.state, "quantile": "0.95"})
    yield Observation(record.age_p99.total_seconds(), {"state": record.state, "quantile": "0.99"})
