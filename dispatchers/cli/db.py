"""`outbox db`: the outbox's tables."""

import click

from dispatchers.cli import options
from dispatchers.cli.connections import existing, parsed
from dispatchers.cli.output import answer


@click.group()
def db() -> None:
    """The outbox's tables."""


@db.command()
@options.database_options
def upgrade(database: str, schema: str | None, prefix: str) -> None:
    """Create the tables, or bring them up to this release."""
    from outbox import migrations  # alembic is an extra, and slow to load

    url = parsed(database)
    before = migrations.current(url, schema=schema, prefix=prefix)
    migrations.upgrade(url, schema=schema, prefix=prefix)
    head = migrations.head()
    text = f"at {head} already" if before == head else f"upgraded from {before or 'nothing'} to {head}"
    answer({"before": before, "revision": head}, text)


@db.command()
@options.database_options
def check(database: str, schema: str | None, prefix: str) -> None:
    """Say whether the tables are those of this release.

    And whether tomorrow's partition is there, where there are any. Exit status 1 if not.
    """
    from outbox import migrations

    url = existing(database)
    migrations.check(url, schema=schema, prefix=prefix)
    migrations.check_partitions(url, schema=schema, prefix=prefix)
    revision = migrations.current(url, schema=schema, prefix=prefix)
    by_app = f"what {migrations.head()} makes: the app itself made them"
    answer(
        {"revision": revision, "needed": migrations.head()},
        f"the tables are {f'at {revision}' if revision else by_app}",
    )


@db.command()
@click.option("--undo", is_flag=True, help="Keep them in the records again; those in partitions go with their day.")
@options.database_options
def partition(database: str, schema: str | None, prefix: str, undo: bool) -> None:
    """Keep responses' bodies in partitions, one a day.

    In PostgreSQL. Retention then drops a day instead of deleting rows. For many requests a day. Nothing is moved or rewritten,
    and no request waits longer than for a moment.
    """
    from outbox import migrations

    switch = migrations.unpartition if undo else migrations.partition
    switch(existing(database), schema=schema, prefix=prefix)
    where = "their records" if undo else "a table partitioned by day"
    answer({"partitioned": not undo}, f"the bodies of answers from now on are kept in {where}")


@db.command()
@click.option("--dialect", default="postgresql", type=click.Choice(["postgresql", "sqlite"]), show_default=True)
@click.option("--since", metavar="REVISION", help="Only what comes after the revision that the database is at.")
@options.schema_option
@options.prefix_option
@options.json_option
def sql(dialect: str, since: str | None, schema: str | None, prefix: str) -> None:
    """Print the SQL of all migrations.

    To be reviewed, and run by hand.
    """
    from outbox import migrations

    printed = migrations.sql(dialect, since=since, schema=schema, prefix=prefix)
    answer({"sql": printed}, printed)


@db.command()
@click.option("--app", default="outbox_app", show_default=True, help="The role of the processes that enqueue.")
@click.option("--dispatcher", default="outbox_dispatcher", show_default=True, help="The role of those that send.")
@click.option(
    "--maintenance", default="outbox_maintenance", show_default=True, help="The role that deletes what has ended."
)
@click.option("--dashboard", default="outbox_dashboard", show_default=True, help="The role that only reads.")
@options.schema_option
@options.prefix_option
@options.json_option
def roles(app: str, dispatcher: str, maintenance: str, dashboard: str, schema: str | None, prefix: str) -> None:
    """Print the SQL that makes PostgreSQL's roles. None gets more rights than it needs."""
    from outbox import migrations

    printed = migrations.roles(
        schema=schema, prefix=prefix, app=app, dispatcher=dispatcher, maintenance=maintenance, dashboard=dashboard
    )
    answer({"sql": printed}, printed)
