"""The layout at scale as its operators meet it: the command, the roles, migrations, the app's own Alembic, metrics."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import prometheus_client
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sqlalchemy.orm import Session
from support.alembic_projects import AMONG, LEFT_OUT, Project, call_ours
from support.body_partitions import add, days_pass, drop, layout, stored_bodies, switch_on, take_away, today
from support.database import REQUEST, TABLES, Base, Client, Database
from support.migrations import ODD, everything, run_script
from support.migrations import Database as Blank
from support.retention import DAY, clean

import outbox
from dispatchers.cli import main
from dispatchers.maintenance.body_partitions import Drops, drop_days
from dispatchers.maintenance.jobs import keep_bodies
from dispatchers.store.database import DatabaseStore
from outbox import migrations
from outbox.metrics import gauges, opentelemetry, prometheus
from outbox.sql.schema.identifiers import quoted

pytest_plugins = ["support.blank_databases"]
MONTH = 32  # days


@pytest.fixture
def by_day(postgresql: Database) -> Database:
    switch_on(postgresql)
    return postgresql


@pytest.fixture
def shop(by_day: Database, ob: outbox.Outbox) -> Client:
    return Client(by_day, ob, is_async=False)


def answer_only(session: Session, claim: outbox.Claim) -> None:
    claim.respond(201, {"order": "placed"})


# --- the command


def invoke(database: Database | Blank, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--database", database.url.render_as_string(hide_password=False)])


def test_one_command_switches_on_and_one_off(postgresql: Database) -> None:
    on = invoke(postgresql, "db", "partition")
    assert (on.exit_code, on.stdout) == (
        0,
        "new response bodies are stored in a table partitioned by day\n",
    )
    assert layout(postgresql).is_on

    off = invoke(postgresql, "db", "partition", "--undo", "--json")
    assert (off.exit_code, json.loads(off.stdout)) == (0, {"partitioned": False})
    assert not layout(postgresql).is_on


def test_on_sqlite_the_command_is_refused(sqlite: Database) -> None:
    refused = invoke(sqlite, "db", "partition")

    assert refused.exit_code == 1
    assert "need PostgreSQL, and not its portable mode: elsewhere they stay in the records" in refused.stderr


def test_db_check_fails_while_tomorrows_partition_is_missing(by_day: Database) -> None:
    by_day.execute(sa.text("CREATE TABLE outbox_version (version_num text)"))
    by_day.execute(sa.text(f"INSERT INTO outbox_version VALUES ('{migrations.head()}')"))
    assert invoke(by_day, "db", "check").exit_code == 0
    take_away(by_day, today(by_day) + DAY)

    checked = invoke(by_day, "db", "check")

    assert checked.exit_code == 1
    assert f"the partition for the response bodies of {today(by_day) + DAY} is missing" in checked.stderr
    assert invoke(by_day, "maintenance", "--window", "1d").exit_code == 0
    assert invoke(by_day, "db", "check").exit_code == 0


def test_maintenance_prints_what_it_did_to_the_days(shop: Client, by_day: Database) -> None:
    shop.request(answer_only)
    days_pass(by_day, MONTH)
    day = today(by_day) - MONTH * DAY
    take_away(by_day, today(by_day) + DAY)

    dry = invoke(by_day, "maintenance", "--window", "1d", "--dry-run")
    take_away(by_day, today(by_day) + 2 * DAY)
    wet = invoke(by_day, "maintenance", "--window", "1d", "--json")

    assert dry.stdout.splitlines()[1:] == [f"would drop the partitions of {day}; partitions exist for 0 days ahead"]
    assert dry.exit_code == 1, "tomorrow's is missing, and a dry run makes none"
    bodies = {"added": 2, "dropped": [str(day)], "due": [], "why": None, "days_ahead": 7}
    assert json.loads(wet.stdout)["bodies"] == bodies
    assert invoke(by_day, "maintenance", "--window", "1d").stdout.splitlines()[1:] == [
        "dropped the partitions of no day; partitions exist for 7 days ahead"
    ]


# --- the database's roles


@pytest.fixture
def names(blank_postgresql: Blank) -> Iterator[dict[str, str]]:
    """Five roles of this test's own."""
    kinds = ("app", "dispatcher", "maintenance", "dashboard", "operator")
    names = {kind: f"{kind}'s {uuid4().hex[:8]}" for kind in kinds}
    yield names
    with blank_postgresql.begin() as connection:
        for name in map(quoted, names.values()):
            connection.exec_driver_sql(f"DROP OWNED BY {name}")
            connection.exec_driver_sql(f"DROP ROLE {name}")


def opened(blank: Blank, role: str | None = None) -> Database:
    url = (
        blank.url
        if role is None
        else blank.url.update_query_dict({"options": f"-c role={role.replace(' ', chr(92) + ' ')}"})
    )
    return Database(url)


