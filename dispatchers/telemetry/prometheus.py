"""Prometheus: counters and histograms of what a dispatcher does, and gauges of its last reports."""

from collections.abc import Iterable
from typing import Any

from dispatchers.telemetry.events import Activity, Event, Observer
from dispatchers.telemetry.measures import GAUGES, MEASURES, NAMES_MAX, Names, counts, durations, values_of
from outbox.errors import ConfigurationError
from outbox.extras import missing

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing("dispatchers.telemetry.prometheus", "prometheus", error) from error


def observer(registry: CollectorRegistry = REGISTRY, *, names_max: int = NAMES_MAX) -> Observer:
    """Export to `registry`: what `Dispatcher(observe=...)` takes, one for each dispatcher and registry.

    names_max: how many destinations, and how many operations, have series of their own; all others are counted under `other`.
    Raises `ConfigurationError` if the registry has an observer already.
    """
    names, reports = Names(names_max), _Reports(names_max)
    try:
        registry.register(reports)
    except ValueError as error:
        raise ConfigurationError(
            "this registry has the metrics of another dispatcher already: pass each dispatcher of a process a registry of its"
            " own, prometheus.observer(CollectorRegistry())"
        ) from error
    metrics: dict[str, Any] = {
        measure.prometheus: Histogram(
            measure.prometheus, measure.description, measure.labels, registry=registry, buckets=measure.bounds
        )
        if measure.bounds
        else Counter(measure.prometheus, measure.description, measure.labels, registry=registry)
        for measure in MEASURES
    }

    def observe(event: Event) -> None:
        if not isinstance(event, Activity):
            reports.last[type(event)] = event
            return
        for measure, labels, count in counts(event, names):
            metrics[measure.prometheus].labels(*labels).inc(count)
        for measure, labels, seconds in durations(event, names):
            metrics[measure.prometheus].labels(*labels).observe(seconds)

    return observe


def page(registry: CollectorRegistry = REGISTRY) -> tuple[bytes, str]:
    """The answer to a scrape, and its content type. It may wait for a database, if the app has registered gauges."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Reports(Collector):
    """Shows the last event of each kind. Before the first there are no values."""

    def __init__(self, names_max: int) -> None:
        self.last: dict[type, Event] = {}
        self._names = Names(names_max)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(gauge.prometheus, gauge.description, labels=gauge.labels)
            for gauges in GAUGES.values()
            for gauge in gauges
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for kind, gauges in GAUGES.items():
            for gauge in gauges:
                family = GaugeMetricFamily(gauge.prometheus, gauge.description, labels=gauge.labels)
                if kind in self.last:
                    for labels, value in values_of(gauge, self.last[kind], self._names).items():
                        family.add_metric(labels, value)
                yield family
