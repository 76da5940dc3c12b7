"""The Prometheus and OpenTelemetry bindings, read as their servers read them; the databases are real."""

import asyncio
import logging
import subprocess
import sys
import urllib.request
from datetime import timedelta
from typing import get_args
from uuid import uuid4

import prometheus_client
import pytest
import sqlalchemy as sa
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy.ext.asyncio import create_async_engine
from support.database import TABLES, Client
from support.docs_pages import ROOT, rows_of

import outbox
from outbox.errors import ConfigurationError
from outbox.metrics import gauges, opentelemetry, prometheus
from outbox.observer import ClaimOutcome, ObservedClaim
from outbox.sql.clock import clock, clock_plus

KEYRING = outbox.Keyring({"k1": bytes(range(32))})
CLAIM = ObservedClaim(outcome="hit", source="http", waited=None)
WAITED = ObservedClaim(outcome="wait_timeout", source="inbox:billing", waited=timedelta(milliseconds=300))
NAMES = {
    "audit",
    "callback",
    "destination",
    "dispatcher",
    "entry",
    "event",
    "blocked_group",
    "kid",
    "meta",
    "mismatch",
    "proposal",
    "queue",
    "record",
    "schedule",
    "send_count",
    "settlement",
    "tombstone",
}


def open_record(database, state, age):
    """A request in this state that was made so long ago."""
    id = uuid4()
    values = {
        **dict.fromkeys(("env", "scope", "source", "kid"), "x"),
        **{"id": id, "parent": str(id), "state": state, "fingerprint": b"", "fingerprint_version": 1},
        **dict.fromkeys(("replay_until", "keep_until"), clock()),
        "created_at": clock_plus(-age),
    }
    if state == "leased":
        values |= {"lease_token": id, "lease_until": clock()}
    database.execute(sa.insert(TABLES.record).values(values))


def seconds(age):
    return pytest.approx(age, abs=60)


# --- what the database knows


def test_the_ages_of_open_requests_are_shown_by_state_and_nearest_rank(database):
    for hours in range(1, 101):
        open_record(database, "accepted", timedelta(hours=hours))
    open_record(database, "leased", timedelta(hours=3))

    with database.engine.connect() as connection:
        accepted, leased = gauges.read_open_records(connection, TABLES)

    assert (accepted.state, accepted.count, leased.state, leased.count) == ("accepted", 100, "leased", 1)
    assert accepted.age_p95.total_seconds() == seconds(95 * 3600)
    assert accepted.age_p99.total_seconds() == seconds(99 * 3600)
    assert leased.age_p95 == leased.age_p99
    assert leased.age_p95.total_seconds() == seconds(3 * 3600)


def test_answered_requests_are_not_open_and_no_open_ones_are_zero_old(database, ob):
    Client(database, ob, is_async=False).request()

    with database.engine.connect() as connection:
        found = gauges.read_open_records(connection, TABLES)

    assert found == [gauges.OpenRecords(state="accepted"), gauges.OpenRecords(state="leased")]
    assert [(records.count, records.age_p99) for records in found] == [(0, timedelta(0))] * 2


@pytest.mark.differs(
    "mariadb", "its ANALYZE of the whole database is PostgreSQL's; the sizes are the server's estimates"
)
def test_every_table_has_a_size(database, ob):
    Client(database, ob, is_async=False).request()
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("ANALYZE")

        sizes = {size.table: size for size in gauges.read_table_sizes(connection, TABLES)}

    assert sizes.keys() == NAMES
    assert (sizes["record"].rows, sizes["entry"].rows, sizes["tombstone"].rows) == (1, 1, 0)
    if database.name == "postgresql":
        assert sizes["record"].size_bytes > sizes["tombstone"].size_bytes > 0
    else:
        assert {size.size_bytes for size in sizes.values()} == {None}


def test_the_rows_of_a_table_that_was_never_analyzed_are_unknown(postgresql):
    tables = outbox.define_tables(sa.MetaData(), schema="odd schema", prefix="Odd_")
    postgresql.execute(sa.text('CREATE SCHEMA "odd schema"'))
    tables.metadata.create_all(postgresql.engine)

    with postgresql.engine.connect() as connection:
        sizes = gauges.read_table_sizes(connection, tables)

    assert {size.table for size in sizes} == NAMES
    assert {size.rows for size in sizes} == {None}
    assert all(size.size_bytes for size in sizes)


