"""The migrations: they make what `outbox/schema.py` says, take it away again, run alone, and travel in the wheel."""

import asyncio
import io
import os
import re
import site
import sqlite3
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from outbox import migrations
from outbox.errors import ConfigurationError, NoTransaction, SchemaError
from outbox.schema import define_tables

ROOT = Path(__file__).parents[1]
ODD = {"schema": "My Schema", "prefix": "weird-prefix_"}


@dataclass(frozen=True)
class Database:
    url: URL

    @property
    def is_postgresql(self) -> bool:
        return self.url.get_backend_name() == "postgresql"

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with create_engine(self.url, poolclass=NullPool).begin() as connection:
            yield connection


@contextmanager
def postgresql_database() -> Iterator[URL]:
    server = make_url(
        os.environ.get("OUTBOX_TEST_DATABASE_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres")
    )
    name = f"outbox_migrations_{uuid4().hex}"
    with create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
        try:
            yield server.set(database=name)
        finally:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgresql_url() -> Iterator[URL]:
    with postgresql_database() as url:
        yield url


@pytest.fixture
def postgresql(postgresql_url) -> Database:
    return Database(postgresql_url)


@pytest.fixture
def sqlite(tmp_path) -> Database:
    return Database(make_url(f"sqlite:///{tmp_path / 'outbox.db'}"))


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request) -> Database:
    return request.getfixturevalue(request.param)


# A pair of databases, to be made in two ways and compared


@pytest.fixture
def other(database, tmp_path) -> Iterator[Database]:
    if database.is_postgresql:
        with postgresql_database() as url:
            yield Database(url)
    else:
        yield Database(make_url(f"sqlite:///{tmp_path / 'other.db'}"))


