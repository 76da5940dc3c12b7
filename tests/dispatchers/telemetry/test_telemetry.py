"""The dispatcher's Prometheus and OpenTelemetry bindings, read as their servers read them; the databases are real."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from support.database import Database
from support.docs_pages import ROOT, rows_of
from support.entries import age, put, put_one, run_once
from support.lookups import QUIET, keyless

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.telemetry import opentelemetry, prometheus
from dispatchers.telemetry.events import Activity, Attempt, Backlog, Levels
from outbox.errors import ConfigurationError

LEVELS = Levels(
    in_flight={"crm": 2},
    claimed_ahead={"crm": 5},
    permits={"crm": 100, "mail": 10},
    callbacks_waiting=3,
    unsettled=4,
    throttled={"mail": "breaker"},
    suspended=True,
    served=True,
)
BACKLOG = Backlog(
    entries={("crm", "pending"): 7},
    oldest_due_seconds={"crm": 12.5},
    blocked_groups=1,
    schedule_lag_seconds={"report": 3.0},
)
ACTIVITY = Activity(
    attempts=[
        Attempt("crm", "crm.upsert", False, "delivered", 0.2, 1.5),
        Attempt("crm", "crm.upsert", False, "unknown", 3.0, None),
        Attempt("crm", "crm.upsert", True, "absent", 0.1, None),
    ],
    claims={"crm": 2},
    settlements={("crm", "delivered"): 1, ("crm", "retry"): 1},
    lost_leases={"crm": 1},
    blocked_seconds={("crm", "crm.upsert"): 6.5},
    skipped_instants={"report": 59},
)


def many(count: int) -> Activity:
    """One send to each of so many destinations."""
    attempts = [Attempt(f"crm:{n}", "crm.upsert", False, "delivered", 0.2, 1.5) for n in range(count)]
    return Activity(
        attempts=attempts,
        claims={each.destination: 1 for each in attempts},
        settlements={(each.destination, "delivered"): 1 for each in attempts},
        lost_leases={},
    )


def many_operations(count: int) -> Activity:
    attempts = [Attempt("crm", f"crm.{n}", False, "delivered", 0.2, 1.5) for n in range(count)]
    return Activity(attempts=attempts, claims={}, settlements={}, lost_leases={})


# --- Prometheus


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


Samples = dict[tuple[str, tuple[str, ...]], float]


def scraped(registry: prometheus_client.CollectorRegistry) -> Samples:
    """The samples by name and the values of their labels, as a scraper parses them."""
    families = text_string_to_metric_families(prometheus.page(registry)[0].decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def test_prometheus_counts_what_a_dispatcher_does(
    database: Database, ob: outbox.Outbox, registry: prometheus_client.CollectorRegistry
) -> None:
    put(database, ob, count=3)
    put_one(database, ob, "mail.send")
    adapters = {"crm": MemoryAdapter([Rejected("no")]), "mail": keyless("answer")}
    observe = prometheus.observer(registry)

    for _ in range(2):
        run_once(database, ob, adapters=adapters, observe=observe)
        age(database, QUIET)

    samples = scraped(registry)
    assert samples["outbox_sends_total", ("crm", "crm.upsert", "delivered")] == 2
    assert samples["outbox_sends_total", ("crm", "crm.upsert", "rejected")] == 1
    assert samples["outbox_sends_total", ("mail", "mail.send", "unknown")] == 1
    assert samples["outbox_lookups_total", ("mail", "mail.send", "found")] == 1
    assert samples["outbox_claimed_total", ("crm",)] == 3
    assert samples["outbox_settled_total", ("crm", "delivered")] == 2
    assert samples["outbox_settled_total", ("crm", "failed")] == 1
    assert samples["outbox_send_duration_seconds_count", ("crm",)] == 3
    assert samples["outbox_send_duration_seconds_count", ("mail",)] == 1
    assert samples["outbox_send_delay_seconds_count", ("crm",)] == 3
    assert samples["outbox_send_permits", ("crm",)] == 100


def test_prometheus_shows_the_last_levels_and_the_last_backlog(registry: prometheus_client.CollectorRegistry) -> None:
    observe = prometheus.observer(registry)
    assert not [name for name, _ in scraped(registry) if name == "outbox_unsettled"]

    observe(LEVELS)
    observe(BACKLOG)

    samples = scraped(registry)
    assert samples["outbox_sends_in_flight", ("crm",)] == 2
    assert samples["outbox_claimed_ahead", ("crm",)] == 5
    assert samples["outbox_send_permits", ("mail",)] == 10
    assert samples["outbox_destination_throttled", ("mail", "breaker")] == 1
    assert samples["outbox_callbacks_waiting", ()] == 3
    assert samples["outbox_unsettled", ()] == 4
    assert samples["outbox_sending_suspended", ()] == 1
    assert samples["outbox_database_served", ()] == 1
    assert samples["outbox_entries", ("crm", "pending")] == 7
    assert samples["outbox_oldest_due_seconds", ("crm",)] == 12.5
    assert samples["outbox_blocked_groups", ()] == 1
    observe(Backlog(entries={}, oldest_due_seconds={}, blocked_groups=0))
    assert ("outbox_oldest_due_seconds", ("crm",)) not in scraped(registry)


def test_the_histograms_of_prometheus_are_in_seconds(registry: prometheus_client.CollectorRegistry) -> None:
    prometheus.observer(registry)(ACTIVITY)

    samples = scraped(registry)
    assert samples["outbox_send_duration_seconds_sum", ("crm",)] == pytest.approx(3.2)
    assert samples["outbox_send_duration_seconds_bucket", ("crm", "0.1")] == 0
    assert samples["outbox_send_duration_seconds_bucket", ("crm", "0.25")] == 1
    assert samples["outbox_send_delay_seconds_bucket", ("crm", "1.0")] == 0
    assert samples["outbox_send_delay_seconds_bucket", ("crm", "2.5")] == 1
    assert samples["outbox_leases_lost_total", ("crm",)] == 1


def test_a_registry_takes_one_observer(registry: prometheus_client.CollectorRegistry) -> None:
    prometheus.observer(registry)

    with pytest.raises(ConfigurationError, match="pass each dispatcher of a process a registry of its"):
        prometheus.observer(registry)


# --- bounded labels


def flood(observe: Any, names: int) -> None:
    """A destination and an operation for each customer, with every result."""
    each = range(names)
    attempts = [
        Attempt(f"crm:{n}", f"crm.upsert.{n}", is_lookup, result, 0.1, 0.1)
        for n in each
        for is_lookup, result in ((False, "delivered"), (False, "unknown"), (True, "found"))
    ]
    counts = {f"crm:{n}": 1 for n in each}
    settlements = {(f"crm:{n}", "delivered"): 1 for n in each}
    observe(Activity(attempts=attempts, claims=counts, settlements=settlements, lost_leases=counts))
    throttled = {f"crm:{n}": "paused" for n in each}
    observe(
        Levels(
            in_flight=counts,
            claimed_ahead=counts,
            permits=counts,
            callbacks_waiting=1,
            unsettled=1,
            throttled=throttled,
            suspended=False,
            served=True,
        )
    )
    waiting = {(f"crm:{n}", "pending"): 1 for n in each}
    observe(Backlog(entries=waiting, oldest_due_seconds={f"crm:{n}": 1.0 for n in each}, blocked_groups=1))


def test_a_thousand_names_make_no_more_series_than_a_hundred(
    registry: prometheus_client.CollectorRegistry, meter: Meter, reader: InMemoryMetricReader
) -> None:
    """Of each binding: the limit is one hundred, and all further names share the series of `other`."""
    few = prometheus_client.CollectorRegistry()
    flood(prometheus.observer(few), 101)
    flood(prometheus.observer(registry), 1000)
    flood(opentelemetry.observer(meter), 1000)

    series = [sum(len(family.samples) for family in each.collect()) for each in (few, registry)]
    exported: Any = reader.get_metrics_data()
    points = [
        len(metric.data.data_points)
        for resource in exported.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    assert series[0] == series[1]
    assert max(points) == 2 * 101  # sends: each pair of names, and `other`, with two results


def test_destinations_beyond_the_limit_are_counted_under_other(registry: prometheus_client.CollectorRegistry) -> None:
    observe = prometheus.observer(registry)

    for _ in range(2):
        observe(many(250))

    samples = scraped(registry)
    sends = {labels: value for (name, labels), value in samples.items() if name == "outbox_sends_total"}
    assert len(sends) == 101
    assert sends["crm:0", "crm.upsert", "delivered"] == 2
    assert sends["other", "other", "delivered"] == 300
    assert samples["outbox_claimed_total", ("other",)] == 300
    assert samples["outbox_settled_total", ("other", "delivered")] == 300
    assert samples["outbox_send_duration_seconds_count", ("other",)] == 300
    assert len([name for name, _ in samples if name == "outbox_send_delay_seconds_count"]) == 101


def test_operations_beyond_the_limit_are_counted_under_other(registry: prometheus_client.CollectorRegistry) -> None:
    observe = prometheus.observer(registry, max_names=10)

    observe(many_operations(25))

    sends = {labels: value for (name, labels), value in scraped(registry).items() if name == "outbox_sends_total"}
    assert len(sends) == 11
    assert sends["crm", "other", "delivered"] == 15


def test_gauges_beyond_the_limit_are_added_up_and_ages_are_the_oldest(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    observe = prometheus.observer(registry, max_names=1)

    observe(
        Backlog(
            entries={("a", "pending"): 1, ("b", "pending"): 2, ("c", "pending"): 3},
            oldest_due_seconds={"a": 1.0, "b": 9.0, "c": 5.0},
            blocked_groups=0,
        )
    )

    samples = scraped(registry)
    assert samples["outbox_entries", ("a", "pending")] == 1
    assert samples["outbox_entries", ("other", "pending")] == 5
    assert samples["outbox_oldest_due_seconds", ("other",)] == 9


# --- OpenTelemetry


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader: InMemoryMetricReader) -> Iterator[Meter]:
    provider = MeterProvider([reader])
    yield provider.get_meter("test")
    provider.shutdown()


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    return {metric.name: metric for scope in scopes for metric in scope.metrics}


def points(metric: Any) -> list[tuple[dict[str, str], Any]]:
    return [(dict(point.attributes), point) for point in metric.data.data_points]


def test_opentelemetry_names_follow_its_messaging_conventions(
    database: Database, ob: outbox.Outbox, meter: Meter, reader: InMemoryMetricReader
) -> None:
    put(database, ob, count=2)

    run_once(database, ob, adapters={"crm": MemoryAdapter([Rejected("no")])}, observe=opentelemetry.observer(meter))

    found = collected(reader)
    sending = {
        "messaging.system": "outbox",
        "messaging.destination.name": "crm",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    sent = found["messaging.client.sent.messages"]
    by_result = {attributes["outbox.result"]: (attributes, point.value) for attributes, point in points(sent)}
    delivered = sending | {"outbox.operation": "crm.upsert", "outbox.result": "delivered"}
    assert sent.unit == "{message}"
    assert by_result["delivered"] == (delivered, 1)
    assert by_result["rejected"] == (delivered | {"outbox.result": "rejected", "error.type": "rejected"}, 1)
    duration = found["messaging.client.operation.duration"]
    ((attributes, point),) = points(duration)
    assert (duration.unit, attributes, point.count) == ("s", sending, 2)
    assert point.explicit_bounds[:3] == (0.005, 0.01, 0.025)


def test_opentelemetry_has_the_database_of_a_fleet_as_an_attribute(meter: Meter, reader: InMemoryMetricReader) -> None:
    observers = opentelemetry.observers(meter)
    for database in ("east", "west"):
        observers.of(database)(ACTIVITY)
        observers.of(database)(LEVELS)
    observers.forget("west")

    found = collected(reader)

    assert {each["outbox.database"] for each, _ in points(found["outbox.claimed"])} == {"east", "west"}
    assert {each["outbox.database"] for each, _ in points(found["outbox.unsettled"])} == {"east"}


def test_opentelemetry_observes_the_last_levels_and_backlog(meter: Meter, reader: InMemoryMetricReader) -> None:
    observe = opentelemetry.observer(meter)

    for event in (ACTIVITY, LEVELS, BACKLOG):
        observe(event)

    found = collected(reader)
    values = {
        (name, *attributes.values()): point.value
        for name in ("outbox.sends.in_flight", "outbox.destination.throttled", "outbox.entries", "outbox.leases.lost")
        for attributes, point in points(found[name])
    }
    assert values == {
        ("outbox.sends.in_flight", "outbox", "crm"): 2,
        ("outbox.destination.throttled", "outbox", "mail", "breaker"): 1,
        ("outbox.entries", "outbox", "crm", "pending"): 7,
        ("outbox.leases.lost", "outbox", "crm"): 1,
    }


def test_opentelemetry_has_the_bounds_of_prometheus(meter: Meter, reader: InMemoryMetricReader) -> None:
    observe = opentelemetry.observer(meter, max_names=5)

    observe(many(20))

    sent = points(collected(reader)["messaging.client.sent.messages"])
    assert len(sent) == 6
    assert [point.value for attributes, point in sent if attributes["messaging.destination.name"] == "other"] == [15]


# --- what is loaded


def test_the_dispatcher_loads_neither_library_and_names_the_extra() -> None:
    program = """
