"""`outbox doctor`: find what is wrong with the setup."""

import asyncio
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from dispatchers.cli import options
from dispatchers.cli.connections import examining, runner
from dispatchers.cli.data_keys import data_keys
from dispatchers.cli.exit_codes import UNHEALTHY
from dispatchers.cli.keys import ring_of
from dispatchers.cli.output import answer, prose
from dispatchers.cli.over_databases import over_databases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from dispatchers.admin.check.doctor import Diagnosis
    from outbox.keys import Keyring

STYLES = {"error": "bold red", "warning": "yellow", "notice": ""}
EXTRAS = {
    "apscheduler": "dispatcher",
    "greenlet": "asyncio",
    "asyncpg": "asyncpg",
    "psycopg": "postgresql",
    "pymysql": "mariadb",
    "MySQLdb": "mysqlclient",
    "asyncmy": "asyncmy",
}
"""The extra that brings each package a dispatcher may need."""
DRIVERS = {"psycopg_async": "psycopg", "mysqldb": "MySQLdb"}
"""The packages of drivers that SQLAlchemy calls otherwise."""


@click.command()
@options.env_option
@over_databases
@click.pass_context
def doctor(ctx: click.Context, target: options.Target, env: str | None) -> None:
    """Find faults of the setup, and name a remedy for each.

    Checks the tables, OUTBOX_ENV and OUTBOX_SECRET, the running dispatchers and their settings, operations and callbacks
    that no dispatcher serves, and the database server. Changes nothing; each check has a time limit. Lists the checks that it
    could not make, for example because a right is missing. Exits with status 7 if there is an error or a warning, or if a check
    failed.
    """
    from dispatchers.admin.check.doctor import Context, diagnose

    keyring, malformed = _keyring(os.environ.get("OUTBOX_SECRET"))
    with examining(target) as (connection, tables):
        context = Context(
            tables=tables,
            prefix=target.prefix,
            env=env,
            keyring=keyring,
            malformed=malformed,
            encryption=data_keys(),
            missing=missing_packages(target.database),
        )
        found = asyncio.run(diagnose(runner(connection), context))
    document = {"is_healthy": found.is_healthy, "findings": found.findings, "checked": found.checked}
    answer({**document, "unchecked": found.unchecked}, lambda: _drawn(found))
    if not found.is_healthy:
        ctx.exit(UNHEALTHY)


def _keyring(secret: str | None) -> "tuple[Keyring | None, str | None]":
    """The key ring, and why there is none although the variable is set. The text shows nothing of the secret."""
    from outbox.errors import ConfigurationError

    try:
        return (ring_of(secret), None) if secret else (None, None)
    except ConfigurationError as error:
        return None, str(error)


def missing_packages(database: str) -> dict[str, str]:
    """The packages that `outbox run` needs for this URL and that are not installed, each with its extra."""
    from sqlalchemy import make_url

    dialect = make_url(database).get_dialect()
    needed = ["apscheduler", DRIVERS.get(dialect.driver, dialect.driver)] + (["greenlet"] if dialect.is_async else [])
    return {package: EXTRAS[package] for package in needed if package in EXTRAS and find_spec(package) is None}


def _drawn(found: "Diagnosis") -> "Iterator[RenderableType]":
    for finding in found.findings:
        yield prose(f"{finding.severity}: {finding.check}: {finding.text}", STYLES[finding.severity])
        yield prose(f"  means: {finding.meaning}")
        yield prose(f"  do: {finding.remedy}")
    for each in found.unchecked:
        yield prose(f"not checked: {each.check}: {each.reason}", "dim")
    count = len(found.findings)
    yield prose(f"{len(found.checked)} checks, {count} finding{'' if count == 1 else 's'}")