# --- Prometheus


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def scraped(registry):
    """The samples by name and labels, as a scrape over HTTP finds them."""
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_prometheus_counts_the_claims_of_requests(client_of, registry):
    client = client_of(prometheus.observer(registry))

    for _ in range(3):
        client.request()

    samples = scraped(registry)
    assert samples['outbox_idempotency_claims_total{outcome="miss",source="http"}'] == 1
    assert samples['outbox_idempotency_claims_total{outcome="hit",source="http"}'] == 2
    assert samples["outbox_idempotency_lock_wait_seconds_count"] == 0


def test_prometheus_gets_the_waits_of_those_that_waited(registry):
    observe = prometheus.observer(registry)

    observe(CLAIM)
    observe(WAITED)

    samples = scraped(registry)
    assert samples["outbox_idempotency_lock_wait_seconds_count"] == 1
    assert samples['outbox_idempotency_lock_wait_seconds_bucket{le="0.25"}'] == 0
    assert samples['outbox_idempotency_lock_wait_seconds_bucket{le="0.5"}'] == 1
    assert samples["outbox_idempotency_lock_wait_seconds_sum"] == pytest.approx(0.3)


@pytest.mark.differs("portable", "the sizes of the tables are not read")
def test_prometheus_reads_the_database_at_each_scrape(database, ob, registry):
    prometheus.register_gauges(database.engine, outbox=ob, registry=registry)
    before = scraped(registry)
    open_record(database, "leased", timedelta(hours=2))

    after = scraped(registry)

    assert before["outbox_gauges_up"] == after["outbox_gauges_up"] == 1
    assert before['outbox_idempotency_open_records{state="leased"}'] == 0
    assert after['outbox_idempotency_open_records{state="leased"}'] == 1
    age = 'outbox_idempotency_open_record_age_seconds{quantile="0.99",state="leased"}'
    assert (before[age], after[age]) == (0, seconds(7200))
    sizes = {name for name in after if name.startswith("outbox_table_bytes")}
    assert sizes == (
        {f'outbox_table_bytes{{table="{name}"}}' for name in NAMES} if database.name != "sqlite" else set()
    )


@pytest.mark.parametrize("driver", ["sqlite+aiosqlite", "postgresql+psycopg_async", "postgresql+asyncpg"])
def test_an_async_engine_is_read_by_each_caller(request, ob, registry, driver):
    """From a thread, and from the event loop that uses the engine: as an ASGI app answers /metrics."""
    database = request.getfixturevalue(driver.partition("+")[0])
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    open_record(database, "leased", timedelta(hours=2))

    async def main():
        engine = create_async_engine(database.url.set(drivername=driver))
        prometheus.register_gauges(engine, outbox=ob, registry=registry)
        opentelemetry.register_gauges(engine, outbox=ob, meter=provider.get_meter("test"))
        async with engine.connect() as connection:  # whose loop is this one
            await connection.execute(sa.text("SELECT 1"))
            within, points = scraped(registry), collected(reader)
        beside = await asyncio.to_thread(scraped, registry)
        await engine.dispose()
        return within, beside, points

    within, beside, points = asyncio.run(main())
    provider.shutdown()

    for samples in (within, beside):
        assert samples["outbox_gauges_up"] == 1
        assert samples['outbox_idempotency_open_records{state="leased"}'] == 1
    counts = [(a["state"], point.value) for a, point in points["outbox.idempotency.open_records"]]
    assert sorted(counts) == [("accepted", 0), ("leased", 1)]


@pytest.mark.parametrize("register", [prometheus.register_gauges, opentelemetry.register_gauges])
def test_gauges_are_read_through_an_engine_only(ob, register):
    with pytest.raises(ConfigurationError, match="the gauges need an Engine or an AsyncEngine, not str"):
        register("sqlite://", outbox=ob)


def test_registering_the_gauges_sends_nothing_to_the_database(ob):
    unreachable = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    registry = prometheus_client.CollectorRegistry(auto_describe=True)

    prometheus.register_gauges(unreachable, outbox=ob, registry=registry)

    with pytest.raises(ValueError, match="Duplicated timeseries"):
        prometheus.register_gauges(unreachable, outbox=ob, registry=registry)


def test_an_unavailable_database_leaves_the_other_metrics_of_a_scrape(ob, registry, caplog):
    observe = prometheus.observer(registry)
    unreachable = sa.create_engine("postgresql+psycopg://nobody:hidden@127.0.0.1:1/none")
    prometheus.register_gauges(unreachable, outbox=ob, registry=registry)
    observe(CLAIM)

    with caplog.at_level(logging.WARNING, "outbox"):
        samples = scraped(registry)

    assert samples["outbox_gauges_up"] == 0
    assert samples['outbox_idempotency_claims_total{outcome="hit",source="http"}'] == 1
    assert not any(name.startswith("outbox_idempotency_open") for name in samples)
    assert "cannot read the outbox's gauges: OperationalError" in caplog.text
    assert "hidden" not in caplog.text


