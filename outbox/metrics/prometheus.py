"""Prometheus: a counter and a histogram of claims, and gauges that read the database when they are scraped."""

import logging
from collections.abc import Iterable

from sqlalchemy import Connection, Engine

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
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing("outbox.metrics.prometheus", "prometheus", error) from error

log = logging.getLogger("outbox.metrics")


def observer(registry: CollectorRegistry = REGISTRY) -> Observer:
    """Count claims in `registry`: what `outbox.configure(observe=...)` takes. Once a registry, or prometheus_client raises."""
    claims = Counter(
        "outbox_idempotency_claims_total",
        "Claims on an idempotency key, by result.",
        ["outcome", "source"],
        registry=registry,
    )
    waits = Histogram(
        "outbox_idempotency_lock_wait_seconds",
        "How long claims waited for a key that another transaction had locked.",
        registry=registry,
        buckets=LOCK_WAIT_SECONDS,
    )

    def observe(claim: ObservedClaim) -> None:
        claims.labels(claim.outcome, claim.source).inc()
        if claim.waited is not None:
            waits.observe(claim.waited.total_seconds())

    return observe


def register_gauges(
    engine: Engine | AsyncEngineLike, *, outbox: Outbox = default, registry: CollectorRegistry = REGISTRY
) -> Collector:
    """Read the age of open requests and the tables' sizes at each scrape. Returns the collector, which can be unregistered.

    engine: an Engine or an AsyncEngine, whose role may SELECT the records. A scrape takes one connection, for one short
    transaction that writes nothing: of the Engine's pool, or for an AsyncEngine one that is opened for the scrape, as the
    scrape waits for it whatever the app's event loop does. While the database does not answer, `outbox_gauges_up` is 0 and
    the others are absent. Raises `ConfigurationError` for what is no engine.
    """
    check_engine(engine)
    collector = _Gauges(engine, outbox)
    registry.register(collector)
    return collector


class _Gauges(Collector):
    def __init__(self, engine: Engine | AsyncEngineLike, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """What there will be: without it, registering would read the database."""
        return [_up(), *_open_records([]), *_table_sizes([]), _days_ahead(None)]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        tables = self._outbox.configuration.tables

        def read(connection: Connection) -> tuple[list[OpenRecords], list[TableSize], int | None]:
            open_records, sizes = read_open_records(connection, tables), read_table_sizes(connection, tables)
            return open_records, sizes, read_days_ahead(connection, tables)

        try:
            records, sizes, days_ahead = read_through(self._engine, read)
        except Exception as error:  # one that got out would take every other metric of the scrape with it
            log.warning("cannot read the outbox's gauges: %s: %s; outbox_gauges_up is 0", type(error).__name__, error)
            return [_up(0)]
        return [_up(1), *_open_records(records), *_table_sizes(sizes), _days_ahead(days_ahead)]


def _up(*values: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily("outbox_gauges_up", "Whether the outbox's gauges could be read.", labels=[])
    for value in values:
        family.add_metric([], value)
    return family


def _open_records(records: Iterable[OpenRecords]) -> list[GaugeMetricFamily]:
    count = GaugeMetricFamily(
        "outbox_idempotency_open_records", "Requests that have no final answer yet.", labels=["state"]
    )
    age = GaugeMetricFamily(
        "outbox_idempotency_open_record_age_seconds",
        "Age of those requests at this quantile.",
        labels=["state", "quantile"],
    )
    for record in records:
        count.add_metric([record.state], record.count)
        age.add_metric([record.state, "0.95"], record.age_p95.total_seconds())
        age.add_metric([record.state, "0.99"], record.age_p99.total_seconds())
    return [count, age]


def _table_sizes(sizes: Iterable[TableSize]) -> list[GaugeMetricFamily]:
    rows = GaugeMetricFamily("outbox_table_rows", "Rows of a table; on PostgreSQL an estimate.", labels=["table"])
    size_bytes = GaugeMetricFamily("outbox_table_bytes", "A table's size with its indexes.", labels=["table"])
    for size in sizes:
        if size.rows is not None:
            rows.add_metric([size.table], size.rows)
        if size.size_bytes is not None:
            size_bytes.add_metric([size.table], size.size_bytes)
    return [rows, size_bytes]


def _days_ahead(days: int | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily("outbox_body_days_ahead", "Coming days that have a partition for bodies.", labels=[])
    if days is not None:
        family.add_metric([], days)
    return family
