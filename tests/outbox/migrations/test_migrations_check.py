"""`check` says what a database lacks and what to do; `upgrade` leaves alone what is not its own."""

import pytest
import sqlalchemy as sa
from support.migrations import ODD, create_all, everything, set_revision

from outbox import migrations
from outbox.errors import SchemaError
from outbox.migrations import inspection
from outbox.sql.connections.places import place_of

CURE = ": run `outbox db upgrade`; or the app's own Alembic, `alembic upgrade head`, if it makes the outbox's tables"

pytest_plugins = ["support.blank_databases"]


def where(blank):
    """Which database it is: the one that the caller took for another may be the mistake."""
    return place_of(sa.create_engine(blank.url))


def test_check_names_what_an_empty_database_lacks_and_the_command(blank):
    with pytest.raises(SchemaError) as raised:
        migrations.check(blank.url)

    assert str(raised.value).startswith(
        f"the outbox's database {where(blank)} (prefix 'outbox_') lacks table outbox_entry, table outbox_queue,"
    )
    assert str(raised.value).endswith(CURE)
    assert ("sequence outbox_position" in str(raised.value)) == blank.is_postgresql


def test_check_names_the_missing_schema(blank):
    with pytest.raises(SchemaError) as raised:
        migrations.check(blank.url, **ODD)

    assert str(raised.value) == (
        f"the outbox's database {where(blank)} (schema 'My Schema', prefix 'weird-prefix_') lacks schema"
        f" 'My Schema' itself:{CURE[1:]}"
    )


def test_check_names_a_column_that_was_removed_since(blank):
    migrations.upgrade(blank.url)
    with blank.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_entry DROP COLUMN headers")

    with pytest.raises(
        SchemaError,
        match=rf"lacks column outbox_entry\.headers: revision {migrations.head()} created it, .*`outbox db sql`",
    ):
        migrations.check(blank.url)


def test_check_names_the_function_that_was_removed_since(blank_postgresql):
    migrations.upgrade(blank_postgresql.url, **ODD)
    with blank_postgresql.begin() as connection:
        connection.exec_driver_sql('DROP FUNCTION "My Schema"."weird-prefix_cancel"')

    with pytest.raises(
        SchemaError, match=rf"lacks function weird-prefix_cancel: revision {migrations.head()} created it"
    ):
        migrations.check(blank_postgresql.url, **ODD)


def test_check_names_the_revisions_of_an_outdated_database(blank, monkeypatch):
    migrations.upgrade(blank.url)
    monkeypatch.setattr(inspection, "head", lambda: "9998")

    with pytest.raises(
        SchemaError, match=rf"is at revision {migrations.head()}, but this release needs 9998: run `outbox db upgrade`$"
    ):
        migrations.check(blank.url)


def test_check_accepts_a_database_that_a_newer_release_has_upgraded(blank):
    migrations.upgrade(blank.url)
    set_revision(blank, "9999")

    migrations.check(blank.url)


def test_check_says_when_a_newer_release_took_away_what_this_one_needs(blank):
    migrations.upgrade(blank.url)
    set_revision(blank, "9999")
    with blank.begin() as connection:
        connection.exec_driver_sql("DROP TABLE outbox_blocked_group")

    with pytest.raises(SchemaError, match="lacks table outbox_blocked_group: revision 9999 belongs to a newer release"):
        migrations.check(blank.url)


def test_check_accepts_tables_that_the_apps_own_metadata_made(blank):
    create_all(blank)

    migrations.check(blank.url)

    assert migrations.current(blank.url) is None


def test_check_changes_nothing(blank):
    before = everything(blank)

    with pytest.raises(SchemaError):
        migrations.check(blank.url)

    assert everything(blank) == before


def test_tables_that_the_app_made_are_to_be_brought_up_to_date_by_the_app(blank):
    create_all(blank)
    with blank.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox_destination DROP COLUMN max_permits")

    with pytest.raises(SchemaError) as checked:
        migrations.check(blank.url)
    with pytest.raises(SchemaError) as upgraded:
        migrations.upgrade(blank.url)

    assert str(checked.value).endswith(
        "lacks column outbox_destination.max_permits: the app created these tables (the table outbox_version is missing), so"
        " the app must upgrade them. With its own Alembic, run `alembic revision --autogenerate` and `alembic upgrade head`;"
        " do not run `outbox db upgrade`"
    )
    there = f"outbox_tombstone already exist in the database {where(blank)}, and no migration of the outbox made them"
    assert there in str(upgraded.value)
    assert "`alembic revision --autogenerate`" in str(upgraded.value)
    assert "drop" not in str(upgraded.value).lower()


def test_upgrade_leaves_a_newer_releases_database_alone(blank):
    migrations.upgrade(blank.url)
    set_revision(blank, "9999")

    newer = f"at revision 9999, made by a newer release than this one, which knows {migrations.head()}"
    with pytest.raises(SchemaError, match=newer):
        migrations.upgrade(blank.url)


def test_current_is_the_revision_or_none(blank):
    assert migrations.current(blank.url) is None

    migrations.upgrade(blank.url)

    assert migrations.current(blank.url) == migrations.head()
