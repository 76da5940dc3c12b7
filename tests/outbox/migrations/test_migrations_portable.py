"""Migrations in the portable mode: no lock keeps two runs apart, and a server may commit before each change of the schema."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.alembic_projects import LEFT_OUT, Project, call_ours
from support.migrations import Database
from support.portable import REFUSED, SENT, refused_in
from support.python_processes import run_python

from outbox import migrations
from outbox.errors import ConfigurationError, SchemaError
from outbox.sql import migration_locks

pytest_plugins = ["support.blank_databases"]

DEFINING = ("CREATE", "DROP", "ALTER")


class Interrupted(Exception):
    """The process ends here."""


@pytest.fixture
def blank_portable(blank_postgresql: Database) -> Database:
    return Database(blank_postgresql.url.set(drivername="portable+psycopg"))


@contextmanager
def before_each_change(act: Callable[[sa.Connection], None]) -> Iterator[None]:
    """Call `act` before each statement in the portable mode that changes the schema."""

    def before(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if connection.dialect.name == "portable" and statement.lstrip().startswith(DEFINING):
            act(connection)

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before)


def commit(connection: sa.Connection) -> None:
    """As CockroachDB does before each change of the schema: its `autocommit_before_ddl` is on."""
    driver: Any = connection.connection.driver_connection
    driver.commit()


def committing_until(moment: int) -> Callable[[sa.Connection], None]:
    """`commit`, but the process ends at the change with this number."""
    changes = count(1)

    def act(connection: sa.Connection) -> None:
        if next(changes) == moment:
            raise Interrupted
        commit(connection)

    return act


def nothing(connection: sa.Connection) -> None:
    """As PostgreSQL does."""


@pytest.mark.parametrize("server", [nothing, commit])
@pytest.mark.parametrize("verb", [migrations.upgrade, migrations.downgrade])
def test_two_runs_at_once_both_end_well(
    blank_portable: Database,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[[sa.URL], None],
    server: Callable[[sa.Connection], None],
) -> None:
    monkeypatch.setattr(migration_locks, "TABLE_LOCK_WAIT_SECONDS", 60)  # a busy machine may be slow
    if verb is migrations.downgrade:
        migrations.upgrade(blank_portable.url)
    have_read, met = threading.Barrier(2), set()

    def meet(connection: sa.Connection) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            have_read.wait(30)  # each has seen the database as it was, and changed nothing
        server(connection)

    with before_each_change(meet), ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(verb, blank_portable.url) for _ in range(2)]:
            run.result(60)

    assert len(met) == 2
    if verb is migrations.upgrade:
        migrations.check(blank_portable.url)
        with blank_portable.begin() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM outbox_version").scalar_one() == 1
    else:
        assert migrations.current(blank_portable.url) is None
        migrations.upgrade(blank_portable.url)


@pytest.mark.parametrize("verb", [migrations.upgrade, migrations.downgrade])
def test_an_interrupted_run_is_finished_by_the_next_one(
    blank_portable: Database, verb: Callable[[sa.URL], None]
) -> None:
    """Wherever it was interrupted, on a server that commits before each change."""
    for moment in (2, 3, 9, 16):
        if verb is migrations.downgrade:
            migrations.upgrade(blank_portable.url)

        with before_each_change(committing_until(moment)):
            with pytest.raises(Interrupted):
                verb(blank_portable.url)
            verb(blank_portable.url)

        if verb is migrations.upgrade:
            migrations.check(blank_portable.url)
            migrations.downgrade(blank_portable.url)
        assert migrations.current(blank_portable.url) is None
    migrations.upgrade(blank_portable.url)
    migrations.check(blank_portable.url)


def test_a_caller_whose_run_meets_another_one_learns_it(blank_portable: Database) -> None:
    """Its transaction is the caller's, so it cannot be begun again here."""
    engine = sa.create_engine(blank_portable.url, poolclass=sa.NullPool)

    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")  # the snapshot of its transaction is older than the tables
        migrations.upgrade(blank_portable.url)
        with pytest.raises(SchemaError, match="another run seems to have changed the outbox's tables"):
            migrations.upgrade(connection)

    migrations.check(blank_portable.url)


def test_a_long_transaction_is_not_waited_for(blank_portable: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_locks, "TABLE_LOCK_WAIT_SECONDS", 0.1)
    migrations.upgrade(blank_portable.url)

    with blank_portable.begin() as long_transaction:
        long_transaction.exec_driver_sql("SELECT * FROM outbox_entry")
        with pytest.raises(SchemaError, match="cannot lock the tables"):
            migrations.downgrade(blank_portable.url)


@pytest.mark.parametrize("schema", [None, "billing"])
def test_a_check_names_what_is_missing_without_the_catalogs_of_types(
    blank_portable: Database, schema: str | None
) -> None:
    migrations.upgrade(blank_portable.url, schema=schema)
    within = "public" if schema is None else schema
    with blank_portable.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {within}.outbox_queue DROP COLUMN outcome")
        connection.exec_driver_sql(f"DROP TABLE {within}.outbox_key_lock")

    missing = pytest.raises(SchemaError, match=r"lacks column outbox_queue\.outcome, table outbox_key_lock:")
    with SENT.recorded() as sent, missing:
        migrations.check(blank_portable.url, schema=schema)

    assert [found for statement in sent for found in refused_in(statement)] == []


def test_an_engine_in_autocommit_gets_a_transaction(blank_portable: Database) -> None:
    engine = sa.create_engine(blank_portable.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    with engine.connect() as connection, pytest.raises(ConfigurationError, match="needs SERIALIZABLE"):
        migrations.upgrade(connection)
    migrations.upgrade(engine)

    migrations.check(engine)


def test_the_apps_own_alembic_makes_the_tables_and_then_adds_nothing(blank_portable: Database, tmp_path: Path) -> None:
    among = {"target": "[app, migrations.metadata('portable', **names)]", "options": ""}
    theirs = Project(tmp_path / "project", blank_portable, {}, **among)
    script = theirs.autogenerate("outbox").read_text()

    theirs.upgrade()

    migrations.check(blank_portable.url)
    theirs.check()
    assert "import outbox" not in script
    assert REFUSED.search(script) is None


def test_the_apps_own_alembic_runs_the_migrations_and_spares_their_tables(
    blank_portable: Database, tmp_path: Path
) -> None:
    theirs = Project(tmp_path / "project", blank_portable, {}, **LEFT_OUT)
    theirs.autogenerate("orders")
    theirs.upgrade()
    call_ours(theirs, {})
    theirs.upgrade()

    migrations.check(blank_portable.url)
    theirs.check()
    theirs.downgrade()
    assert migrations.current(blank_portable.url) is None


@pytest.mark.parametrize("used", ["metadata('portable')", "include_name()"])
def test_the_apps_own_alembic_knows_the_dialect(used: str) -> None:
    program = f"""
from alembic.runtime.migration import MigrationContext
from outbox import migrations

migrations.{used}
print(type(MigrationContext.configure(dialect_name="portable").impl).__name__)
"""

    ran = run_python("-c", program)

    assert ran.stdout == "PortableImpl\n", ran.stderr
