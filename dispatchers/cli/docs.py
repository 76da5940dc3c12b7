"""`outbox docs`: API documentation generated from the app's settings."""

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from dispatchers.cli import options
from dispatchers.cli.output import answer

if TYPE_CHECKING:
    from outbox.http.policy import Policy


@click.group()
def docs() -> None:
    """Print API documentation from the settings."""


@docs.command()
@click.argument("policy", metavar="MODULE:POLICY")
@click.option("--openapi", is_flag=True, help="Print an OpenAPI 3.1 fragment in JSON instead of Markdown.")
@click.option(
    "--route", "routes", multiple=True, help="A route that takes a key: 'POST /orders/{id}/refunds'. Repeatable."
)
@click.option(
    "--scope", metavar="MODULE:FUNCTION", help="The app's scope function; its docstring describes whose key it is."
)
@click.option(
    "--content", metavar="MODULE:FUNCTION", help="The app's content function; its docstring describes what is compared."
)
@click.option(
    "--body-bytes-max",
    type=click.IntRange(1),
    help="The limit set in the middleware, or in Flask's Idempotency; 1 MiB by default.",
)
@click.option(
    "--dispatcher",
    metavar="MODULE:FUNCTION",
    help="The dispatcher, or the fleet, of `outbox run`; its keep determines how long keys are refused.",
)
@options.json_option
def idempotency(
    policy: str,
    openapi: bool,
    routes: tuple[str, ...],
    scope: str | None,
    content: str | None,
    body_bytes_max: int | None,
    dispatcher: str | None,
) -> None:
    """Print an API's idempotency specification.

    MODULE:POLICY is the outbox.http.Policy of the API's requests. The page is for the API's clients. It describes the form
    and the owner of a key, what a retry must repeat, what it receives and for how long, and every error response. It is
    generated from the settings: run the command again after a change.
    """
    from outbox.http.policy import BODY_BYTES_MAX
    from outbox.http.specification import Route, specify
    from outbox.http.specification_openapi import openapi_of
    from outbox.http.specification_page import page_of

    specification = specify(
        _policy(policy),
        routes=[Route.of(route) for route in routes],
        scope=_function(scope),
        content=_function(content),
        body_bytes_max=body_bytes_max or BODY_BYTES_MAX,
        refused=_refused(dispatcher),
    )
    if openapi:
        fragment = openapi_of(specification)
        answer(fragment, json.dumps(fragment, indent=2))
    else:
        answer(specification, page_of(specification).rstrip("\n"))


def _policy(reference: str) -> "Policy":
    from dispatchers.cli.references import load
    from outbox.http.policy import Policy

    found = load(reference, what="POLICY", example="app.api:policy")
    if not isinstance(found, Policy):
        raise click.BadParameter(
            f"{reference} is of type {type(found).__name__!r}, not an outbox.http.Policy: name the object that the app passes to"
            " its integration as policy=",
            param_hint="'MODULE:POLICY'",
        )
    return found


def _function(reference: str | None) -> Any:
    from dispatchers.cli.references import load_function

    return None if reference is None else load_function(reference, example="app.api:customer")


def _refused(dispatcher: str | None) -> timedelta | None:
    from dispatchers.cli.run import make

    return None if dispatcher is None else make(dispatcher).retention.refuse