def create_all(database: Database, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    with database.begin() as connection:
        if schema is not None:
            connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
        define_tables(MetaData(), schema=schema, prefix=prefix).metadata.create_all(connection)


POSTGRESQL_CATALOG = {
    "relations": """
        SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.reloptions FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1, 2""",
    "columns": """
        SELECT n.nspname, c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage,
               a.attidentity, a.attgenerated, a.attcollation, pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute a
        JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attnum > 0 AND {ours} ORDER BY 1, 2, 3""",
    "constraints": """
        SELECT n.nspname, c.relname, k.conname, pg_get_constraintdef(k.oid) FROM pg_constraint k
        JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1, 2, 3""",
    "indexes": """
        SELECT pg_get_indexdef(i.indexrelid), i.indisunique, i.indisprimary FROM pg_index i
        JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1""",
    "sequences": """
        SELECT n.nspname, c.relname, format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmax, s.seqmin,
               s.seqcache, s.seqcycle,
               (SELECT max(refobjid::regclass::text || refobjsubid) FROM pg_depend WHERE objid = c.oid AND deptype = 'a')
        FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {ours} ORDER BY 1, 2""",
}
OURS = r"n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'"
BUT_THE_VERSION = r"c.relname !~ '_version(_pkc)?$'"


def snapshot(database: Database) -> dict[str, list[Any]]:
    """All that the database's catalogue says, but for the version table."""
    with database.begin() as connection:
        if database.is_postgresql:
            where = f"{OURS} AND {BUT_THE_VERSION}"
            return {
                what: [tuple(row) for row in connection.execute(text(query.format(ours=where)))]
                for what, query in POSTGRESQL_CATALOG.items()
            }
        query = "SELECT type, name, sql FROM sqlite_master WHERE tbl_name NOT LIKE '%_version' ORDER BY 1, 2"
        return {
            "objects": [
                (kind, name, sql and " ".join(sql.split())) for kind, name, sql in connection.execute(text(query))
            ]
        }


def everything(database: Database) -> list[str]:
    """The name of every object, version table and schemas included."""
    with database.begin() as connection:
        if not database.is_postgresql:
            return list(connection.scalars(text("SELECT name FROM sqlite_master ORDER BY 1")))
        query = f"""SELECT 'schema ' || n.nspname FROM pg_namespace n WHERE {OURS} UNION ALL
            SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE {OURS} UNION ALL
            SELECT n.nspname || '.' || t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
            WHERE {OURS} ORDER BY 1"""
        return list(connection.scalars(text(query)))


# What upgrade makes is what schema.py says


def names_for(database: Database) -> list[dict[str, str]]:
    return [{}, {"prefix": "weird-prefix_"}, *([ODD] if database.is_postgresql else [])]


def test_an_upgraded_database_is_to_the_letter_what_create_all_makes_of_the_schema(database, other):
    for names in names_for(database):
        migrations.upgrade(database.url, **names)
        create_all(other, **names)

    upgraded, created = snapshot(database), snapshot(other)

    assert upgraded == created
    assert all(upgraded.values())


def test_alembic_finds_no_difference_between_an_upgraded_database_and_the_schema(database):
    for names in names_for(database):
        migrations.upgrade(database.url, **names)
        config = Config(stdout=io.StringIO())
        config.set_main_option("script_location", str(ROOT / "alembic"))
        with database.begin() as connection:
            config.attributes.update(connection=connection, **names)

            command.check(config)  # raises on a difference


def test_the_comparison_with_the_schema_would_notice_a_change(database, other):
    migrations.upgrade(database.url)
    create_all(other)
    alter = "ALTER TABLE outbox_entry ADD COLUMN extra INTEGER"
    if database.is_postgresql:
        alter = "ALTER TABLE outbox_queue SET (fillfactor = 60)"
    with database.begin() as connection:
        connection.exec_driver_sql(alter)

    assert snapshot(database) != snapshot(other)


def test_postgresql_stores_the_queue_with_room_for_leases_and_vacuums_it_by_count(postgresql):
    migrations.upgrade(postgresql.url)

    with postgresql.begin() as connection:
        options = connection.exec_driver_sql(
            "SELECT reloptions FROM pg_class WHERE relname = 'outbox_queue'"
        ).scalar_one()

    assert set(options) == {
        "fillfactor=33",
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=2000",
        "autovacuum_vacuum_cost_delay=0",
    }


def test_the_printed_sql_makes_what_upgrade_makes(database, other):
    for names in names_for(database):
        migrations.upgrade(database.url, **names)
        script = migrations.sql(database.url.get_backend_name(), **names)
        run_script(other, script)

        migrations.check(other.url, **names)

    assert snapshot(other) == snapshot(database)
    assert everything(other) == everything(database)
    assert migrations.current(other.url) == migrations.head()


def run_script(database: Database, script: str) -> None:
    if database.is_postgresql:
        engine = create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            connection.connection.driver_connection.execute(script)
    else:
        connection = sqlite3.connect(database.url.database)
        connection.executescript(script)
        connection.close()


# Down, and twice


def test_down_leaves_only_what_was_there_before(database):
    with database.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER PRIMARY KEY)")
    before = everything(database)
    for names in names_for(database):
        migrations.upgrade(database.url, **names)
    assert everything(database) != before

    for names in names_for(database):
        migrations.downgrade(database.url, **names)

    assert everything(database) == before


def test_down_keeps_a_schema_that_it_did_not_create(postgresql):
    with postgresql.begin() as connection:
        connection.exec_driver_sql('CREATE SCHEMA "My Schema"')
    before = everything(postgresql)

    migrations.upgrade(postgresql.url, **ODD)
    migrations.downgrade(postgresql.url, **ODD)

    assert everything(postgresql) == before


def test_down_keeps_a_schema_in_which_something_else_lives_by_now(postgresql):
    migrations.upgrade(postgresql.url, schema="shared", prefix="a_")
    migrations.upgrade(postgresql.url, schema="shared", prefix="b_")

    migrations.downgrade(postgresql.url, schema="shared", prefix="a_")
    migrations.check(postgresql.url, schema="shared", prefix="b_")
    migrations.downgrade(postgresql.url, schema="shared", prefix="b_")

    assert not [name for name in everything(postgresql) if "shared" in name]


