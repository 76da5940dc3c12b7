"""`outbox retry`, `cancel`, `resolve` and `release`: what a person decides, with a name and a reason on record."""

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.entries import find
from dispatchers.cli.output import answer, clean

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

VERDICTS = {
    "happened": "it happened",
    "did_not_happen": "it did not happen and will not",
    "send_again": "it is to be sent again, and may then happen twice",
}
SETTLES = "a running dispatcher settles it, callbacks included"
CALLS = "its outcome is known, so nothing is sent: a running dispatcher that has its callback calls it, and settles the entry"
SENDS = "a running dispatcher sends it, as soon as no earlier sender can be at work any more"


def decision_options(*, reason_required: bool = False) -> Callable[[Decorated], Decorated]:
    actor = click.option("--actor", callback=_actor, help="Who decides; by default the name of this system's user.")
    reason = click.option("--reason", required=reason_required, help="Why; it stays on record.")

    def decorate(command: Decorated) -> Decorated:
        return actor(reason(options.database_options(command)))

    return decorate


def _actor(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    from getpass import getuser

    try:
        return getuser() if value is None else value
    except (KeyError, OSError):  # a container's user without a name; which of the two depends on Python's version
        raise click.UsageError("this system's user has no name: give --actor") from None


@click.command()
@click.argument("id")
@decision_options()
def retry(id: str, actor: str, reason: str | None, database: str, schema: str | None, prefix: str) -> None:
    """Make a waiting entry due now.

    Its attempts still count. A failed entry is not retried but asked for anew, by the app, with another discriminator.
    """
    from dispatchers.admin import decisions

    with deciding(database, schema, prefix) as (connection, tables):
        entry_id = find(connection, tables, id)
        sends = decisions.retry(connection, tables, entry_id, actor=actor, reason=reason)
    follows = "a running dispatcher sends it" if sends else CALLS
    _tell(entry_id, "retry", actor, f"entry {entry_id} is due now: {follows}")


@click.command()
@click.argument("id")
@decision_options()
def cancel(id: str, actor: str, reason: str | None, database: str, schema: str | None, prefix: str) -> None:
    """Withdraw an entry that was never possibly sent."""
    from dispatchers.admin import decisions

    with deciding(database, schema, prefix) as (connection, tables):
        entry_id = find(connection, tables, id)
        settled = decisions.cancel(connection, tables, entry_id, actor=actor, reason=reason)
    text = "is cancelled: no dispatcher serves it" if settled else f"is not to be sent any more: {SETTLES}"
    _tell(entry_id, "cancel", actor, f"entry {entry_id} {text}", settled=settled)


@click.command()
@click.argument("id")
@click.option("--happened", is_flag=True, help="It happened: it becomes delivered.")
@click.option("--did-not-happen", is_flag=True, help="It did not, and will not: failed.")
@click.option("--send-again", is_flag=True, help="Send it again, under the same key while that is safe.")
@click.option("--result", help="With --happened: what the service answered, as JSON.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@decision_options(reason_required=True)
def resolve(
    id: str,
    result: str | None,
    yes: bool,
    actor: str,
    reason: str,
    database: str,
    schema: str | None,
    prefix: str,
    **verdicts: bool,
) -> None:
    """Say what became of an uncertain entry.

    After a look at the service: it stays on record, with the reason. On a terminal it asks before it writes.
    """
    from dispatchers.admin import decisions

    verdict = _one_of(verdicts)
    answered = _parsed_result(result, verdict)
    if sys.stdin.isatty() and not yes:
        _confirm(id, verdict, database, schema, prefix)
    with deciding(database, schema, prefix) as (connection, tables):
        entry_id = find(connection, tables, id)
        decisions.resolve(connection, tables, entry_id, verdict, actor=actor, reason=reason, result=answered)  # type: ignore[arg-type]
    follows = SENDS if verdict == "send_again" else SETTLES
    _tell(entry_id, "resolve", actor, f"entry {entry_id}: {VERDICTS[verdict]}; {follows}", verdict=verdict)


def _one_of(verdicts: dict[str, bool]) -> str:
    given = [verdict for verdict, is_given in verdicts.items() if is_given]
    if len(given) != 1:
        raise click.UsageError("say what became of it, one of --happened, --did-not-happen and --send-again")
    return given[0]


def _parsed_result(result: str | None, verdict: str) -> Any:
    if result is None:
        return None
    if verdict != "happened":
        raise click.UsageError("--result is what the service answered: it goes with --happened only")
    try:
        return json.loads(result)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}", param_hint="'--result'") from None


def _confirm(id: str, verdict: str, database: str, schema: str | None, prefix: str) -> None:
    """Ask outside of any transaction that decides: a person takes their time."""
    from dispatchers.admin import entries as admin_entries

    with reading(database, schema, prefix) as (connection, tables):
        entry = admin_entries.read_entry(connection, tables, find(connection, tables, id))
    if entry.state != "uncertain":
        return  # it will be refused, which needs no thought
    click.echo(
        f"entry {entry.id}: {entry.operation} of {clean(entry.parent)}, {entry.state}"
        + (f" ({clean(entry.reason)})" if entry.reason else ""),
        err=True,
    )
    click.confirm(f"Put on record that {VERDICTS[verdict]}?", abort=True, err=True)


@click.command()
@click.argument("id", required=False)
@click.option("--ordering-key", help="Let the halted lane of this ordering key go on, instead of an entry.")
@decision_options()
def release(
    id: str | None,
    ordering_key: str | None,
    actor: str,
    reason: str | None,
    database: str,
    schema: str | None,
    prefix: str,
) -> None:
    """Let a held entry or a halted lane go on.

    A lane, the entries of one ordering key, halts behind one of them that failed or is uncertain.
    """
    from dispatchers.admin import decisions
    from outbox.keys import check_field

    if (id is None) == (ordering_key is None):
        raise click.UsageError("give either the ID of a held entry, or the --ordering-key of a halted lane")
    if ordering_key is not None:
        check_field("ordering_key", ordering_key)
    with deciding(database, schema, prefix) as (connection, tables):
        if id is None:
            decisions.release_group(connection, tables, str(ordering_key), actor=actor, reason=reason)
            released: dict[str, Any] = {"ordering_key": ordering_key}
        else:
            released = {"id": find(connection, tables, id)}
            decisions.release(connection, tables, released["id"], actor=actor, reason=reason)
    what = f"the lane {clean(str(ordering_key))}" if id is None else f"entry {released['id']}"
    answer(released | {"decision": "release", "actor": actor}, f"{what} goes on")


def _tell(entry_id: UUID, decision: str, actor: str, text: str, **more: Any) -> None:
    answer({"id": entry_id, "decision": decision, "actor": actor} | more, text)
