"""The migrations on MariaDB, which commits each of their statements by itself."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.apps.rolling_shop import connect
from support.database import TABLES, Database
from support.migrations import newer_release

import outbox
from dispatchers.store.connections.outage_log import cause_of
from outbox import migrations
from outbox.errors import ConfigurationError, SchemaError
from outbox.sql import migration_locks


def shape(mariadb: Database, prefix: str) -> dict[str, set[str]]:
    """What each table of the prefix consists of, in any order, by its name without it."""
    with mariadb.observer.connect() as connection:
        names = [name for name in sa.inspect(connection).get_table_names() if name.startswith(prefix)]
        made = {name: connection.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1] for name in names}
    made = {name: re.sub(r" AUTO_INCREMENT=\d+", "", text) for name, text in made.items()}
    lines = {name: {line.rstrip(",") for line in text.replace(prefix, "").split("\n")} for name, text in made.items()}
    return {name.removeprefix(prefix): parts for name, parts in lines.items()}


@pytest.mark.owner
def test_the_migrations_make_the_tables_of_the_metadata_and_drop_them(mariadb: Database) -> None:
    migrations.upgrade(mariadb.url, prefix="migrated_")
    migrations.upgrade(mariadb.url, prefix="migrated_")

    migrated = shape(mariadb, "migrated_")
    del migrated["version"]
    assert migrated == shape(mariadb, "outbox_")
    migrations.check(mariadb.engine, prefix="migrated_")
    migrations.downgrade(mariadb.url, prefix="migrated_")
    assert shape(mariadb, "migrated_") == {}


@pytest.mark.owner
def test_a_later_release_upgrades_the_tables_on_mariadb(mariadb: Database, tmp_path: Path) -> None:
    """The migration that the rollout and other tests add to this release's."""
    migrations.upgrade(mariadb.url, prefix="migrated_")

    with newer_release(tmp_path):
        migrations.upgrade(mariadb.url, prefix="migrated_")

    assert migrations.current(mariadb.url, prefix="migrated_") == "9999"
    migrations.check(mariadb.engine, prefix="migrated_")


def test_the_app_of_the_rollout_is_accepted_on_mariadb(mariadb: Database, ob: outbox.Outbox) -> None:
    url = mariadb.url.difference_update_query(["init_command"])  # which sets the isolation level

    engine = connect(url.render_as_string(hide_password=False))

    ob.check(engine)
    engine.dispose()


@pytest.mark.owner
def test_a_migration_that_meets_a_long_transaction_can_be_continued(
    mariadb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = migration_locks.MARIADB_SESSION.replace(f"= {migration_locks.TABLE_LOCK_WAIT_SECONDS}", "= 0")
    monkeypatch.setattr(migration_locks, "MARIADB_SESSION", at_once)

    migrations.upgrade(mariadb.url, prefix="migrated_")

    with mariadb.owner() as long_transaction:
        long_transaction.exec_driver_sql("SELECT * FROM migrated_queue")
        with pytest.raises(
            SchemaError, match=r"has locked one of the tables .* What was done before stays; run it again"
        ):
            migrations.downgrade(mariadb.url, prefix="migrated_")
        assert "settlement" not in shape(mariadb, "migrated_")
    migrations.downgrade(mariadb.url, prefix="migrated_")

    assert shape(mariadb, "migrated_") == {}


@pytest.mark.owner
def test_each_table_is_of_innodb_whatever_the_servers_own_engine(mariadb: Database) -> None:
    url = mariadb.url.update_query_dict({"init_command": "SET default_storage_engine = MyISAM"})

    migrations.upgrade(url, prefix="migrated_")

    with mariadb.owner() as connection:
        engines = connection.exec_driver_sql(
            "SELECT DISTINCT engine FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND table_name LIKE 'migrated%%'"
        )
        assert list(engines.scalars()) == ["InnoDB"]


@pytest.mark.owner
def test_a_prefix_that_the_server_would_store_in_lower_case_is_refused(mariadb: Database) -> None:
    engine = sa.create_engine(mariadb.url)

    def answer(connection: sa.Connection, cursor: object, statement: str, *rest: Any) -> Any:
        return statement.replace("@@lower_case_table_names", "1"), rest[0]

    sa.event.listen(engine, "before_cursor_execute", answer, retval=True)
    for use in (migrations.upgrade, migrations.check):
        with pytest.raises(ConfigurationError, match=r"lower_case_table_names is 1.*: use the prefix 'sold_'"):
            use(engine, prefix="Sold_")
    engine.dispose()

    assert shape(mariadb, "sold_") == shape(mariadb, "Sold_") == {}


def test_a_server_that_is_read_only_is_named_as_the_cause(mariadb: Database) -> None:
    with mariadb.engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(sa.exc.OperationalError) as raised:
            connection.execute(sa.delete(TABLES.queue))

    assert cause_of(raised.value).startswith("the server or the transaction is read-only")


@pytest.mark.owner
def test_an_interrupted_migration_is_finished_by_the_next_run(mariadb: Database) -> None:
    migrations.upgrade(mariadb.url, prefix="migrated_")
    whole = shape(mariadb, "migrated_")
    for lost in ("DROP TABLE migrated_tombstone", "DROP INDEX migrated_record_keep ON migrated_record"):
        mariadb.execute(sa.text(lost))
    mariadb.execute(sa.text("DELETE FROM migrated_version"))

    migrations.upgrade(mariadb.url, prefix="migrated_")

    assert shape(mariadb, "migrated_").keys() == whole.keys()
    migrations.check(mariadb.engine, prefix="migrated_")


@pytest.mark.owner
def test_two_migrations_at_once_take_turns(mariadb: Database) -> None:
    runs = [threading.Thread(target=migrations.upgrade, args=[mariadb.url], kwargs={"prefix": "m_"}) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()

    migrations.check(mariadb.engine, prefix="m_")


@pytest.mark.owner
def test_the_printed_sql_makes_the_tables(mariadb: Database) -> None:
    script = migrations.sql(mariadb.server, prefix="printed_")
    with mariadb.observer.begin() as connection:
        for statement in filter(str.strip, script.split(";\n")):
            connection.exec_driver_sql(statement.replace("%", "%%"))

    migrations.check(mariadb.engine, prefix="printed_")
    assert migrations.current(mariadb.engine, prefix="printed_") == migrations.head()