def test_down_does_nothing_where_nothing_is(database):
    before = everything(database)

    migrations.downgrade(database.url)

    assert everything(database) == before


def test_up_again_after_down(database):
    migrations.upgrade(database.url)
    migrations.downgrade(database.url)
    migrations.upgrade(database.url)

    migrations.check(database.url)


def test_a_second_upgrade_changes_nothing(database):
    migrations.upgrade(database.url)
    with database.begin() as connection:
        connection.exec_driver_sql("INSERT INTO outbox_meta (id, environment) VALUES (1, 'kept')")
    before = everything(database)

    migrations.upgrade(database.url)

    assert everything(database) == before
    with database.begin() as connection:
        assert connection.exec_driver_sql("SELECT environment FROM outbox_meta").scalar_one() == "kept"


def test_the_head_is_the_last_of_one_line_of_numbered_migrations():
    scripts = ScriptDirectory(str(ROOT / "alembic"))

    line = [script.revision for script in scripts.walk_revisions()]

    assert migrations.head() == scripts.get_current_head()
    assert line == sorted(line, reverse=True)
    assert all(re.fullmatch(r"\d{4}", revision) for revision in line)


# Alone


def test_upgrades_at_once_make_the_tables_once(database):
    with ThreadPoolExecutor(4) as pool, holding_everyone_up(database) as release:
        runs = [pool.submit(migrations.upgrade, database.url) for _ in range(4)]
        release(4)
        for run in runs:
            run.result(30)

    migrations.check(database.url)
    with database.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM outbox_version").scalar_one() == 1


def test_two_processes_upgrade_at_once(database):
    program = "import sys; from outbox import migrations; migrations.upgrade(sys.argv[1]); print('upgraded')"
    arguments = [sys.executable, "-c", program, database.url.render_as_string(hide_password=False)]
    with holding_everyone_up(database) as release:
        processes = [subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        release(2)
        printed = [process.communicate(timeout=60)[0] for process in processes]

    assert printed == ["upgraded\n"] * 2
    migrations.check(database.url)


@contextmanager
def holding_everyone_up(database: Database) -> Iterator[Callable[[int], None]]:
    """Hold the migrations' lock until `release(n)`, which waits for n others to queue up for it, where that can be seen."""
    with create_engine(database.url, poolclass=NullPool).connect() as connection:
        if database.is_postgresql:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({migrations.MIGRATION_LOCK})")
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        def release(waiting_runs: int) -> None:
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            patience = time.monotonic() + 30
            while database.is_postgresql and connection.exec_driver_sql(waiting).scalar_one() < waiting_runs:
                assert time.monotonic() < patience
                time.sleep(0.01)
            connection.rollback()

        yield release


def test_a_migration_that_meets_a_long_transaction_gives_up_and_changes_nothing(postgresql, monkeypatch):
    monkeypatch.setattr(migrations, "TABLE_LOCK_WAIT_SECONDS", 0.1)
    migrations.upgrade(postgresql.url)
    before = everything(postgresql)

    with postgresql.begin() as long_transaction:
        long_transaction.exec_driver_sql("SELECT * FROM outbox_entry")
        with pytest.raises(SchemaError, match=r"another session, perhaps .* for 0\.1 s\. Nothing was changed"):
            migrations.downgrade(postgresql.url)

    assert everything(postgresql) == before


def test_a_migration_that_waits_in_vain_for_another_one_says_so(postgresql, monkeypatch):
    monkeypatch.setattr(migrations, "MIGRATION_WAIT_SECONDS", 0.1)

    with holding_everyone_up(postgresql), pytest.raises(SchemaError, match=r"another migration has held this database"):
        migrations.upgrade(postgresql.url)


def test_a_migration_that_waits_in_vain_for_a_writer_of_sqlite_says_so(sqlite):
    impatient = create_engine(sqlite.url, connect_args={"timeout": 0.05}, poolclass=NullPool)

    with holding_everyone_up(sqlite), pytest.raises(SchemaError, match="another connection is writing"):
        migrations.upgrade(impatient)


def test_a_migration_that_fails_halfway_leaves_nothing(database):
    with database.begin() as connection:  # its index has the name of one of ours
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER)")
        connection.exec_driver_sql("CREATE INDEX outbox_tombstone_forget ON business (id)")
    before = everything(database)

    with pytest.raises(Exception, match="already exists"):
        migrations.upgrade(database.url)

    assert everything(database) == before


