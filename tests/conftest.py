"""The databases: every test that asks for one gets its own copy of a template, on a real PostgreSQL and on SQLite."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support import TABLES, Base, Client, Database

import outbox
from dispatchers.testing.postgres import temporary_postgres

MakeDatabase = Callable[[], Database]


@pytest.fixture(scope="session")
def server_url() -> Iterator[sa.URL]:
    """A server: the one that OUTBOX_TEST_DATABASE_URL names, else one started for this process and gone with it.

    There is no skipping: without a PostgreSQL the tests that need it are errors.
    """
    given = os.environ.get("OUTBOX_TEST_DATABASE_URL")
    if given:
        yield sa.make_url(given)
        return
    with temporary_postgres(durable=False) as server:
        yield sa.make_url(server.url)


@pytest.fixture(scope="session")
def make_postgresql(server_url: sa.URL) -> Iterator[MakeDatabase]:
    """Makes databases by copying a template, which takes PostgreSQL some tens of milliseconds."""
    admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    run = uuid4().hex[:8]  # several pytest-xdist workers may share one server
    template = f"outbox_template_{run}"
    made: list[str] = [template]
    numbers = itertools.count(1)
    _execute(admin, f"CREATE DATABASE {template}")
    _create_tables(server_url.set(database=template))

    def make() -> Database:
        name = f"outbox_test_{run}_{next(numbers)}"
        made.append(name)
        _execute(admin, f"CREATE DATABASE {name} TEMPLATE {template}")
        return Database(server_url.set(database=name))

    yield make
    for name in made:
        _execute(admin, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "shop.db"
    _create_tables(sa.URL.create("sqlite", database=str(path)))
    return path


@pytest.fixture
def postgresql(make_postgresql: MakeDatabase) -> Iterator[Database]:
    """A database of the test's own, on PostgreSQL."""
    database = make_postgresql()
    yield database
    database.dispose()


@pytest.fixture
def sqlite(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """A database of the test's own, on SQLite, with a prepared engine."""
    path = shutil.copy(sqlite_template, tmp_path / "shop.db")
    database = Database(sa.URL.create("sqlite", database=str(path)))
    yield database
    database.dispose()


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest) -> Database:
    """A database of the test's own: the test runs on each kind."""
    made: Database = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Client:
    """Sends requests to the shop, whose handler uses a Session, or an AsyncSession."""
    return Client(database, ob, is_async=request.param == "async")


def _execute(engine: sa.Engine, statement: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)


def _create_tables(url: sa.URL) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    TABLES.metadata.create_all(engine)
    Base.metadata.create_all(engine)
