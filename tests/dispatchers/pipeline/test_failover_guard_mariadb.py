"""The failover guard on MariaDB: a replica that is promoted, a server that starts again, a copy, an older state of the data."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.cli_runner import document
from support.copied_data import copied
from support.database import TABLES, Database
from support.entries import claim, put_one, run_once, state
from support.free_ports import free_ports
from support.mariadb_copies import READ_COMMITTED
from support.mariadb_server import make_data, mariadb_on, missing_program

import outbox
from dispatchers import database_identity
from dispatchers.adapters import MemoryAdapter
from dispatchers.errors import Suspended
from dispatchers.store.database import DatabaseStore
from dispatchers.store.records import identity as store_identity


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a stopped server with the outbox's tables."""
    if missing := missing_program():
        pytest.skip(f"{missing} is not installed")
    data = make_data(tmp_path_factory.mktemp("template") / "data")
    with mariadb_on(data, "--skip-networking") as url:
        execute(url, "CREATE DATABASE shop CHARACTER SET utf8mb4")
        engine = sa.create_engine(url.set(database="shop"), poolclass=sa.NullPool)
        TABLES.metadata.create_all(engine)
    return data


@pytest.fixture
def data(template: Path, tmp_path: Path) -> Path:
    return copied(template, tmp_path / "primary")


@contextmanager
def shop_on(data: Path, port: int, server_id: int = 1) -> Iterator[Database]:
    with mariadb_on(
        data, "--log-bin=log", "--bind-address=127.0.0.1", f"--port={port}", f"--server-id={server_id}"
    ) as url:
        database = Database(url.set(database="shop").update_query_dict({"init_command": READ_COMMITTED}))
        yield database
        database.dispose()


def execute(url: sa.URL, *statements: str) -> None:
    with sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def follow(replica: Database, primary: Database, port: int) -> None:
    position = committed(primary)
    execute(primary.url, "CREATE USER follower", "GRANT REPLICATION SLAVE ON *.* TO follower")
    execute(
        replica.url,
        f"SET GLOBAL gtid_slave_pos = '{position}'",
        f"CHANGE MASTER TO master_host='127.0.0.1', master_port={port}, master_user='follower', master_use_gtid=slave_pos",
        "START SLAVE",
    )


def until_followed(replica: Database, primary: Database) -> None:
    assert value(replica, f"SELECT MASTER_GTID_WAIT('{committed(primary)}', 60)") == 0


def committed(database: Database) -> str:
    return str(value(database, "SELECT @@gtid_binlog_pos"))


def value(database: Database, query: str) -> Any:
    with database.engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar_one()


def test_a_promoted_replica_is_noticed_although_it_has_the_last_record(data: Path, ob: outbox.Outbox) -> None:
    service = MemoryAdapter()
    ports = free_ports(2)
    copy = copied(data, data.with_name("replica"))
    with shop_on(copy, ports[1], server_id=2) as replica:
        with shop_on(data, ports[0]) as primary:
            follow(replica, primary, ports[0])
            run_once(primary, ob, adapters={"crm": service})
            id = put_one(primary, ob)
            until_followed(replica, primary)
            with replica.engine.connect() as connection:  # while it follows, its position says nothing
                assert store_identity.read_server(connection, TABLES, "test", reads_server=True).timeline is None
            execute(replica.url, "STOP SLAVE")
            assert run_once(primary, ob, adapters={"crm": service}) == 1

        assert claim(DatabaseStore(replica.engine, ob.configuration)) == []  # before any check
        with pytest.raises(Suspended, match="a standby was promoted"):
            run_once(replica, ob, adapters={"crm": service})
        document("resume", "--after-restore", "--reason", "failover", database=replica, OUTBOX_ENV="test")
        run_once(replica, ob, adapters={"crm": service})

        assert state(replica, id) == "delivered"
        assert len(service.deliveries) == 2
        assert len({delivery.key for delivery in service.deliveries}) == 1


def test_a_server_that_starts_with_another_port_and_number_is_the_same(
    data: Path, ob: outbox.Outbox, tmp_path: Path
) -> None:
    """As a container that gets another address, or a number at random."""
    remembering = {"adapters": {"crm": MemoryAdapter()}, "identity_file": tmp_path / "identity.json"}
    ports = free_ports(2)
    with shop_on(data, ports[0]) as killed:
        run_once(killed, ob, **remembering)
        before = value(killed, "SELECT @@server_uid")
        put_one(killed, ob)

    with shop_on(data, ports[1], server_id=2) as restarted:
        assert value(restarted, "SELECT @@server_uid") != before
        assert run_once(restarted, ob, **remembering) == 1


def test_an_older_state_of_the_data_is_noticed_by_the_identity_file(
    data: Path, ob: outbox.Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a snapshot of a disk, or a backup of mariadb-backup. A process without a file sends."""
    monkeypatch.setattr(database_identity, "IDENTITY_EVERY", timedelta(0))
    remembering = {"adapters": {"crm": MemoryAdapter()}, "identity_file": tmp_path / "identity.json"}
    (port,) = free_ports(1)
    with shop_on(data, port) as database:
        run_once(database, ob, **remembering)
        put_one(database, ob)
    backup = copied(data, tmp_path / "backup")
    with shop_on(data, port) as database:
        run_once(database, ob, **remembering)

    with shop_on(backup, port) as restored, pytest.raises(Suspended, match="an older state was restored"):
        run_once(restored, ob, **remembering)


def test_a_copy_under_another_name_is_noticed(mariadb: Database, ob: outbox.Outbox) -> None:
    store = DatabaseStore(mariadb.engine, ob.configuration)
    assert asyncio.run(store.check_identity("test", None)).suspended is None
    name, copy = mariadb.owners_url.database, f"{mariadb.owners_url.database}_copy"
    tables = [f"{copy}.{table} SELECT * FROM {name}.{table}" for table in TABLES.metadata.tables]
    execute(mariadb.owners_url, f"CREATE DATABASE {copy}", *(f"CREATE TABLE {table}" for table in tables))
    engine = sa.create_engine(mariadb.owners_url.set(database=copy))

    checked = asyncio.run(DatabaseStore(engine, ob.configuration).check_identity("test", None))

    engine.dispose()
    execute(mariadb.owners_url, f"DROP DATABASE {copy}")
    assert checked.suspended == f"the tables have changed, {copy} instead of {name}: they were restored or copied"
