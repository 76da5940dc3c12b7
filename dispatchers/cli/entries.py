"""`outbox status`, `list` and `show`: the commands that only look."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from dispatchers.cli import options, rendering
from dispatchers.cli.connections import reading
from dispatchers.cli.exit_codes import UNCERTAIN, NothingFound
from dispatchers.cli.output import answer, instant, plain

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dispatchers.admin.entries import ParentWanted
    from outbox.sql.schema import Tables

WAITING = ("pending", "sending", "retry", "uncertain")
ENDED = ("delivered", "failed", "cancelled")
ENTRIES_DEFAULT = 50
ENTRIES_MAX = 1000
ENDED_SINCE = timedelta(days=1)  # by default: without a bound a page of what ended may sort all that ever did
ID_DIGITS_MIN = 8


# --- status


@click.command()
@click.argument("parent", required=False)
@options.env_option
@options.any_scope_option
@options.any_source_option
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit with status 5 if anything is uncertain or every dispatcher holds, for monitoring.",
)
@options.database_options
def status(
    parent: str | None,
    env: str | None,
    scope: str | None,
    source: str | None,
    exit_code: bool,
    database: str,
    schema: str | None,
    prefix: str,
) -> None:
    """How the outbox is, or what became of one parent.

    For each destination, how much waits in which state, and how long the oldest has waited that could be sent. With
    PARENT, the key of a business request, e.g. an Idempotency-Key: every entry under it, ended ones included, oldest first.
    """
    from dispatchers.admin import entries as admin_entries
    from dispatchers.admin.overview import read_overview

    if parent is None:
        with reading(database, schema, prefix) as (connection, tables):
            overview = read_overview(connection, tables)
        answer(overview, lambda: rendering.overview(overview))
        needs_a_look = overview.uncertain > 0 or overview.suspended_reason is not None
    else:
        wanted = _parent_wanted(env, parent, scope, source)
        with reading(database, schema, prefix) as (connection, tables):
            entries = admin_entries.read_entries_of_parent(connection, tables, wanted)
        if not entries:
            raise _nothing_under(wanted)
        answer({"entries": entries}, lambda: [rendering.entries_of_parent(entries)])
        needs_a_look = any(entry.state == "uncertain" for entry in entries)
    if exit_code and needs_a_look:
        click.get_current_context().exit(UNCERTAIN)


def _parent_wanted(env: str | None, parent: str | None, scope: str | None, source: str | None) -> "ParentWanted":
    from dispatchers.admin.entries import ParentWanted
    from outbox.keys import ParentKey, check_field

    for name, value in (("env", env), ("parent", parent), ("scope", scope), ("source", source)):
        if value is not None:
            check_field(name, value)
    if parent is not None and scope is not None and source is not None:
        ParentKey(parent, scope=scope, source=source)  # raises for what no parent can be
    return ParentWanted(parent, env or None, scope, source)


def _nothing_under(wanted: "ParentWanted") -> click.ClickException:
    given = [f"{name} {value!r}" for name in ("env", "scope", "source") if (value := getattr(wanted, name)) is not None]
    of = f" of {', '.join(given)}" if given else ""
    return NothingFound(f"there is no entry under the parent {wanted.key!r}{of}")


# --- list


@click.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([*WAITING, *ENDED]),
    help="Only these; give it again for another. By default all that waits.",
)
@click.option("--operation", help="Only this operation, and all below it: stripe, or stripe.refunds.create.")
@click.option("--destination", help="Only this destination.")
@click.option("--parent", help="Only what is under this parent key, e.g. an Idempotency-Key.")
@click.option("--held", is_flag=True, help="Only what is held back by a person or a check.")
@click.option(
    "--since",
    type=options.Since(),
    help="Only what was due, of ended ones what ended, since then: 15m, 2h, 7d or an instant. Of ended ones 1d by default.",
)
@click.option(
    "--limit", type=click.IntRange(1, ENTRIES_MAX), default=ENTRIES_DEFAULT, show_default=True, help="So many at most."
)
@click.option("--after", type=options.Cursor(), help="Where the page before ended, as it printed.")
@options.env_option
@options.any_scope_option
@options.any_source_option
@options.database_options
def list_entries(
    states: tuple[str, ...],
    parent: str | None,
    since: Any,
    limit: int,
    after: Any,
    env: str | None,
    scope: str | None,
    source: str | None,
    database: str,
    schema: str | None,
    prefix: str,
    **given: Any,
) -> None:
    """List entries by state, destination, operation or parent.

    What waits, the longest due first; or with --state delivered, failed or cancelled what ended, the newest first.
    """
    from dispatchers.admin import entries as admin_entries
    from outbox.keys import check_field

    for field in ("operation", "destination"):
        if given[field] is not None:
            check_field(field, given[field])
    ended = _are_ended(states, held=given["held"])
    if ended and since is None and parent is None:
        since = ENDED_SINCE
    own_env = env
    if parent is None and not _was_given("env"):
        env = None  # the variable names the env of a parent; what waits under another is to be seen
    narrowed = (parent, env, scope, source) != (None, None, None, None)
    wanted = admin_entries.Filter(
        states=states or WAITING,
        parent=_parent_wanted(env, parent, scope, source) if narrowed else None,
        since=since,
        **given,
    )
    with reading(database, schema, prefix) as (connection, tables):
        page = admin_entries.list_entries(connection, tables, wanted, entries_max=limit, after=after)
    following = page.next and f"{instant(page.next[0])},{page.next[1]}"
    document = {"at": page.at, "since": page.since, "entries": page.entries, "next": following}
    answer(document, lambda: rendering.page(page, following, ended=ended, env=own_env))


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def _are_ended(states: tuple[str, ...], *, held: bool) -> bool:
    ended = [state for state in states if state in ENDED]
    if ended and len(ended) < len(set(states)):
        raise click.UsageError(
            f"what waits is listed by its due time, what ended by when it did: ask for {', '.join(ended)} apart"
        )
    if ended and held:
        raise click.UsageError(f"--held is of what waits: {', '.join(ended)} has ended")
    return bool(ended)


# --- show


@click.command()
@click.argument("id")
@click.option("--payload", is_flag=True, help="The payload too, else only its size.")
@options.database_options
def show(id: str, payload: bool, database: str, schema: str | None, prefix: str) -> None:
    """Show all that is known of one entry.

    ID is the entry's id, or the first 8 digits of it or more.
    """
    from dispatchers.admin import entries as admin_entries

    with reading(database, schema, prefix) as (connection, tables):
        entry = admin_entries.read_entry(connection, tables, find(connection, tables, id))
        content = admin_entries.read_payload(connection, tables, entry.id) if payload else None
    document = plain(entry) | ({"payload": content} if payload else {})
    answer(document, lambda: rendering.details(entry, content, with_payload=payload))


def find(connection: "Connection", tables: "Tables", given: str) -> UUID:
    """The one entry that `given` names. Raises EntryNotFound, and UsageError where it names none or several."""
    from dispatchers.admin import entries as admin_entries

    digits = given.replace("-", "").lower()
    if not ID_DIGITS_MIN <= len(digits) <= 32 or digits.strip("0123456789abcdef"):
        raise click.UsageError(f"{given!r} is no entry's id: give its {ID_DIGITS_MIN} to 32 hexadecimal digits")
    found = admin_entries.find_ids(connection, tables, digits)
    if not found:
        raise admin_entries.no_entry(given)
    if len(found) > 1:
        listed = [str(id) for id in found[: admin_entries.CANDIDATES_MAX]]
        more = ["and more"] if len(found) > len(listed) else []
        raise click.UsageError(f"{given!r} begins several ids, give more of it: {', '.join([*listed, *more])}")
    return found[0]
