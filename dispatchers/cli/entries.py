"""`outbox status`, `list` and `show`: the commands that only read."""

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

ENDED = ("delivered", "failed", "cancelled")
ENTRIES_DEFAULT = 50
ENTRIES_MAX = 1000
ENDED_SINCE = timedelta(days=1)  # by default: without a bound one page may sort every entry that ever ended
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
    help="For monitoring: exit with status 5 if an entry is uncertain or sending is suspended.",
)
@options.database_options
def status(
    parent: str | None, env: str | None, scope: str | None, source: str | None, exit_code: bool, target: options.Target
) -> None:
    """Show queue health, or the status of one parent key.

    Without PARENT, shows for each destination the number of unfinished entries in each state, and the age of the oldest due
    entry. PARENT is the key of a business request, for example an Idempotency-Key. With it, shows every entry under this
    key, also finished ones, oldest first.
    """
    from dispatchers.admin import entries as admin_entries
    from dispatchers.admin.overview import read_overview

    if parent is None:
        with reading(target) as (connection, tables):
            overview = read_overview(connection, tables)
        answer(overview, lambda: rendering.overview(overview))
        needs_attention = overview.uncertain > 0 or overview.suspended_reason is not None
    else:
        wanted = _parent_wanted(env, parent, scope, source)
        with reading(target) as (connection, tables):
            entries = admin_entries.read_entries_of_parent(connection, tables, wanted)
        if not entries:
            raise _nothing_under(wanted)
        answer({"entries": entries}, lambda: [rendering.entries_of_parent(entries)])
        needs_attention = any(entry.state == "uncertain" for entry in entries)
    if exit_code and needs_attention:
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
    return NothingFound(f"no entry has the parent key {wanted.key!r}{of}")


# --- list


@click.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([*rendering.WAITING, *ENDED]),
    help="Only entries in this state; repeatable. By default every unfinished state.",
)
@click.option("--operation", help="Only this operation and those below it: stripe, or stripe.refunds.create.")
@click.option("--destination", help="Only entries for this destination.")
@click.option("--parent", help="Only entries under this parent key, e.g. an Idempotency-Key.")
@click.option("--suspended", is_flag=True, help="Only entries that an operator or a check suspended.")
@click.option(
    "--since",
    type=options.Since(),
    help="Only entries due, or finished, since then: 15m, 2h, 7d or an instant. By default 1d for finished entries.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, ENTRIES_MAX),
    default=ENTRIES_DEFAULT,
    show_default=True,
    help="Maximum number of entries.",
)
@click.option("--after", type=options.Cursor(), help="Cursor that the previous page printed.")
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
    target: options.Target,
    **given: Any,
) -> None:
    """List entries by state, destination, operation or parent.

    Lists unfinished entries, the earliest due first. With --state delivered, failed or cancelled: finished entries, the newest
    first.
    """
    from dispatchers.admin import entries as admin_entries
    from outbox.keys import check_field

    for field in ("operation", "destination"):
        if given[field] is not None:
            check_field(field, given[field])
    ended = _are_ended(states, suspended=given["suspended"])
    if ended and since is None and parent is None:
        since = ENDED_SINCE
    own_env = env
    if parent is None and not _was_given("env"):
        env = None  # the variable names the env of a parent; entries of another env must be listed too
    narrowed = (parent, env, scope, source) != (None, None, None, None)
    wanted = admin_entries.Filter(
        states=states or rendering.WAITING,
        parent=_parent_wanted(env, parent, scope, source) if narrowed else None,
        since=since,
        **given,
    )
    with reading(target) as (connection, tables):
        page = admin_entries.list_entries(connection, tables, wanted, entries_max=limit, after=after)
    following = page.next and f"{instant(page.next[0])},{page.next[1]}"
    document = {"at": page.at, "since": page.since, "entries": page.entries, "next": following}
    answer(document, lambda: rendering.page(page, following, ended=ended, env=own_env))


def _was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def _are_ended(states: tuple[str, ...], *, suspended: bool) -> bool:
    ended = [state for state in states if state in ENDED]
    if ended and len(ended) < len(set(states)):
        raise click.UsageError(
            f"one list cannot mix unfinished and finished entries: list {', '.join(ended)} separately"
        )
    if ended and suspended:
        raise click.UsageError(f"--suspended lists unfinished entries only: {', '.join(ended)} is a finished state")
    return bool(ended)


# --- show


@click.command()
@click.argument("id")
@click.option("--payload", is_flag=True, help="Show the payload too, not only its size.")
@options.database_options
def show(id: str, payload: bool, target: options.Target) -> None:
    """Show one entry in full: fields, state and history.

    ID is the entry's id, or at least its first 8 digits.
    """
    from dispatchers.admin import entries as admin_entries

    with reading(target) as (connection, tables):
        entry = admin_entries.read_entry(connection, tables, find(connection, tables, id))
        content = admin_entries.read_payload(connection, tables, entry.id) if payload else None
    document = plain(entry) | ({"payload": content} if payload else {})
    answer(document, lambda: rendering.details(entry, content, with_payload=payload))


def find(connection: "Connection", tables: "Tables", given: str) -> UUID:
    """The one entry that `given` names. Raises EntryNotFound, and UsageError if it is malformed or ambiguous."""
    from dispatchers.admin import entries as admin_entries

    digits = given.replace("-", "").lower()
    if not ID_DIGITS_MIN <= len(digits) <= 32 or digits.strip("0123456789abcdef"):
        raise click.UsageError(f"{given!r} is not an entry's id: give {ID_DIGITS_MIN} to 32 hexadecimal digits")
    found = admin_entries.find_ids(connection, tables, digits)
    if not found:
        raise admin_entries.no_entry(given)
    if len(found) > 1:
        listed = [str(id) for id in found[: admin_entries.CANDIDATES_MAX]]
        more = ["and more"] if len(found) > len(listed) else []
        raise click.UsageError(f"{given!r} is ambiguous, give more digits: {', '.join([*listed, *more])}")
    return found[0]