# Targets


def test_a_url_may_be_text(database):
    migrations.upgrade(database.url.render_as_string(hide_password=False))

    migrations.check(database.url)


@pytest.mark.parametrize("isolation", [None, "SERIALIZABLE", "AUTOCOMMIT"])
def test_an_engine_is_used_as_it_is_whatever_its_isolation(database, isolation):
    engine = create_engine(database.url, **({} if isolation is None else {"isolation_level": isolation}))
    before = isolation_of(engine)

    migrations.upgrade(engine)

    migrations.check(engine)
    assert isolation_of(engine) == before
    engine.dispose()


def isolation_of(engine: Engine) -> tuple[str, bool]:
    with engine.connect() as connection:
        level = connection.get_isolation_level()
        return level, engine.dialect.detect_autocommit_setting(connection.connection.dbapi_connection)


def test_an_engine_that_begins_its_sqlite_transactions_itself_is_welcome(sqlite):
    engine = create_engine(sqlite.url)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    migrations.upgrade(engine)

    migrations.check(engine)
    engine.dispose()


def test_an_async_engine_is_opened_anew_with_a_sync_driver(database):
    url = database.url if database.is_postgresql else database.url.set(drivername="sqlite+aiosqlite")
    engine = create_async_engine(url)

    migrations.upgrade(engine)

    migrations.check(engine)
    migrations.check(url)


def test_an_engine_in_memory_is_upgraded_itself():
    engine = create_engine("sqlite://", poolclass=StaticPool)

    migrations.upgrade(engine)

    migrations.check(engine)
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite+aiosqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_url_in_memory_is_refused_as_it_would_be_gone_at_once(url):
    with pytest.raises(ConfigurationError, match="another, empty database in memory"):
        migrations.upgrade(url)


def test_a_url_whose_driver_is_async_only_is_refused():
    with pytest.raises(ConfigurationError, match=r"postgresql\+asyncpg is not: give a URL with a synchronous driver"):
        migrations.upgrade("postgresql+asyncpg://localhost/shop")


def test_what_is_no_target_is_refused(sqlite):
    connection = create_async_engine(sqlite.url.set(drivername="sqlite+aiosqlite")).connect()

    for target in (connection, object()):
        with pytest.raises(ConfigurationError, match=f"{type(target).__name__} is no target"):
            migrations.upgrade(target)


def test_a_database_without_migrations_is_refused():
    with pytest.raises(SchemaError, match="there are no migrations for 'mysql', only for postgresql and sqlite"):
        migrations.sql("mysql")


def test_a_connection_keeps_its_transaction_for_the_caller_to_roll_back(database):
    before = everything(database)

    with create_engine(database.url, poolclass=NullPool).connect() as connection:
        migrations.upgrade(connection)
        migrations.check(connection)
        connection.rollback()

    assert everything(database) == before


def test_a_connection_keeps_its_transaction_for_the_caller_to_commit(database):
    with database.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER)")
        migrations.upgrade(connection)

    migrations.check(database.url)
    assert "business" in "".join(everything(database))


def test_a_callers_lock_timeout_is_as_it_was(postgresql):
    with postgresql.begin() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '123ms'")

        migrations.upgrade(connection)

        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "123ms"


