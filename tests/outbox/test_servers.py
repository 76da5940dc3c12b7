"""Databases that speak the protocol of PostgreSQL or MySQL and are others: refused by name before anything is written."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.cli_runner import refused
from support.database import Database
from support.entries import run_once
from support.other_servers import calling_itself, mysql_calling_itself

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.sql.connections.servers import (
    DIALECTS,
    REFUSED,
    USE_ANOTHER,
    WAYS_OUT,
    banner_of,
    refuse_other_host,
    refuse_other_server,
)

CRM = {"crm": MemoryAdapter()}
YUGABYTE = {"server_version": "15.12-YB-2025.2.3.2-b0"}
COCKROACH = {"server_version": "13.0.0", "crdb_version": "CockroachDB CCL v25.4.5 (x86_64-pc-linux-gnu, built 2026)"}

BANNERS = {
    "CockroachDB v25.4.5": "CockroachDB CCL v25.4.5 (x86_64-pc-linux-gnu, built 2026/01/15 07:02:45, go1.25)",
    "CockroachDB v26.3.0-rc.1": "CockroachDB CCL v26.3.0-rc.1 (x86_64-pc-linux-gnu)",
    "YugabyteDB 2025.2.3.2": "PostgreSQL 15.12-YB-2025.2.3.2-b0 on x86_64-pc-linux-gnu, compiled by clang",
    "TiDB v7.5.0": "8.0.11-TiDB-v7.5.0",
    "Vitess 8.0.40": "8.0.40-Vitess",
}
OWN = (
    "18.1",
    "15.9 (Debian 15.9-0+deb12u1)",
    "19devel",
    "16.4 - Percona Distribution",
    "10.11.19-MariaDB-0+deb12u1",
    None,
)


def shown(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.mark.parametrize(("name", "banner"), BANNERS.items())
def test_another_database_is_refused_by_its_name_and_version(name: str, banner: str) -> None:
    with pytest.raises(outbox.ConfigurationError, match=f"the server is {name}, and") as refusal:
        refuse_other_server(banner)

    reason = REFUSED[name.split()[0]]
    assert reason in str(refusal.value)
    assert str(refusal.value).endswith(WAYS_OUT.get(name.split()[0], USE_ANOTHER))


@pytest.mark.parametrize("banner", OWN)
def test_a_postgresql_and_a_mariadb_are_not_refused(banner: str | None) -> None:
    refuse_other_server(banner)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://admin@abc123.dsql.us-east-1.on.aws/postgres",
        "postgresql+psycopg://admin@abc123.dsql-fnh4.us-east-1.on.aws/postgres",
        "postgresql+psycopg://admin@/postgres?host=abc123.dsql.eu-west-2.on.aws",
    ],
)
def test_aurora_dsql_is_refused_by_its_host(url: str, ob: outbox.Outbox) -> None:
    for refuse in (refuse_other_host, lambda given: Dispatcher(given, outbox=ob, adapters=CRM), migrations.upgrade):
        with pytest.raises(
            outbox.ConfigurationError, match="the server is Aurora DSQL, and the outbox does not run on it"
        ):
            refuse(sa.make_url(url))
    refuse_other_host(sa.make_url("postgresql+psycopg://app@shop.cluster-abc.us-east-1.rds.amazonaws.com/shop"))


@pytest.fixture
def yugabyte(postgresql: Database) -> Iterator[sa.URL]:
    with calling_itself(postgresql.url, **YUGABYTE) as url:
        yield url


@pytest.mark.parametrize("driver", ["psycopg", "psycopg_async", "asyncpg"])
def test_an_app_on_yugabytedb_is_refused_before_it_writes(
    postgresql: Database, yugabyte: sa.URL, ob: outbox.Outbox, driver: str
) -> None:
    is_asyncpg = driver == "asyncpg"
    url = yugabyte.set(drivername=f"postgresql+{driver}")
    if is_asyncpg:
        url = url.difference_update_query(["sslmode", "gssencmode"]).update_query_dict({"ssl": "disable"})

    def enqueue(session: Session) -> None:
        ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        session.commit()

    async def main() -> None:
        async with AsyncSession(create_async_engine(url, poolclass=sa.NullPool)) as session:
            await session.run_sync(enqueue)

    def run() -> None:
        with Session(sa.create_engine(url, poolclass=sa.NullPool)) as session:
            enqueue(session)

    with pytest.raises(outbox.ConfigurationError, match=r"the server is YugabyteDB 2025\.2\.3\.2"):
        run() if driver == "psycopg" else asyncio.run(main())

    assert postgresql.entries == []


def test_every_start_on_yugabytedb_is_refused(postgresql: Database, yugabyte: sa.URL, ob: outbox.Outbox) -> None:
    engine = sa.create_engine(yugabyte, poolclass=sa.NullPool)
    starts: list[Callable[[], Any]] = [
        lambda: ob.check(engine),
        lambda: run_once(engine, ob, adapters=CRM),
        lambda: run_once(shown(yugabyte), ob, adapters=CRM),
        lambda: migrations.upgrade(engine, prefix="new_"),
        lambda: migrations.upgrade(yugabyte, prefix="new_"),
    ]
    for start in starts:
        with pytest.raises(outbox.ConfigurationError, match=r"the server is YugabyteDB 2025\.2\.3\.2"):
            start()
    for name in ("db", "upgrade", "--prefix", "new_"), ("doctor",), ("status",):
        assert "the server is YugabyteDB 2025.2.3.2" in refused(*name, DATABASE_URL=shown(yugabyte))[1]

    with postgresql.observer.connect() as connection:
        assert not [name for name in sa.inspect(connection).get_table_names() if name.startswith("new_")]


@pytest.mark.parametrize(("dialect", "name"), DIALECTS.items())
def test_a_dialect_of_another_database_is_refused_although_not_installed(
    ob: outbox.Outbox, dialect: str, name: str
) -> None:
    url = f"{dialect}://root@localhost/shop"
    for start in (migrations.upgrade, migrations.check, lambda given: Dispatcher(given, outbox=ob, adapters=CRM)):
        with pytest.raises(outbox.ConfigurationError, match=f"the server is {name}, and .* it: .*; (use|write) "):
            start(url)
    assert f"the server is {name}" in refused("status", DATABASE_URL=url)[1]


def test_cockroachdb_is_refused_with_either_dialect(postgresql: Database) -> None:
    with calling_itself(postgresql.url, **COCKROACH) as url:
        for name in ("db", "upgrade"), ("doctor",):
            assert "the server is CockroachDB v25.4.5" in refused(*name, DATABASE_URL=shown(url))[1]
    for name in ("db", "upgrade"), ("doctor",):
        assert "the server is CockroachDB" in refused(*name, DATABASE_URL="cockroachdb://root@localhost/shop")[1]


@pytest.mark.parametrize("version", ["8.0.11-TiDB-v7.5.0", "8.0.40-Vitess"])
def test_tidb_and_vitess_are_refused_for_a_url_of_mariadb(version: str) -> None:
    with mysql_calling_itself(version) as port:
        url = sa.make_url(f"mariadb+pymysql://app@127.0.0.1:{port}/shop?ssl_disabled=1")

        with pytest.raises(outbox.ConfigurationError, match=r"the server is (TiDB v7\.5\.0|Vitess 8\.0\.40), and"):
            migrations.upgrade(url)


def test_a_driver_that_reports_nothing_is_not_refused() -> None:
    refuse_other_server(banner_of(object()))
