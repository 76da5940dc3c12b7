"""`outbox retry`, `cancel`, `resolve`, `release` and `again`: decisions about one entry, or about all that a filter selects."""

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from dispatchers.cli import filters, options
from dispatchers.cli.bulk import NO_BULK, Bulk, bulk_options, decide_in_bulk, require_one
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.data_keys import data_keys
from dispatchers.cli.filters import Given
from dispatchers.cli.named_entries import find
from dispatchers.cli.output import answer, can_ask, clean
from dispatchers.cli.over_databases import decision_options
from dispatchers.cli.proposals import configuration_of, propose

if TYPE_CHECKING:
    from dispatchers.admin.decide.effects import Action
    from dispatchers.admin.decide.rules import Verdict

VERDICTS: "dict[Verdict, str]" = {
    "happened": "it happened",
    "did_not_happen": "it did not happen and will not",
    "send_again": "it will be sent again, and may then happen twice",
}
SETTLES = "a running dispatcher will settle it, callbacks included"
CALLS = "its outcome is recorded: a running dispatcher that has the callback will call it and settle the entry"
SENDS = "a running dispatcher will send it, when no earlier send is in flight any more"


@click.command()
@click.argument("id", required=False)
@filters.filter_options
@bulk_options
@decision_options()
def retry(id: str | None, given: Given, bulk: Bulk, actor: str, reason: str, target: options.Target) -> None:
    """Make waiting entries due now.

    Give an ID, or options that select entries. The attempts still count. A failed entry cannot be retried: `outbox
    again` makes a new one.
    """
    from dispatchers.admin.decide import decisions

    _require_one(id, given, bulk)
    if id is None or bulk.propose:
        _decide_all("retry", id, given, bulk, actor, reason, target)
        return
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        sends = decisions.retry(connection, tables, entry_id, actor=actor, reason=reason)
    follows = "a running dispatcher will send it" if sends else CALLS
    _report(entry_id, "retry", actor, f"entry {entry_id} is due now: {follows}")


@click.command()
@click.argument("id", required=False)
@filters.filter_options
@bulk_options
@decision_options()
def cancel(id: str | None, given: Given, bulk: Bulk, actor: str, reason: str, target: options.Target) -> None:
    """Cancel entries that have not been sent.

    Give an ID, or options that select entries.
    """
    from dispatchers.admin.decide import decisions

    _require_one(id, given, bulk)
    if id is None or bulk.propose:
        _decide_all("cancel", id, given, bulk, actor, reason, target)
        return
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        settled = decisions.cancel(connection, tables, entry_id, actor=actor, reason=reason)
    text = "is cancelled: no dispatcher serves it" if settled else f"will be cancelled: {SETTLES}"
    _report(entry_id, "cancel", actor, f"entry {entry_id} {text}", settled=settled)


@click.command()
@click.argument("id", required=False)
@click.option("--happened", is_flag=True, help="The effect happened: the entry becomes delivered.")
@click.option("--did-not-happen", is_flag=True, help="It did not happen and will not: the entry becomes failed.")
@click.option(
    "--send-again",
    is_flag=True,
    help="Send it again: under the same key while that is safe, else under a new one. It may happen twice.",
)
@click.option("--result", help="With --happened: the service's answer, as JSON.")
@filters.filter_options
@bulk_options
@decision_options()
def resolve(
    id: str | None,
    result: str | None,
    given: Given,
    bulk: Bulk,
    actor: str,
    reason: str,
    target: options.Target,
    **verdicts: bool,
) -> None:
    """Record the outcome of uncertain entries.

    Give an ID, or options that select entries. Ask the service first whether the effect happened. The decision is
    recorded with its reason. On a terminal, the command asks for confirmation.
    """
    from dispatchers.admin.decide import decisions

    verdict = _one_of(verdicts)
    answered = _parsed_result(result, verdict)
    _require_one(id, given, bulk)
    if id is None or bulk.propose:
        if result is not None and id is None:
            raise click.UsageError("--result is the service's answer for one entry: use it with an ID only")
        _decide_all("resolve", id, given, bulk, actor, reason, target, verdict=verdict, result=answered)
        return
    if can_ask() and not bulk.yes:
        _confirm(id, verdict, target)
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        by: dict[str, Any] = {"actor": actor, "reason": reason, "result": answered, "encryption": data_keys()}
        decisions.resolve(connection, tables, entry_id, verdict, **by)
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
    from dispatchers.admin.read import entries as admin_entries
    from outbox.encryption import UNOPENED

    with reading(target) as (connection, tables):
        entry = admin_entries.read_entry(connection, tables, find(connection, tables, id))
    if entry.state != "uncertain" and not (entry.reason or "").startswith(UNOPENED):
        return  # the decision will be refused: ask nothing
    click.echo(
        f"entry {entry.id}: {entry.operation} of {clean(entry.parent)}, {entry.state}"
        + (f" ({clean(entry.reason)})" if entry.reason else ""),
        err=True,
    )
    click.confirm(f"Record that {VERDICTS[verdict]}?", abort=True, err=True)


