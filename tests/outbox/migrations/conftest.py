"""Roles in PostgreSQL, and a database as each of them sees it."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.database import Database
from support.migrations import Database as Blank
from support.migrations import blank_database, run_script
from support.roles import KINDS, As

from outbox import migrations
from outbox.sql.schema.identifiers import quoted


@pytest.fixture(scope="module")
def names(server_url: sa.URL) -> Iterator[dict[str, str]]:
    """Five roles of this module's own: a role belongs to the server, not to a database. One name must be quoted."""
    names = {kind: f"{kind}'s {uuid4().hex[:8]}" for kind in KINDS}
    yield names
    with sa.create_engine(server_url, poolclass=sa.NullPool).begin() as connection:
        for name in map(quoted, names.values()):
            connection.exec_driver_sql(f"DROP ROLE IF EXISTS {name}")


@pytest.fixture(scope="module")
def template(server_url: sa.URL, names: dict[str, str]) -> Iterator[Blank]:
    with blank_database(server_url) as database:
        migrations.upgrade(database.url)
        run_script(database, migrations.roles(**names))
        yield database


@pytest.fixture
def with_roles(server_url: sa.URL, template: Blank) -> Iterator[Blank]:
    with blank_database(server_url, template) as database:
        yield database


@pytest.fixture
def owners(with_roles: Blank) -> Iterator[Database]:
    """The database as its owner sees it, with tables and roles."""
    database = Database(with_roles.url)
    yield database
    database.dispose()


@pytest.fixture
def as_role(owners: Database, names: dict[str, str]) -> Iterator[As]:
    """The database as one of the roles: `as_role("app")`."""
    opened: list[Database] = []

    def open_as(kind: str) -> Database:
        escaped = names[kind].replace(" ", "\\ ")
        opened.append(Database(owners.url.update_query_dict({"options": f"-c role={escaped}"})))
        return opened[-1]

    yield open_as
    for database in opened:
        database.dispose()