@pytest.mark.parametrize("order", ["roles first", "layout first"])
def test_each_role_does_its_part_and_the_owner_drops(
    blank_postgresql: Blank, names: dict[str, str], ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    migrations.upgrade(blank_postgresql.url)
    owner = opened(blank_postgresql)
    steps = [lambda: run_script(blank_postgresql, migrations.roles(**names)), lambda: switch_on(owner)]
    for step in steps if order == "roles first" else reversed(steps):
        step()
    Base.metadata.create_all(owner.engine)
    app, sending, reading = (opened(blank_postgresql, names[kind]) for kind in ("app", "dispatcher", "dashboard"))
    shop = Client(app, ob, is_async=False)

    first = shop.request(answer_only)  # without any right to write bodies
    assert shop.request() == first
    days_pass(owner, MONTH)
    clean(owner)
    take_away(owner, today(owner) + DAY)
    with caplog.at_level(logging.INFO, "outbox.maintenance"):
        store = DatabaseStore(sending.engine, ob.configuration)
        asyncio.run(keep_bodies(store.run, store.run_apart, TABLES))
    printed = invoke(sending, "maintenance", "--window", "1d").stdout

    day = today(owner) - MONTH * DAY
    reported = [record.getMessage() for record in caplog.records if record.name == "outbox.maintenance"]
    assert reported == [
        "created 1 body partitions for the coming days",
        f"cannot drop 1 expired body partitions, the oldest of {day}: this role does not own the tables; run `outbox"
        " maintenance` as their owner",
    ]
    assert f"not dropped: {day}: only the owner of the tables may drop them" in printed
    assert drop(owner).dropped == (day,)
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied for table outbox_body"):
        app.execute(sa.text("DELETE FROM outbox_body"))
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied for function outbox_add_body_days"):
        add(app)
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied for table outbox_body"):
        stored_bodies(reading)
    for database in (owner, app, sending, reading):
        database.dispose()


# --- migrations


def test_odd_names_are_quoted_everywhere(blank_postgresql: Blank) -> None:
    migrations.upgrade(blank_postgresql.url, **ODD)
    migrations.partition(blank_postgresql.url, **ODD)
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", **ODD)
    engine = sa.create_engine(blank_postgresql.url)
    for _ in range(2):
        with Session(engine) as session, session.begin():
            with ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
                if not claim.replayed:
                    claim.respond(201, {"order": 1})
            assert claim.require_response().json() == {"order": 1}
    table, day = '"My Schema"."weird-prefix_body"', '"My Schema"."weird-prefix_body_20260101"'
    with engine.begin() as connection:
        assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 1
        connection.exec_driver_sql(
            f"CREATE TABLE {day} PARTITION OF {table} FOR VALUES FROM ('2026-01-01') TO ('2026-01-02')"
        )
    with engine.begin() as connection:
        assert [str(day) for day in drop_days(connection, ob.configuration.tables).dropped] == ["2026-01-01"]
    migrations.check_partitions(engine, **ODD)
    engine.dispose()
    migrations.downgrade(blank_postgresql.url, **ODD)


def test_a_downgrade_leaves_nothing_of_the_bodies(blank_postgresql: Blank, ob: outbox.Outbox) -> None:
    before = everything(blank_postgresql)
    migrations.upgrade(blank_postgresql.url)
    database = opened(blank_postgresql)
    switch_on(database)
    with database.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
        claim.respond(201, {"order": 1})

    database.dispose()

    migrations.downgrade(blank_postgresql.url)

    assert everything(blank_postgresql) == before


@pytest.mark.parametrize(
    "way", [pytest.param(AMONG, id="among the app's tables"), pytest.param(LEFT_OUT, id="left out")]
)
@pytest.mark.parametrize("names", [{}, ODD], ids=["default", "odd names"])
def test_autogenerate_does_not_see_partitions_as_strangers(
    blank_postgresql: Blank, tmp_path: Path, way: Any, names: dict[str, str]
) -> None:
    project = Project(tmp_path / "project", blank_postgresql, names, **way)
    project.autogenerate("first")
    project.upgrade()
    if way is LEFT_OUT:
        call_ours(project, names)
        project.upgrade()

    migrations.partition(blank_postgresql.url, **names)

    project.check()


def test_the_filter_leaves_out_bodies_and_nothing_that_is_only_named_alike() -> None:
    included = migrations.include_name()

    asked = ("outbox_body", "outbox_body_20261121", "outbox_body_parts", "outbox_body_2026112", "body_20261121")
    assert [included(name, "table", {"schema_name": None}) for name in asked] == [False, False, True, True, True]


# --- metrics


def test_the_gauges_show_how_many_days_are_ahead_and_what_bodies_take(
    shop: Client, by_day: Database, ob: outbox.Outbox
) -> None:
    shop.request(answer_only)
    take_away(by_day, today(by_day) + 3 * DAY)
    registry = prometheus_client.CollectorRegistry()
    prometheus.register_gauges(by_day.engine, outbox=ob, registry=registry)
    reader = InMemoryMetricReader()
    opentelemetry.register_gauges(by_day.engine, outbox=ob, meter=MeterProvider([reader]).get_meter("test"))

    page = prometheus_client.generate_latest(registry).decode()
    data = reader.get_metrics_data()

    assert "\noutbox_body_days_ahead 2.0\n" in page
    assert '\noutbox_table_bytes{table="body"} ' in page
    assert data is not None
    points = {
        metric.name: [point.value for point in metric.data.data_points]  # type: ignore[union-attr]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert points["outbox.body.days_ahead"] == [2]
    migrations.unpartition(by_day.engine)
    with by_day.engine.connect() as connection:
        assert gauges.read_days_ahead(connection, TABLES) is None


def test_nothing_is_due_where_there_is_no_such_layout(database: Database) -> None:
    if database.name == "postgresql":
        assert drop(database) == Drops()
    with database.engine.connect() as connection:
        assert gauges.read_days_ahead(connection, TABLES) is None