def test_a_connection_in_autocommit_mode_is_refused(postgresql):
    engine = create_engine(postgresql.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)

    with engine.connect() as connection, pytest.raises(NoTransaction):
        migrations.upgrade(connection)


def test_an_async_connection_upgrades_by_run_sync(database):
    url = database.url if database.is_postgresql else database.url.set(drivername="sqlite+aiosqlite")

    async def upgrade() -> None:
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            await connection.run_sync(migrations.upgrade)
        async with engine.connect() as connection:
            await connection.run_sync(migrations.downgrade)
            await connection.rollback()
        await engine.dispose()

    asyncio.run(upgrade())

    migrations.check(database.url)


def test_an_upgrade_inside_the_apps_own_alembic_migration_leaves_alembics_globals_alone(database):
    from alembic import op

    with database.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        migrations.upgrade(op.get_bind())
        op.execute("CREATE TABLE after_it (id INTEGER)")

    migrations.check(database.url)
    assert "after_it" in "".join(everything(database))


# Schemas


def test_a_sqlite_schema_that_is_not_attached_is_named(sqlite):
    with pytest.raises(SchemaError, match="no database is attached as 'elsewhere'"):
        migrations.upgrade(sqlite.url, schema="elsewhere")


def test_an_attached_sqlite_database_is_a_schema(sqlite, tmp_path):
    with create_engine(sqlite.url, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"ATTACH '{tmp_path / 'side.db'}' AS side")
        migrations.upgrade(connection, schema="side")
        migrations.check(connection, schema="side")
        connection.commit()

    migrations.check(f"sqlite:///{tmp_path / 'side.db'}")


def test_a_role_that_may_not_create_schemas_upgrades_in_one_that_exists(postgresql):
    role = f"outbox_migrations_{uuid4().hex}"
    with postgresql.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"CREATE SCHEMA app AUTHORIZATION {role}")
    try:
        with postgresql.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            migrations.upgrade(connection, schema="app")

        migrations.check(postgresql.url, schema="app")
    finally:
        with postgresql.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role} CASCADE")
            connection.exec_driver_sql(f"DROP ROLE {role}")


# check


def test_check_names_what_an_empty_database_lacks_and_the_command(database):
    with pytest.raises(SchemaError) as raised:
        migrations.check(database.url)

    assert str(raised.value).startswith(
        "the outbox's database (prefix 'outbox_') lacks table outbox_entry, table outbox_queue,"
    )
    assert str(raised.value).endswith(": run `outbox db upgrade`")
    assert ("sequence outbox_position" in str(raised.value)) == database.is_postgresql


def test_check_names_the_missing_schema(database):
    with pytest.raises(SchemaError) as raised:
        migrations.check(database.url, **ODD)

    assert str(raised.value) == (
        "the outbox's database (schema 'My Schema', prefix 'weird-prefix_') lacks schema 'My Schema' itself:"
        " run `outbox db upgrade`"
    )


def test_check_names_a_column_that_was_removed_since(database):
    migrations.upgrade(database.url)
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_entry DROP COLUMN headers")

    with pytest.raises(
        SchemaError, match=r"lacks column outbox_entry\.headers: revision 0001 made it, .*`outbox db sql`"
    ):
        migrations.check(database.url)


def test_check_names_the_revisions_of_a_database_left_behind(database, monkeypatch):
    migrations.upgrade(database.url)
    monkeypatch.setattr(migrations, "head", lambda: "0002")

    with pytest.raises(SchemaError, match=r"is at revision 0001, this release needs 0002: run `outbox db upgrade`$"):
        migrations.check(database.url)


def test_check_accepts_a_database_that_a_newer_release_has_upgraded(database):
    migrations.upgrade(database.url)
    set_revision(database, "9999")

    migrations.check(database.url)