import sys, dispatchers.process.dispatcher
print(*{"prometheus_client", "opentelemetry"} & set(sys.modules))
for extra, package in ("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry.metrics"):
    sys.modules[package] = None
    try:
        __import__(f"dispatchers.telemetry.{extra}")
    except ImportError as error:
        print(error)
"""

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.splitlines() == [
        "",
        "dispatchers.telemetry.prometheus needs the package 'prometheus_client':"
        " pip install 'sqlalchemy-outbox[prometheus]'",
        "dispatchers.telemetry.opentelemetry needs the package 'opentelemetry':"
        " pip install 'sqlalchemy-outbox[opentelemetry]'",
    ]


# --- docs/monitoring.md

PAGE = (ROOT / "docs" / "monitoring.md").read_text()


def test_the_page_lists_the_dispatchers_metrics_with_kinds_and_labels(
    registry: prometheus_client.CollectorRegistry, meter: Meter, reader: InMemoryMetricReader
) -> None:
    for observe in (prometheus.observer(registry), opentelemetry.observer(meter)):
        for event in (ACTIVITY, LEVELS, BACKLOG):
            observe(event)

    rows = rows_of(PAGE, "metric of the dispatcher", "kind", "labels", "OpenTelemetry")

    printed = {
        row["metric of the dispatcher"].removesuffix("_total"): (row["kind"], set(re.findall(r"\w+", row["labels"])))
        for row in rows
    }
    assert printed == {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in registry.collect()
    }
    assert {row["OpenTelemetry"] for row in rows} == set(collected(reader))
