"""`outbox status`, `list` and `show`: the commands that only read."""

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dispatchers.admin.read.plain_values import plain
from dispatchers.cli import filters, options, rendering
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.data_keys import data_keys
from dispatchers.cli.exit_codes import UNCERTAIN, NothingFound
from dispatchers.cli.filters import ENDED, Given
from dispatchers.cli.named_entries import find, is_known_id, require_any
from dispatchers.cli.output import answer, one_of_several
from dispatchers.cli.over_databases import decision_options, one_database, over_databases

if TYPE_CHECKING:
    from dispatchers.admin.read.entry_filter import ParentWanted
    from dispatchers.admin.read.search import Found

ENTRIES_DEFAULT = 50
MAX_ENTRIES = 1000
MAX_ROWS = (
    20_000  # entries that one page compares with the options: some 100 ms, and as many as a page of the dashboard
)
ENDED_SINCE = timedelta(days=1)  # by default: without a bound one page may sort every entry that ever ended


# --- status


@click.command()
@click.argument("parent", required=False)
@options.env_option
@options.any_scope_option
@options.any_source_option
@options.all_option
@click.option(
    "--exit-code",
    is_flag=True,
    help="For monitoring: exit with status 5 if an entry is uncertain or sending is suspended.",
)
@over_databases
def status(
    parent: str | None,
    env: str | None,
    scope: str | None,
    source: str | None,
    is_whole: bool,
    exit_code: bool,
    target: options.Target,
) -> None:
    """Show queue health, or the status of one parent key.

    Without PARENT, shows for each destination the number of unfinished entries in each state, and the age of the oldest due
    entry; of more than 30 destinations those that need attention most. PARENT is the key of a business request, for example
    an Idempotency-Key. With it, shows every entry under this key, also finished ones, oldest first.
    """
    from dispatchers.admin.read import entries as admin_entries
    from dispatchers.admin.read.overview import read_overview

    if parent is None:
        with reading(target) as (connection, tables):
            overview = read_overview(connection, tables)
        answer(overview, lambda: rendering.overview(overview, is_whole=is_whole))
        needs_attention = overview.uncertain > 0 or overview.suspended_reason is not None
    else:
        wanted = filters.parent_wanted(env, parent, scope, source)
        with reading(target) as (connection, tables):
            entries = admin_entries.read_entries_of_parent(connection, tables, wanted)
        if not entries:
            raise _nothing_under(wanted)
        answer({"entries": entries}, lambda: [rendering.entries_of_parent(entries)])
        needs_attention = any(entry.state == "uncertain" for entry in entries)
    if exit_code and needs_attention:
        click.get_current_context().exit(UNCERTAIN)


def _nothing_under(wanted: "ParentWanted") -> click.ClickException:
    given = [f"{name} {value!r}" for name in ("env", "scope", "source") if (value := getattr(wanted, name)) is not None]
    of = f" of {', '.join(given)}" if given else ""
    return NothingFound(f"no entry has the parent key {wanted.key!r}{of}")


# --- list


@click.command("list")
@click.argument("text", required=False)
@filters.filter_options
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_ENTRIES),
    default=ENTRIES_DEFAULT,
    show_default=True,
    help="Maximum number of entries.",
)
@click.option("--after", type=options.Cursor(), help="Cursor that the previous page printed.")
@over_databases
def list_entries(text: str | None, given: Given, limit: int, after: Any, target: options.Target) -> None:
    """List entries by state, destination, operation or parent.

    Lists unfinished entries, the earliest due first. With --state uncertain alone, the entry that has been in doubt longest
    comes first. With --state delivered, failed or cancelled, lists finished entries, the newest first, by default those of
    the last day. Compares 20,000 entries with the options at most: then a page may be short, and --after continues.

    TEXT is an Idempotency-Key, an ordering key, a child key, or an id in a service's answer such as pi_123: lists the entries
    that it names.
    """
    from dispatchers.admin.read import entries as admin_entries

    if text is not None:
        if not filters.is_empty(given) or after is not None:
            raise click.UsageError("give either a TEXT to find, or options that select entries")
        _list_found(text, target)
        return
    if after is not None and one_of_several():
        raise click.UsageError("--after continues the list of one database: give --database")
    ended = _are_ended(given["states"], suspended=given["suspended"])
    if ended and given["since"] is None and given["parent"] is None:
        given = {**given, "since": ENDED_SINCE}
    wanted = filters.filter_of(given, filters.WAITING)
    with reading(target) as (connection, tables):
        page = admin_entries.list_entries(connection, tables, wanted, max_entries=limit, after=after, max_rows=MAX_ROWS)
    document = {"at": page.at, "since": page.since, "entries": page.entries, "next": page.next}
    selected = filters.as_options(given)
    answer(document, lambda: rendering.page(page, ended=ended, env=given["env"], selected=selected))


def _list_found(text: str, target: options.Target) -> None:
    from dispatchers.admin.read import search

    with reading(target) as (connection, tables):
        _answer_found(text, search.find(connection, tables, text))


def _answer_found(text: str, found: "Found") -> None:
    require_any(text, found)
    answer(found, lambda: rendering.found(found))


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
@click.argument("text", metavar="ID|TEXT")
@click.option("--payload", is_flag=True, help="Show the payload too, not only its size; the audit log records it.")
@decision_options(partial(one_database, found_by="text"), reason_required=False)
def show(text: str, payload: bool, actor: str, reason: str | None, target: options.Target) -> None:
    """Show one entry in full: fields, state and history.

    ID is the entry's id, or at least its first 8 digits. TEXT names the entry as for `list`. If TEXT names several entries, the
    command lists them. --payload needs --reason, which is recorded with --actor. To show an encrypted payload,
    set OUTBOX_DATA_KEYS.
    """
    from dispatchers.admin.decide.payloads import reveal
    from dispatchers.admin.read import entries as admin_entries
    from dispatchers.admin.read import search

    if payload and reason is None:
        raise click.UsageError("Missing option '--reason': it is recorded who has seen the payload, and why.")
    content = None
    with reading(target) as (connection, tables):
        if is_known_id(connection, tables, text):
            entry_id = find(connection, tables, text)
        else:
            found = search.find(connection, tables, text)
            if len(found.entries) != 1:
                _answer_found(text, found)
                return
            entry_id = found.entries[0].id
        entry = admin_entries.read_entry(connection, tables, entry_id)
    if payload and reason is not None:
        with deciding(target) as (connection, tables):
            encryption = data_keys()
            content = reveal(connection, tables, entry.id, actor=actor, reason=reason, encryption=encryption).payload
    document = plain(entry) | ({"payload": content} if payload else {})
    answer(document, lambda: rendering.details(entry, content, with_payload=payload))
