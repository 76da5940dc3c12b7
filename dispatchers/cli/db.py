"""`outbox db`: create, upgrade and check the outbox's tables."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from dispatchers.cli import options
from dispatchers.cli.connections import existing, parsed
from dispatchers.cli.output import answer
from dispatchers.cli.over_databases import over_databases


@click.group()
def db() -> None:
    """Create, upgrade and check the outbox's tables."""


@db.command()
@partial(over_databases, is_long=True)
def upgrade(target: options.Target) -> None:
    """Create the tables, or upgrade them to this release."""
    from outbox import migrations  # alembic is an extra, and slow to load

    url = parsed(target.database)
    before = migrations.current(url, schema=target.schema, prefix=target.prefix)
    migrations.upgrade(url, schema=target.schema, prefix=target.prefix)
    head = migrations.head()
    text = f"already at {head}" if before == head else f"upgraded from {before or 'nothing'} to {head}"
    answer({"before": before, "revision": head}, text)


@db.command()
@over_databases
def check(target: options.Target) -> None:
    """Check that the tables match this release.

    If bodies are partitioned, also checks that tomorrow's partition exists. Exits with status 1 if a check fails.
    """
    from outbox import migrations

    url = existing(target.database)
    migrations.check(url, schema=target.schema, prefix=target.prefix)
    migrations.check_partitions(url, schema=target.schema, prefix=target.prefix)
    revision = migrations.current(url, schema=target.schema, prefix=target.prefix)
    by_app = f"those of {migrations.head()}, created by the app"
    answer(
        {"revision": revision, "needed": migrations.head()},
        f"the tables are {f'at {revision}' if revision else by_app}",
    )


@db.command()
@click.option(
    "--undo",
    is_flag=True,
    help="Store new bodies in the records again; existing partitions are dropped when their bodies have expired.",
)
@partial(over_databases, is_long=True)
def partition(target: options.Target, undo: bool) -> None:
    """Store response bodies in daily partitions.

    For PostgreSQL, and for many requests a day: retention then drops a partition instead of deleting rows. Existing rows stay
    where they are. Requests wait only for a moment.
    """
    from outbox import migrations

    switch = migrations.unpartition if undo else migrations.partition
    switch(existing(target.database), schema=target.schema, prefix=target.prefix)
    where = "their records" if undo else "a table partitioned by day"
    answer({"partitioned": not undo}, f"new response bodies are stored in {where}")


def _default_dialect() -> str:
    """The SQL of PostgreSQL would fail on the tables of the portable mode, which have no functions."""
    return "portable" if os.environ.get("DATABASE_URL", "").startswith("portable") else "postgresql"


def _dialect_option(command: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    shown = "postgresql, or portable if DATABASE_URL is"
    return click.option("--dialect", default=_default_dialect, type=click.Choice(names), show_default=shown)(command)


@db.command()
@partial(_dialect_option, names=["postgresql", "sqlite", "mariadb", "mysql", "portable"])
@click.option("--since", metavar="REVISION", help="Only migrations after this revision, the database's current one.")
@options.schema_option
@options.prefix_option
@options.json_option
def sql(dialect: str, since: str | None, schema: str | None, prefix: str) -> None:
    """Print the SQL of all migrations.

    Review the SQL, and run it by hand.
    """
    from outbox import migrations

    printed = migrations.sql(dialect, since=since, schema=schema, prefix=prefix)
    answer({"sql": printed}, printed)


@db.command()
@partial(_dialect_option, names=["postgresql", "mariadb", "mysql", "portable"])
@click.option("--app", default="outbox_app", show_default=True, help="Role of the app, which enqueues.")
@click.option(
    "--dispatcher", default="outbox_dispatcher", show_default=True, help="Role of the dispatcher, which sends."
)
@click.option(
    "--maintenance", default="outbox_maintenance", show_default=True, help="Role of maintenance, which deletes."
)
@click.option(
    "--dashboard", default="outbox_dashboard", show_default=True, help="Role of the dashboard, which only reads."
)
@click.option(
    "--operator", default="outbox_operator", show_default=True, help="Role of operators, who decide about entries."
)
@options.schema_option
@options.prefix_option
@options.json_option
def roles(dialect: str, schema: str | None, prefix: str, **names: str) -> None:
    """Print the SQL that creates the database's roles.

    The portable mode has no such roles.
    """
    from outbox import migrations

    printed = migrations.roles(dialect, schema=schema, prefix=prefix, **names)
    answer({"sql": printed}, printed)
