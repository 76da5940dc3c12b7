"""`outbox user`: a line for the file of users of `outbox web`."""

import importlib.util

import click

from dispatchers.cli.options import json_option
from dispatchers.cli.output import answer


@click.command()
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    type=click.Choice(["viewer", "operator", "payload_reader"]),
    help="What the user may do; repeatable.",
)
@click.password_option(help="The password; without this option the command asks for it.")
@json_option
def user(name: str, roles: tuple[str, ...], password: str) -> None:
    """Print a line for the file of users of `outbox web`.

    Append it to the file that `outbox web --users` reads. The line contains the hash of the password, not the password.
    """
    for package in ("starlette", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(f"{package} is not installed: pip install 'sqlalchemy-outbox[dashboard]'")
    from dispatchers.dashboard.password_file import user_line

    line = user_line(name, roles, password)
    answer({"name": name, "roles": roles, "line": line}, line)
