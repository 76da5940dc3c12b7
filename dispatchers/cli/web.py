"""`outbox web`: the dashboard in a server of its own."""

import importlib.util
import ipaddress
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dispatchers.cli import options
from dispatchers.cli.connections import existing
from dispatchers.cli.over_databases import databases_option, url_of_one
from dispatchers.cli.proposals import outbox_of
from dispatchers.cli.references import load_function
from dispatchers.cli.run import begin_log

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from dispatchers.dashboard.access import Authenticator
    from dispatchers.dashboard.decision_texts import BulkName

PORT = 8460


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=PORT, type=click.IntRange(0, 65535), show_default=True, help="Port; 0 for any that is free."
)
@click.option(
    "--authenticate",
    metavar="MODULE:FUNCTION",
    help="The function that returns who sends a request, e.g. shop.ops:authenticate. Without it the dashboard is read-only, and"
    " listens on a loopback address only.",
)
@click.option(
    "--users",
    type=click.Path(dir_okay=False),
    help="File of users with roles and hashed passwords, as `outbox user` prints them: the browser asks for a name and a"
    " password.",
)
@click.option(
    "--read-database",
    envvar="OUTBOX_READ_DATABASE_URL",
    show_envvar=True,
    help="SQLAlchemy URL from which pages are read, for example of a replica. By default --database.",
)
@click.option(
    "--root-path", default="", help="Path prefix that a proxy removes before it passes a request on, e.g. /outbox."
)
@click.option(
    "--second-person",
    multiple=True,
    metavar="DECISION",
    help="A decision that another operator must confirm, e.g. cancel; repeatable.",
)
@click.option(
    "--trusted-origin",
    "trusted_origins",
    multiple=True,
    metavar="ORIGIN",
    help="The dashboard's own origin behind a proxy that changes the Host header, e.g. https://ops.example.com; repeatable.",
)
@options.env_option
@options.database_option
@databases_option
@options.schema_option
@options.prefix_option
@click.option("--json", is_flag=True, expose_value=False, help="Log one JSON document per line; startup errors too.")
def web(
    host: str,
    port: int,
    authenticate: str | None,
    users: str | None,
    read_database: str | None,
    root_path: str,
    second_person: tuple["BulkName", ...],
    trusted_origins: tuple[str, ...],
    env: str | None,
    database: str | None,
    databases: str | None,
    schema: str | None,
    prefix: str,
) -> None:
    """Serve the dashboard: a page and a JSON API for operators.

    The dashboard runs until SIGTERM. Mount it in your own app instead, if your operators sign in there: see docs/dashboard.md.
    With the app's OUTBOX_SECRET and OUTBOX_ENV, operators may also ask again for failed entries.
    """
    for package in ("starlette", "jinja2", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(f"{package} is not installed: pip install 'sqlalchemy-outbox[dashboard]'")
    if authenticate is not None and users is not None:
        raise click.UsageError("give either --authenticate or --users")
    if authenticate is None and users is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: give --authenticate MODULE:FUNCTION or --users FILE, or listen"
            " on 127.0.0.1"
        )
    if root_path and not re.fullmatch(r"(/[\w.~-]+)+", root_path, re.ASCII):
        raise click.UsageError(f"--root-path {root_path} must be a path such as /outbox, without a slash at its end")
    url = url_of_one(click.get_current_context(), databases, database)
    if url is None and read_database is not None:
        raise click.UsageError("--read-database is of one database: it is not possible with --databases")
    import uvicorn

    from dispatchers.dashboard.password_file import SIGN_OUT, SignOut
    from dispatchers.dashboard.protection import LocalHostsOnly

    begin_log("info")
    settings: dict[str, Any] = {
        "authenticate": _authenticator(authenticate, users),
        "schema": schema,
        "prefix": prefix,
        "second_person": second_person,
        "trusted_origins": trusted_origins,
        "outbox": outbox_of(env, options.Target(str(url or databases), schema, prefix)),
        "sign_out": None if users is None else f"{root_path}{SIGN_OUT}",
    }
    app = _dashboard(url, databases, read_database, settings)
    if users is not None:
        app = SignOut(app)
    elif authenticate is None:
        app = LocalHostsOnly(app)
    server: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False}
    uvicorn.run(app, host=host, port=port, root_path=root_path, workers=1, **server)  # else by WEB_CONCURRENCY


def _dashboard(
    url: str | None, databases: str | None, read_database: str | None, settings: Mapping[str, Any]
) -> "ASGIApp":
    from dispatchers.dashboard import Dashboard, FleetDashboard
    from dispatchers.process.databases_file import read_databases

    if url is None:
        return FleetDashboard(read_databases(str(databases)), **settings)
    read_url = None if read_database is None else existing(read_database, "--read-database")
    return Dashboard(existing(url), read_url=read_url, **settings)


def _authenticator(reference: str | None, users: str | None) -> "Authenticator":
    if reference is not None:
        found: Authenticator = load_function(reference, example="shop.ops:authenticate")
        return found
    if users is not None:
        from dispatchers.dashboard.password_file import PasswordFile

        return PasswordFile(users)
    from dispatchers.dashboard.access import local_viewer

    return local_viewer


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
