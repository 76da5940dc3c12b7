"""The app's own Alembic on MariaDB: the outbox's tables among the app's, or left out of its comparison."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.alembic_projects import LEFT_OUT, Project, call_ours
from support.database import Database as Full
from support.migrations import Database

from outbox import migrations

AMONG = {"target": "[app, migrations.metadata('{server}', **names)]", "options": ""}


@pytest.fixture
def blank(mariadb: Full) -> Iterator[Database]:
    """A database of the test's own with nothing in it."""
    name = f"{mariadb.owners_url.database}_blank"
    with sa.create_engine(mariadb.owners_url).begin() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    yield Database(mariadb.owners_url.set(database=name))
    with sa.create_engine(mariadb.owners_url).begin() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}")


def made(database: Database) -> dict[str, list[str]]:
    """What the server says of each table of the outbox, but in which order the constraints were made."""
    with database.begin() as connection:
        names = [name for name in sa.inspect(connection).get_table_names() if name.startswith("outbox_")]
        shown = {name: connection.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1] for name in names}
    return {name: sorted(line.rstrip(",") for line in text.splitlines()) for name, text in shown.items()}


def test_autogenerate_makes_what_ours_make_and_then_adds_nothing(blank: Database, tmp_path: Path) -> None:
    among = AMONG | {"target": AMONG["target"].replace("{server}", blank.url.get_backend_name())}
    theirs = Project(tmp_path / "project", blank, {}, **among)
    script = theirs.autogenerate("outbox").read_text()
    theirs.upgrade()
    migrations.check(blank.url)
    by_alembic = made(blank)

    theirs.check()
    second = theirs.autogenerate("nothing").read_text()

    assert second.count("    pass\n") == 2
    assert "import outbox" not in script
    theirs.downgrade()
    migrations.upgrade(blank.url)
    by_us = made(blank)
    del by_us["outbox_version"]
    assert by_alembic == by_us


def test_autogenerate_spares_the_tables_that_ours_made(blank: Database, tmp_path: Path) -> None:
    theirs = Project(tmp_path / "project", blank, {}, **LEFT_OUT)
    theirs.autogenerate("orders")
    theirs.upgrade()
    call_ours(theirs, {})
    theirs.upgrade()

    theirs.check()

    migrations.check(blank.url)
