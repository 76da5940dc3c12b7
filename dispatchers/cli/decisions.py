"""`outbox retry`, `cancel`, `resolve` and `release`: operator decisions, recorded with a name and a reason."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.entries import find
from dispatchers.cli.output import answer, clean

if TYPE_CHECKING:
    from dispatchers.admin.decisions import Verdict

Command: TypeAlias = Callable[..., Any]

VERDICTS: "dict[Verdict, str]" = {
    "happened": "it happened",
    "did_not_happen": "it did not happen and will not",
    "send_again": "it will be sent again, and may then happen twice",
}
SETTLES = "a running dispatcher will settle it, callbacks included"
CALLS = "its outcome is recorded: a running dispatcher that has the callback will call it and settle the entry"
SENDS = "a running dispatcher will send it, once no earlier send can still be in flight"


def decision_options(*, reason_required: bool = False) -> Callable[[Command], Command]:
    actor = click.option("--actor", callback=_actor, help="Name of the operator; by default the system's user.")
    reason = click.option("--reason", required=reason_required, help="Reason; it is recorded with the decision.")

    def decorate(command: Command) -> Command:
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
def retry(id: str, actor: str, reason: str | None, target: options.Target) -> None:
    """Make a waiting entry due now.

    The entry's attempts still count. A failed entry cannot be retried: let the app enqueue a new one, with another
    discriminator.
    """
    from dispatchers.admin import decisions

    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        sends = decisions.retry(connection, tables, entry_id, actor=actor, reason=reason)
    follows = "a running dispatcher will send it" if sends else CALLS
    _report(entry_id, "retry", actor, f"entry {entry_id} is due now: {follows}")


@click.command()
@click.argument("id")
@decision_options()
def cancel(id: str, actor: str, reason: str | None, target: options.Target) -> None:
    """Cancel an entry that has not been sent."""
    from dispatchers.admin import decisions

    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        settled = decisions.cancel(connection, tables, entry_id, actor=actor, reason=reason)
    text = "is cancelled: no dispatcher serves it" if settled else f"will be cancelled: {SETTLES}"
    _report(entry_id, "cancel", actor, f"entry {entry_id} {text}", settled=settled)


@click.command()
@click.argument("id")
@click.option("--happened", is_flag=True, help="The effect happened: the entry becomes delivered.")
@click.option("--did-not-happen", is_flag=True, help="It did not happen and will not: the entry becomes failed.")
@click.option(
    "--send-again",
    is_flag=True,
    help="Send it again: under the same key while that is safe, else under a new one. It may happen twice.",
)
@click.option("--result", help="With --happened: the service's answer, as JSON.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@decision_options(reason_required=True)
def resolve(
    id: str, result: str | None, yes: bool, actor: str, reason: str, target: options.Target, **verdicts: bool
) -> None:
    """Record the outcome of an uncertain entry.

    Ask the service first whether the effect happened. The decision is recorded with its reason. On a terminal, the command
    asks for confirmation.
    """
    from dispatchers.admin import decisions

    verdict = _one_of(verdicts)
    answered = _parsed_result(result, verdict)
    if sys.stdin.isatty() and not yes:
        _confirm(id, verdict, target)
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        decisions.resolve(connection, tables, entry_id, verdict, actor=actor, reason=reason, result=answered)
    follows = SENDS if verdict == "send_again" else SETTLES
    _report(entry_id, "resolve", actor, f"entry {entry_id}: {VERDICTS[verdict]}; {follows}", verdict=verdict)


def _one_of(verdicts: dict[str, bool]) -> "Verdict":
    given: list[Verdict] = [verdict for verdict in VERDICTS if verdicts[verdict]]
    if len(given) != 1:
        raise click.UsageError("give exactly one of --happened, --did-not-happen and --send-again")
    return given[0]


def _parsed_result(result: str | None, verdict: "Verdict") -> Any:
    if result is None:
        return None
    if verdict != "happened":
        raise click.UsageError("--result is the service's answer: use it with --happened only")
    try:
        return json.loads(result)
    except ValueError as error:
        raise click.BadParameter(f"is not valid JSON: {error}", param_hint="'--result'") from None


def _confirm(id: str, verdict: "Verdict", target: options.Target) -> None:
    """Ask outside the deciding transaction: an operator may take long to answer."""
    from dispatchers.admin import entries as admin_entries

    with reading(target) as (connection, tables):
        entry = admin_entries.read_entry(connection, tables, find(connection, tables, id))
    if entry.state != "uncertain":
        return  # the decision will be refused: ask nothing
    click.echo(
        f"entry {entry.id}: {entry.operation} of {clean(entry.parent)}, {entry.state}"
        + (f" ({clean(entry.reason)})" if entry.reason else ""),
        err=True,
    )
    click.confirm(f"Record that {VERDICTS[verdict]}?", abort=True, err=True)


@click.command()
@click.argument("id", required=False)
@click.option("--ordering-key", help="Release the blocked group of this ordering key, instead of an entry.")
@decision_options()
def release(id: str | None, ordering_key: str | None, actor: str, reason: str | None, target: options.Target) -> None:
    """Release a suspended entry or a blocked group.

    An ordering group contains the entries of one ordering key. It is blocked if one of them is failed or uncertain.
    """
    from dispatchers.admin import decisions
    from outbox.keys import check_field

    if (id is None) == (ordering_key is None):
        raise click.UsageError("give either the ID of a suspended entry, or the --ordering-key of a blocked group")
    if ordering_key is not None:
        check_field("ordering_key", ordering_key)
    with deciding(target) as (connection, tables):
        if id is None:
            decisions.release_group(connection, tables, str(ordering_key), actor=actor, reason=reason)
            released: dict[str, Any] = {"ordering_key": ordering_key}
        else:
            released = {"id": find(connection, tables, id)}
            decisions.release(connection, tables, released["id"], actor=actor, reason=reason)
    what = f"ordering group {clean(str(ordering_key))}" if id is None else f"entry {released['id']}"
    answer(released | {"decision": "release", "actor": actor}, f"{what} released")


def _report(entry_id: UUID, decision: str, actor: str, text: str, **more: Any) -> None:
    answer({"id": entry_id, "decision": decision, "actor": actor} | more, text)
