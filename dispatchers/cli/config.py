"""`outbox config`: the effective configuration and its sources. It never shows a secret."""

import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dispatchers.cli import options
from dispatchers.cli.exit_codes import failure_of
from dispatchers.cli.keys import SECRET_FORM
from dispatchers.cli.output import answer, cell, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

PACKAGES = (
    *("sqlalchemy-outbox", "sqlalchemy", "psycopg", "asyncpg", "alembic", "apscheduler", "click", "rich"),
    *("stripe", "httpx", "httptools", "aiosmtplib"),
)
MALFORMED = f"malformed: {SECRET_FORM}"
NO_URL = "not a valid SQLAlchemy URL, and therefore not shown"
SECRET_WORDS = ("pass", "secret", "token", "key")


@click.command()
@options.json_option
@options.prefix_option
@options.schema_option
@options.database_option
@click.pass_context
def config(ctx: click.Context, database: str | None, schema: str | None, prefix: str) -> None:
    """Show the effective configuration and its sources.

    With a database, shows its migration revision too. Never shows passwords or secrets, only key ids. Exits with status 1 if
    a setting is malformed.
    """
    document: dict[str, Any] = {
        "settings": {
            "database": {"value": _masked(database), "from": _origin(ctx, "database", "DATABASE_URL")},
            "schema": {"value": schema, "from": _origin(ctx, "schema")},
            "prefix": {"value": prefix, "from": _origin(ctx, "prefix")},
            "env": {"value": os.environ.get("OUTBOX_ENV"), "from": _set("OUTBOX_ENV")},
            "secret": _ring(os.environ.get("OUTBOX_SECRET")),
        },
        "revision": _revision(database, schema, prefix),
        "versions": _versions(),
    }
    answer(document, lambda: _drawn(document))
    if wrong := list(_malformed(document["settings"])):
        raise click.ClickException("; ".join(wrong))


def _malformed(settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    database, secret = settings["database"], settings["secret"]
    if database["value"] == NO_URL:
        yield f"{database['from']} is not a valid SQLAlchemy URL"
    if secret["value"] == MALFORMED:
        yield f"OUTBOX_SECRET is {MALFORMED}"


def _origin(ctx: click.Context, parameter: str, variable: str = "") -> str:
    source = ctx.get_parameter_source(parameter)
    if source is ParameterSource.COMMANDLINE:
        return f"--{parameter}"
    if source is ParameterSource.ENVIRONMENT:
        return variable
    return f"default; {variable} is not set" if variable else "default"


def _set(variable: str) -> str:
    return variable if os.environ.get(variable) else f"{variable} is not set"


def _masked(database: str | None) -> str | None:
    if database is None:
        return None
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        return NO_URL
    secret = [name for name in url.query if any(word in name.lower() for word in SECRET_WORDS)]
    return url.update_query_dict(dict.fromkeys(secret, "***")).render_as_string(hide_password=True)


def _ring(secret: str | None) -> dict[str, Any]:
    from outbox.errors import ConfigurationError
    from outbox.keys import Keyring

    fields: dict[str, Any] = {"value": None, "from": _set("OUTBOX_SECRET")}
    if not secret:
        return fields
    try:
        ring = Keyring.from_text(secret)
    except ConfigurationError:  # its text may contain the secret, if that was written in a kid's place
        return fields | {"value": MALFORMED}
    return fields | {"value": f"kids {', '.join(ring.kids)}; current {ring.current}"}


def _revision(database: str | None, schema: str | None, prefix: str) -> dict[str, str | None]:
    """The database's revision and this release's, and why the database's cannot be read, if so."""
    from dispatchers.cli.connections import existing
    from outbox import migrations

    fields: dict[str, str | None] = {"database": None, "needed": migrations.head(), "problem": None}
    if database is None:
        return fields
    try:
        fields["database"] = migrations.current(existing(database), schema=schema, prefix=prefix)
        migrations.check(existing(database), schema=schema, prefix=prefix)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        fields["problem"] = failure.message
    return fields


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _drawn(document: dict[str, Any]) -> "Iterator[RenderableType]":
    settings = document["settings"]
    yield pairs((name, _setting(setting)) for name, setting in settings.items())
    yield cell("")
    revision = document["revision"]
    found = "-" if settings["database"]["value"] is None else revision["database"] or "none"
    if revision["problem"] is None and found == "none":
        found = "none: the app created the tables; they are complete"
    yield pairs([("revision", f"{found} (this release needs {revision['needed']})"), ("problem", revision["problem"])])
    yield cell("")
    yield pairs((name, version or "not installed") for name, version in document["versions"].items())


def _setting(setting: dict[str, Any]) -> str:
    value = "-" if setting["value"] is None else setting["value"]
    return f"{value} ({setting['from']})"