def test_check_says_when_a_newer_release_took_away_what_this_one_needs(database):
    migrations.upgrade(database.url)
    set_revision(database, "9999")
    with database.begin() as connection:
        connection.exec_driver_sql("DROP TABLE outbox_halted")

    with pytest.raises(SchemaError, match="lacks table outbox_halted: revision 9999 is of a newer release"):
        migrations.check(database.url)


def test_check_accepts_tables_that_the_apps_own_metadata_made(database):
    create_all(database)

    migrations.check(database.url)

    assert migrations.current(database.url) is None


def test_check_changes_nothing(database):
    before = everything(database)

    with pytest.raises(SchemaError):
        migrations.check(database.url)

    assert everything(database) == before


def test_upgrade_leaves_tables_alone_that_no_migration_made(database):
    create_all(database)

    with pytest.raises(
        SchemaError, match=r"outbox_destination, .* exist already and no migration of the outbox made them"
    ):
        migrations.upgrade(database.url)


def test_upgrade_leaves_a_newer_releases_database_alone(database):
    migrations.upgrade(database.url)
    set_revision(database, "9999")

    with pytest.raises(SchemaError, match="at revision 9999, made by a newer release than this one, which knows 0001"):
        migrations.upgrade(database.url)


def test_current_is_the_revision_or_none(database):
    assert migrations.current(database.url) is None

    migrations.upgrade(database.url)

    assert migrations.current(database.url) == migrations.head()


def set_revision(database: Database, revision: str) -> None:
    with database.begin() as connection:
        connection.execute(text("UPDATE outbox_version SET version_num = :revision"), {"revision": revision})


# Without alembic, and from the wheel


WITHOUT_ALEMBIC = """
import sys
sys.modules["alembic"] = None
from outbox import migrations
from outbox.errors import SchemaError

print(migrations.head(), migrations.current(sys.argv[1]))
for call in (migrations.check, migrations.upgrade, migrations.downgrade, lambda _: migrations.sql()):
    try:
        call(sys.argv[1])
    except SchemaError as error:
        print(error)
"""


def test_without_alembic_the_extra_is_named_and_checking_still_works(sqlite):
    printed = run([sys.executable, "-c", WITHOUT_ALEMBIC, str(sqlite.url)], cwd=ROOT).splitlines()

    assert printed[0] == f"{migrations.head()} None"
    assert printed[1].endswith("run `outbox db upgrade`")
    assert printed[2:] == ["migrations need Alembic: pip install 'sqlalchemy-outbox[migrations]'"] * 3


def test_importing_the_migrations_loads_neither_alembic_nor_asyncio():
    program = "import sys, outbox.migrations; print({'alembic', 'sqlalchemy.ext.asyncio'} & set(sys.modules))"

    assert run([sys.executable, "-c", program], cwd=ROOT) == "set()\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)], cwd=ROOT)
    [wheel] = made.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of a fresh environment with the wheel in it; what the wheel depends on is lent by this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()))
    return home / "bin" / "python"


def test_the_wheel_holds_the_migrations_inside_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert {"outbox/_migrations/env.py", "outbox/_migrations/versions/0001_first.py"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"outbox", "dispatchers"}
    assert not [name for name in names if "__pycache__" in name]


def test_from_the_wheel_the_migrations_run(installed, tmp_path):
    program = "import outbox.migrations as m; print(m.__file__); m.upgrade('sqlite:///x.db'); m.check('sqlite:///x.db')"

    printed = run([str(installed), "-c", program], cwd=tmp_path)

    assert Path(printed.strip()).is_relative_to(installed.parents[1])
    migrations.check(f"sqlite:///{tmp_path / 'x.db'}")


def test_from_the_wheel_the_command_upgrades(installed, tmp_path, database):
    url = database.url.render_as_string(hide_password=False)

    run([str(installed), "-m", "dispatchers", "db", "upgrade", "--database", url], cwd=tmp_path)

    migrations.check(database.url)


def run(arguments: list[str], *, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
