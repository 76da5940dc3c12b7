"""What a migration may be pointed at, whose transaction it runs in, and in which schema."""

import asyncio
from uuid import uuid4

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool, StaticPool
from support.migrations import everything

from outbox import migrations
from outbox.errors import ConfigurationError, NoTransaction, SchemaError
from outbox.sql.connections.sync_drivers import synchronous

pytest_plugins = ["support.blank_databases"]


def test_a_url_may_be_text(blank):
    migrations.upgrade(blank.url.render_as_string(hide_password=False))

    migrations.check(blank.url)


@pytest.mark.parametrize("isolation", [None, "SERIALIZABLE", "AUTOCOMMIT"])
def test_an_engine_is_used_as_it_is_whatever_its_isolation(blank, isolation):
    engine = create_engine(blank.url, **({} if isolation is None else {"isolation_level": isolation}))
    before = isolation_of(engine)

    migrations.upgrade(engine)

    migrations.check(engine)
    assert isolation_of(engine) == before
    engine.dispose()


def isolation_of(engine: Engine) -> tuple[str, bool]:
    with engine.connect() as connection:
        level = connection.get_isolation_level()
        return level, engine.dialect.detect_autocommit_setting(connection.connection.dbapi_connection)


def test_an_engine_that_begins_its_sqlite_transactions_itself_is_welcome(blank_sqlite):
    engine = create_engine(blank_sqlite.url)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    migrations.upgrade(engine)

    migrations.check(engine)
    engine.dispose()


def test_an_async_engine_is_opened_again_with_a_sync_driver(blank):
    url = blank.url if blank.is_postgresql else blank.url.set(drivername="sqlite+aiosqlite")
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


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("postgresql+asyncpg://app:pw@db/shop", "postgresql+psycopg://app:pw@db/shop"),
        (
            "postgresql+asyncpg://db/shop?ssl=require&timeout=5&host=/run&port=5433",
            "postgresql+psycopg://db/shop?connect_timeout=5&host=%2Frun&port=5433&sslmode=require",
        ),
        ("postgresql+asyncpg://db/shop?statement_cache_size=0&command_timeout=9", "postgresql+psycopg://db/shop"),
        ("postgresql+psycopg_async://db/shop?sslmode=require", "postgresql+psycopg://db/shop?sslmode=require"),
        ("postgresql+psycopg2://db/shop?ssl=x", "postgresql+psycopg2://db/shop?ssl=x"),
    ],
)
def test_a_url_for_asyncio_leads_to_its_database_by_a_synchronous_driver(url, same):
    target = synchronous(make_url(url))

    assert target == make_url(same)


def test_what_is_no_target_is_refused(blank_sqlite):
    connection = create_async_engine(blank_sqlite.url.set(drivername="sqlite+aiosqlite")).connect()

    for target in (connection, object()):
        with pytest.raises(ConfigurationError, match=f"{type(target).__name__} is not a target"):
            migrations.upgrade(target)


def test_a_database_without_migrations_is_refused():
    with pytest.raises(
        SchemaError, match="there are no migrations for 'oracle', only for postgresql, sqlite, mariadb and mysql"
    ):
        migrations.sql("oracle")


def test_a_connection_keeps_its_transaction_for_the_caller_to_roll_back(blank):
    before = everything(blank)

    with create_engine(blank.url, poolclass=NullPool).connect() as connection:
        migrations.upgrade(connection)
        migrations.check(connection)
        connection.rollback()

    assert everything(blank) == before


def test_a_connection_keeps_its_transaction_for_the_caller_to_commit(blank):
    with blank.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER)")
        migrations.upgrade(connection)

    migrations.check(blank.url)
    assert "business" in "".join(everything(blank))


def test_a_callers_lock_timeout_is_as_it_was(blank_postgresql):
    with blank_postgresql.begin() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '123ms'")

        migrations.upgrade(connection)

        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "123ms"


def test_a_connection_in_autocommit_mode_is_refused(blank_postgresql):
    engine = create_engine(blank_postgresql.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)

    with engine.connect() as connection, pytest.raises(NoTransaction):
        migrations.upgrade(connection)


def test_an_async_connection_upgrades_by_run_sync(blank):
    url = blank.url if blank.is_postgresql else blank.url.set(drivername="sqlite+aiosqlite")

    async def upgrade() -> None:
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            await connection.run_sync(migrations.upgrade)
        async with engine.connect() as connection:
            await connection.run_sync(migrations.downgrade)
            await connection.rollback()
        await engine.dispose()

    asyncio.run(upgrade())

    migrations.check(blank.url)


def test_an_upgrade_inside_the_apps_migration_spares_alembics_globals(blank):
    from alembic import op

    with blank.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        migrations.upgrade(op.get_bind())
        op.execute("CREATE TABLE after_it (id INTEGER)")

    migrations.check(blank.url)
    assert "after_it" in "".join(everything(blank))


# Schemas


def test_a_sqlite_schema_that_is_not_attached_is_named(blank_sqlite):
    with pytest.raises(SchemaError, match="no database is attached as 'elsewhere'"):
        migrations.upgrade(blank_sqlite.url, schema="elsewhere")


def test_an_attached_sqlite_database_is_a_schema(blank_sqlite, tmp_path):
    with create_engine(blank_sqlite.url, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"ATTACH '{tmp_path / 'side.db'}' AS side")
        migrations.upgrade(connection, schema="side")
        migrations.check(connection, schema="side")
        connection.commit()

    migrations.check(f"sqlite:///{tmp_path / 'side.db'}")


def test_a_role_that_may_not_create_schemas_upgrades_in_one_that_exists(blank_postgresql):
    role = f"outbox_migrations_{uuid4().hex}"
    with blank_postgresql.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"CREATE SCHEMA app AUTHORIZATION {role}")
    try:
        with blank_postgresql.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            migrations.upgrade(connection, schema="app")

        migrations.check(blank_postgresql.url, schema="app")
    finally:
        with blank_postgresql.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role} CASCADE")
            connection.exec_driver_sql(f"DROP ROLE {role}")
