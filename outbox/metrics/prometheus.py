"""Prometheus: a counter and a histogram of claims, and gauges that read the database when they are scraped."""

import logging
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Engine

from outbox.default_outbox import default
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.metrics.gauges import check_engine, read_through
from outbox.metrics.measures import CLAIMS, GROUPS, LOCK_WAIT_SECONDS, LOCK_WAITS, Gauge
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
    """Return a function that counts claims in `registry`, for `outbox.configure(observe=...)`.

    Call it once for a registry; prometheus_client raises at a second call.
    """
    claims = Counter("outbox_idempotency_claims_total", CLAIMS, ["outcome", "source"], registry=registry)
    waits = Histogram("outbox_idempotency_lock_wait_seconds", LOCK_WAITS, registry=registry, buckets=LOCK_WAIT_SECONDS)

    def observe(claim: ObservedClaim) -> None:
        claims.labels(claim.outcome, claim.source).inc()
        if claim.waited is not None:
            waits.observe(claim.waited.total_seconds())

    return observe


def register_gauges(
    engine: Engine | AsyncEngineLike, *, outbox: Outbox = default, registry: CollectorRegistry = REGISTRY
) -> Collector:
    """Read the age of open requests and the tables' sizes at each scrape. Returns the collector, so that you can unregister it.

    engine: an Engine or an AsyncEngine. Its role needs SELECT on the records. A scrape uses one connection for one short
        transaction that only reads: from the Engine's pool, or, for an AsyncEngine, a new connection, because the scrape must
        not depend on the app's event loop. While the database does not answer, `outbox_gauges_up` is 0 and the other gauges
        are absent. Raises `ConfigurationError` if `engine` is not an engine.
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
        """The metrics that `collect` yields: without this method, registering would read the database."""
        return [_up(), *(_family(gauge) for gauges in GROUPS.values() for gauge in gauges)]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        tables = self._outbox.configuration.tables

        def read(connection: Connection) -> list[GaugeMetricFamily]:
            found = {read: read(connection, tables) for read in GROUPS}
            return [_family(gauge, found[read]) for read, gauges in GROUPS.items() for gauge in gauges]

        try:
            return [_up(1), *read_through(self._engine, read)]
        except Exception as error:  # one that got out would take every other metric of the scrape with it
            log.warning("cannot read the outbox's gauges: %s: %s; outbox_gauges_up is 0", type(error).__name__, error)
            return [_up(0)]


def _up(*values: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily("outbox_gauges_up", "Whether the outbox's gauges could be read.", labels=[])
    for value in values:
        family.add_metric([], value)
    return family


def _family(gauge: Gauge, *found: Any) -> GaugeMetricFamily:
    """The gauge with its values. found: what its group has read; without it, there is no value."""
    family = GaugeMetricFamily(gauge.prometheus, gauge.description, labels=gauge.labels)
    for read in found:
        for labels, value in gauge.values(read):
            if value is not None:
                family.add_metric(labels, value)
    return family
