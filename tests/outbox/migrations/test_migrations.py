"""The migrations: they make what `outbox/sql/schema/tables.py` says, and take it away again."""

import io
import re

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from support.migrations import ODD, ROOT, create_all, everything, names_for, newer_release, run_script, snapshot

from outbox import migrations
from outbox.errors import SchemaError

pytest_plugins = ["support.blank_databases"]


# What upgrade makes is what schema.py says


def test_an_upgraded_database_equals_what_create_all_makes_of_the_schema(blank, another_blank):
    for names in names_for(blank):
        migrations.upgrade(blank.url, **names)
        create_all(another_blank, **names)

    upgraded, created = snapshot(blank), snapshot(another_blank)

    assert upgraded == created
    assert all(upgraded.values())


def test_alembic_finds_no_difference_between_an_upgrade_and_the_schema(blank):
    for names in names_for(blank):
        migrations.upgrade(blank.url, **names)
        config = Config(stdout=io.StringIO())
        config.set_main_option("script_location", str(ROOT / "alembic"))
        with blank.begin() as connection:
            config.attributes.update(connection=connection, **names)

            command.check(config)  # raises on a difference


def test_the_comparison_with_the_schema_would_notice_a_change(blank, another_blank):
    migrations.upgrade(blank.url)
    create_all(another_blank)
    alter = "ALTER TABLE outbox_entry ADD COLUMN extra INTEGER"
    if blank.is_postgresql:
        alter = "ALTER TABLE outbox_queue SET (fillfactor = 60)"
    with blank.begin() as connection:
        connection.exec_driver_sql(alter)

    assert snapshot(blank) != snapshot(another_blank)


def test_postgresql_keeps_room_for_leases_and_vacuums_the_queue_by_count(blank_postgresql):
    migrations.upgrade(blank_postgresql.url)

    with blank_postgresql.begin() as connection:
        options = connection.exec_driver_sql(
            "SELECT reloptions FROM pg_class WHERE relname = 'outbox_queue'"
        ).scalar_one()

    assert set(options) == {
        "fillfactor=33",
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=2000",
        "autovacuum_vacuum_cost_delay=0",
    }


def test_the_printed_sql_makes_what_upgrade_makes(blank, another_blank):
    for names in names_for(blank):
        migrations.upgrade(blank.url, **names)
        script = migrations.sql(blank.url.get_backend_name(), **names)
        run_script(another_blank, script)

        migrations.check(another_blank.url, **names)

    assert snapshot(another_blank) == snapshot(blank)
    assert everything(another_blank) == everything(blank)
    assert migrations.current(another_blank.url) == migrations.head()


def test_the_printed_sql_since_a_revision_brings_an_older_database_up(blank, another_blank, tmp_path):
    for names in names_for(blank):
        migrations.upgrade(blank.url, **names)
        with newer_release(tmp_path):
            script = migrations.sql(blank.url.get_backend_name(), since="0001", **names)
            migrations.upgrade(another_blank.url, **names)
        run_script(blank, script)

        assert migrations.current(blank.url, **names) == "9999"
        assert not re.search(r"CREATE TABLE \S*(entry|queue|record)\b", script)

    assert snapshot(blank) == snapshot(another_blank)


def test_an_unknown_revision_is_refused_with_the_known_ones(tmp_path):
    with newer_release(tmp_path), pytest.raises(SchemaError, match=r"revision '1' does not exist: .* knows 0001, 9999"):
        migrations.sql(since="1")


# Down, and twice


def test_down_leaves_only_what_was_there_before(blank):
    with blank.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (id INTEGER PRIMARY KEY)")
    before = everything(blank)
    for names in names_for(blank):
        migrations.upgrade(blank.url, **names)
    assert everything(blank) != before

    for names in names_for(blank):
        migrations.downgrade(blank.url, **names)

    assert everything(blank) == before


def test_down_keeps_a_schema_that_it_did_not_create(blank_postgresql):
    with blank_postgresql.begin() as connection:
        connection.exec_driver_sql('CREATE SCHEMA "My Schema"')
    before = everything(blank_postgresql)

    migrations.upgrade(blank_postgresql.url, **ODD)
    migrations.downgrade(blank_postgresql.url, **ODD)

    assert everything(blank_postgresql) == before


def test_down_keeps_a_schema_in_which_something_else_lives_by_now(blank_postgresql):
    migrations.upgrade(blank_postgresql.url, schema="shared", prefix="a_")
    migrations.upgrade(blank_postgresql.url, schema="shared", prefix="b_")

    migrations.downgrade(blank_postgresql.url, schema="shared", prefix="a_")
    migrations.check(blank_postgresql.url, schema="shared", prefix="b_")
    migrations.downgrade(blank_postgresql.url, schema="shared", prefix="b_")

    assert not [name for name in everything(blank_postgresql) if "shared" in name]


def test_down_does_nothing_where_nothing_is(blank):
    before = everything(blank)

    migrations.downgrade(blank.url)

    assert everything(blank) == before


def test_up_again_after_down(blank):
    migrations.upgrade(blank.url)
    migrations.downgrade(blank.url)
    migrations.upgrade(blank.url)

    migrations.check(blank.url)


def test_a_second_upgrade_changes_nothing(blank):
    migrations.upgrade(blank.url)
    with blank.begin() as connection:
        connection.exec_driver_sql("INSERT INTO outbox_meta (id, environment) VALUES (1, 'kept')")
    before = everything(blank)

    migrations.upgrade(blank.url)

    assert everything(blank) == before
    with blank.begin() as connection:
        assert connection.exec_driver_sql("SELECT environment FROM outbox_meta").scalar_one() == "kept"


def test_the_head_is_the_last_of_one_line_of_numbered_migrations():
    scripts = ScriptDirectory(str(ROOT / "alembic"))

    line = [script.revision for script in scripts.walk_revisions()]

    assert migrations.head() == scripts.get_current_head()
    assert line == sorted(line, reverse=True)
    assert all(re.fullmatch(r"\d{4}", revision) for revision in line)
