"""Prometheus: counters and histograms of what a dispatcher does, and gauges of its last reports."""

from collections.abc import Iterable
from typing import Any

from dispatchers.telemetry.events import Activity, Event, Observer, Observers
from dispatchers.telemetry.measures import GAUGES, MAX_NAMES, MEASURES, Names, counts, durations, values_of
from outbox.errors import ConfigurationError
from outbox.extras import missing
from outbox.metrics.measures import Gauge

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing("dispatchers.telemetry.prometheus", "prometheus", error) from error


def observer(registry: CollectorRegistry = REGISTRY, *, max_names: int = MAX_NAMES) -> Observer:
    """Export to `registry`: what `Dispatcher(observe=...)` takes, one for each dispatcher and registry.

    max_names: how many destinations, and how many operations, have series of their own; all others are counted under `other`.
    Raises `ConfigurationError` if the registry has an observer already.
    """
    return _Exporter(registry, max_names, ()).of()


def observers(registry: CollectorRegistry = REGISTRY, *, max_names: int = MAX_NAMES) -> Observers:
    """Export to `registry`, with the label `database`: what `Fleet(observe=...)` takes. See `observer`."""
    return _Exporter(registry, max_names, ("database",))


class _Exporter:
    """first: the labels before those of each metric."""

    def __init__(self, registry: CollectorRegistry, max_names: int, first: tuple[str, ...]) -> None:
        self._names, self._reports = Names(max_names), _Reports(max_names, first)
        try:
            registry.register(self._reports)
        except ValueError as error:
            raise ConfigurationError(
                "this registry has the metrics of another dispatcher already: pass each dispatcher of a process a registry of"
                " its own, prometheus.observer(CollectorRegistry())"
            ) from error
        self._metrics: dict[str, Any] = {
            measure.prometheus: Histogram(
                measure.prometheus,
                measure.description,
                (*first, *measure.labels),
                registry=registry,
                buckets=measure.bounds,
            )
            if measure.bounds
            else Counter(measure.prometheus, measure.description, (*first, *measure.labels), registry=registry)
            for measure in MEASURES
        }

    def of(self, *first: str) -> Observer:
        last = self._reports.last.setdefault(first, {})

        def observe(event: Event) -> None:
            if not isinstance(event, Activity):
                last[type(event)] = event
                return
            for measure, labels, count in counts(event, self._names):
                self._metrics[measure.prometheus].labels(*first, *labels).inc(count)
            for measure, labels, seconds in durations(event, self._names):
                self._metrics[measure.prometheus].labels(*first, *labels).observe(seconds)

        return observe

    def forget(self, *first: str) -> None:
        """Show no gauges of it any more. Its counters stay, as counters of a process do."""
        self._reports.last.pop(first, None)


def page(registry: CollectorRegistry = REGISTRY) -> tuple[bytes, str]:
    """The answer to a scrape, and its content type. It may wait for a database, if the app has registered gauges."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Reports(Collector):
    """Shows the last event of each kind. Before the first there are no values."""

    def __init__(self, max_names: int, first: tuple[str, ...]) -> None:
        self.last: dict[tuple[str, ...], dict[type, Event]] = {}
        self._names = Names(max_names)
        self._first = first

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [self._family(gauge) for gauges in GAUGES.values() for gauge in gauges]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for kind, gauges in GAUGES.items():
            for gauge in gauges:
                family = self._family(gauge)
                for first, last in list(self.last.items()):
                    if kind in last:
                        for labels, value in values_of(gauge, last[kind], self._names).items():
                            family.add_metric([*first, *labels], value)
                yield family

    def _family(self, gauge: Gauge) -> GaugeMetricFamily:
        return GaugeMetricFamily(gauge.prometheus, gauge.description, labels=(*self._first, *gauge.labels))