@click.command()
@click.argument("id", required=False)
@filters.filter_options
@bulk_options
@decision_options()
def release(id: str | None, given: Given, bulk: Bulk, actor: str, reason: str, target: options.Target) -> None:
    """Release suspended entries or a blocked group.

    Give an ID, or options that select entries. An ordering group contains the entries of one ordering key. It is
    blocked if one of them is failed or uncertain. --ordering-key alone releases the group of this key. --ordering-key with
    --suspended releases the suspended entries of this key.
    """
    from dispatchers.admin.decide import decisions

    if id is None and filters.has_only(given, "ordering_key"):
        if bulk._replace(yes=False) != NO_BULK:
            rule = "--ordering-key alone releases its whole ordering group"
            raise click.UsageError(
                f"{rule}: with other options give --suspended too, for the suspended entries of this key"
            )
        _release_group(given["ordering_key"], actor, reason, target)
        return
    _require_one(id, given, bulk)
    if id is None or bulk.propose:
        _decide_all("release", id, {**given, "suspended": True}, bulk, actor, reason, target)
        return
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        decisions.release(connection, tables, entry_id, actor=actor, reason=reason)
    answer({"id": entry_id, "decision": "release", "actor": actor}, f"entry {entry_id} released")


def _release_group(ordering_key: str, actor: str, reason: str, target: options.Target) -> None:
    from dispatchers.admin.decide import decisions
    from outbox.keys import check_field

    check_field("ordering_key", ordering_key)
    with deciding(target) as (connection, tables):
        decisions.release_group(connection, tables, ordering_key, actor=actor, reason=reason)
    document = {"ordering_key": ordering_key, "decision": "release", "actor": actor}
    answer(document, f"ordering group {clean(ordering_key)} released")


@click.command()
@click.argument("id", required=False)
@filters.filter_options
@bulk_options
@decision_options()
def again(id: str | None, given: Given, bulk: Bulk, actor: str, reason: str, target: options.Target) -> None:
    """Enqueue failed or cancelled entries once more.

    Give an ID, or options that select entries. A new entry has the same payload, options, headers and parent. It
    has a discriminator of its own, and so another child key: for the service it is a new effect. If you ask twice for one
    entry, there is one new entry. Needs the app's OUTBOX_SECRET and OUTBOX_ENV.
    """
    from dispatchers.admin.decide.again import again as ask_again

    configuration = configuration_of(given["env"], target)
    if configuration is None:
        raise click.UsageError("the new entry's key is derived from a secret: set OUTBOX_SECRET and OUTBOX_ENV")
    # With an ID, --env names the deployment, as OUTBOX_ENV does, and selects nothing.
    require_one(id, bulk, has_filter=not filters.is_empty(given, env_selects=id is None))
    if id is None or bulk.propose:
        _decide_all("again", id, given, bulk, actor, reason, target, configuration=configuration)
        return
    with deciding(target) as (connection, tables):
        entry_id = find(connection, tables, id)
        made = ask_again(connection, configuration, entry_id, actor=actor, reason=reason)
    follows = "is enqueued again" if made.is_new else "was asked for again before"
    document = {"id": entry_id, "decision": "again", "actor": actor, "again": made.id, "is_new": made.is_new}
    answer(document, f"entry {entry_id} {follows} as {made.id}")


def _require_one(id: str | None, given: Given, bulk: Bulk) -> None:
    require_one(id, bulk, has_filter=not filters.is_empty(given))


def _decide_all(
    action: "Action",
    id: str | None,
    given: Given,
    bulk: Bulk,
    actor: str,
    reason: str,
    target: options.Target,
    **more: Any,
) -> None:
    from dispatchers.admin.decide.bulk import BulkDecision

    decision = BulkDecision(action=action, actor=actor, reason=reason, **more)
    if bulk.propose:
        propose(id, given, decision, target)
    else:
        decide_in_bulk(given, decision, bulk, target)


def _report(entry_id: UUID, decision: str, actor: str, text: str, **more: Any) -> None:
    answer({"id": entry_id, "decision": decision, "actor": actor} | more, text)