# --- OpenTelemetry


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    provider = MeterProvider([reader])
    yield provider.get_meter("test")
    provider.shutdown()


def collected(reader):
    """The data points by instrument; of each its attributes and the point."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    metrics = [
        metric for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    ]
    return {metric.name: [(dict(point.attributes), point) for point in metric.data.data_points] for metric in metrics}


def test_opentelemetry_counts_the_claims_of_requests(client_of, meter, reader):
    client = client_of(opentelemetry.observer(meter))

    for _ in range(3):
        client.request()

    counted = [(attributes, point.value) for attributes, point in collected(reader)["outbox.idempotency.claims"]]
    assert counted == [({"outcome": "miss", "source": "http"}, 1), ({"outcome": "hit", "source": "http"}, 2)]


def test_opentelemetry_gets_the_waits_of_those_that_waited(meter, reader):
    observe = opentelemetry.observer(meter)

    observe(CLAIM)
    observe(WAITED)

    ((attributes, point),) = collected(reader)["outbox.idempotency.lock_wait"]
    assert (attributes, point.count, point.sum) == ({}, 1, pytest.approx(0.3))
    assert point.explicit_bounds[0] == 0.005


def test_opentelemetry_reads_the_database_at_each_collection(database, ob, meter, reader):
    opentelemetry.register_gauges(database.engine, outbox=ob, meter=meter)
    open_record(database, "accepted", timedelta(hours=2))

    found = collected(reader)

    counts = {attributes["state"]: point.value for attributes, point in found["outbox.idempotency.open_records"]}
    ages = {tuple(sorted(a.values())): point.value for a, point in found["outbox.idempotency.open_record.age"]}
    assert counts == {"accepted": 1, "leased": 0}
    assert ages[("0.95", "accepted")] == ages[("0.99", "accepted")] == seconds(7200)
    assert ages[("0.99", "leased")] == 0
    if database.name == "postgresql":
        assert {attributes["table"] for attributes, _ in found["outbox.table.size"]} == NAMES
    else:
        assert {attributes["table"] for attributes, _ in found["outbox.table.rows"]} == NAMES


@pytest.fixture
def client_of(database):
    """A client of the shop whose outbox has this observer."""
    return lambda observe: Client(database, outbox.Outbox(KEYRING, env="test", observe=observe), is_async=False)


# --- what is loaded


def test_the_outbox_loads_neither_library():
    program = "import sys, outbox, outbox.metrics; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert "outbox.metrics" in loaded
    assert not {"prometheus_client", "opentelemetry"} & set(loaded)


@pytest.mark.parametrize(
    ("binding", "module", "package"),
    [
        ("prometheus", "prometheus_client", "prometheus_client"),
        ("opentelemetry", "opentelemetry.metrics", "opentelemetry"),
    ],
)
def test_a_binding_without_its_library_names_the_extra(binding, module, package):
    program = f"import sys; sys.modules['{module}'] = None; import outbox.metrics.{binding}"

    failed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert failed.stderr.splitlines()[-1] == (
        f"ImportError: outbox.metrics.{binding} needs the package '{package}':"
        f" pip install 'sqlalchemy-outbox[{binding}]'"
    )


# --- docs/monitoring.md

PAGE = (ROOT / "docs" / "monitoring.md").read_text()


def test_the_metrics_of_the_page_are_those_of_the_bindings(sqlite, ob, registry, meter, reader):
    prometheus.observer(registry)
    prometheus.register_gauges(sqlite.engine, outbox=ob, registry=registry)
    opentelemetry.observer(meter)(WAITED)
    opentelemetry.register_gauges(sqlite.engine, outbox=ob, meter=meter)

    printed = {row["metric"].removesuffix("_total"): row["kind"] for row in rows_of(PAGE, "metric", "kind")}

    assert printed == {family.name: family.type for family in registry.collect()}
    assert all(f"`{name}`" in PAGE for name in collected(reader))


def test_the_outcomes_of_the_page_are_those_of_the_code():
    assert tuple(row["outcome"] for row in rows_of(PAGE, "outcome", "the key")) == get_args(ClaimOutcome)
