"""Decisions by two operators: one proposes with `--propose`, another one runs `outbox confirm`."""

import json
import os
from typing import TYPE_CHECKING
from uuid import UUID

import click

from dispatchers.admin.read.plain_values import instant
from dispatchers.cli import options, rendering
from dispatchers.cli.connections import deciding, reading
from dispatchers.cli.data_keys import data_keys
from dispatchers.cli.filters import ENDED, WAITING, Given, filter_of
from dispatchers.cli.named_entries import find
from dispatchers.cli.output import answer, can_ask, cell, clean, draw, prose, table
from dispatchers.cli.over_databases import one_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from dispatchers.admin.decide.bulk import BulkDecision
    from dispatchers.admin.decide.proposed import Proposal
    from outbox.configuration import Configuration
    from outbox.instance import Outbox


def outbox_of(env: str | None, target: options.Target) -> "Outbox | None":
    """The app's, from OUTBOX_SECRET and the env; None if one of them is missing."""
    from dispatchers.cli.keys import ring_of
    from outbox.instance import Outbox

    secret = os.environ.get("OUTBOX_SECRET")
    if not secret or not env:
        return None
    return Outbox(ring_of(secret), env=env, schema=target.schema, prefix=target.prefix, encryption=data_keys())


def configuration_of(env: str | None, target: options.Target) -> "Configuration | None":
    """The settings of the outbox that `outbox_of` returns, or None."""
    found = outbox_of(env, target)
    return None if found is None else found.configuration


def propose(id: str | None, given: Given, decision: "BulkDecision", target: options.Target) -> None:
    """Store the decision about one entry, or about those that options select."""
    from dispatchers.admin.decide import proposals
    from dispatchers.admin.decide.bulk import STATES
    from dispatchers.admin.read.entry_filter import Filter

    kind = ENDED if decision.action == "again" else WAITING
    wanted = filter_of(given, STATES[decision.action]) if id is None else Filter(states=kind)
    with deciding(target) as (connection, tables):
        among = None if id is None else [find(connection, tables, id)]
        made = proposals.propose(connection, tables, wanted, decision, among=among)
    what = made.sentence if among is None else f"{made.sentence}: {among[0]}"
    until = f"another operator runs `outbox confirm {made.id}` before {instant(made.expires_at)}"
    answer(made, f"proposed: {what}\n{until}")


@click.command()
@click.argument("id", required=False, type=click.UUID)
@click.option("--withdraw", is_flag=True, help="Close the proposal without carrying it out.")
@click.option("--dry-run", is_flag=True, help="Show the whole decision and its entries, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask whether to carry it out.")
@options.env_option
@click.option("--actor", callback=options.actor_name, help="Name of the operator; by default the system's user.")
@one_database
def confirm(
    id: UUID | None,
    withdraw: bool,
    dry_run: bool,
    yes: bool,
    env: str | None,
    actor: str,
    target: options.Target,
) -> None:
    """Confirm a decision that another operator proposed.

    Shows the whole decision with its entries, asks, and carries it out. Without ID, lists the proposals, the newest first. To
    confirm `again`, set the app's OUTBOX_SECRET and OUTBOX_ENV.
    """
    from dispatchers.admin.decide import proposals
    from dispatchers.admin.decide.proposed import read_proposal, read_proposals

    if id is None:
        with reading(target) as (connection, tables):
            found = read_proposals(connection, tables)
        answer({"proposals": found}, lambda: _drawn(found))
        return
    if withdraw:
        with deciding(target) as (connection, tables):
            closed = proposals.withdraw(connection, tables, id, actor=actor)
        answer(closed, f"withdrawn: {closed.sentence}")
        return
    if dry_run or not yes:
        with reading(target) as (connection, tables):
            proposal = read_proposal(connection, tables, id)
        if dry_run:
            answer(proposal, lambda: _shown(proposal))
            return
        _ask(proposal)
    with deciding(target) as (connection, tables):
        done = proposals.confirm(connection, tables, id, actor=actor, configuration=configuration_of(env, target))
    lines = [f"confirmed: {done.proposal.sentence}", f"{done.done:,} entries changed"]
    lines += [f"{count:,} left alone: {clean(why)}" for why, count in done.skipped.items()]
    answer(done, "\n".join(lines))


def _ask(proposal: "Proposal") -> None:
    if not can_ask():
        raise click.UsageError("there is no terminal to ask for confirmation: give --yes, or --dry-run first")
    draw(_shown(proposal), to_stderr=True)
    click.confirm("Carry it out?", abort=True, err=True)


def _shown(proposal: "Proposal") -> "Iterator[RenderableType]":
    """The whole decision, with each entry."""
    yield prose(proposal.sentence)
    yield prose(f"proposed by {proposal.actor}: {proposal.reason}")
    decision = proposal.decision
    if decision is None:
        yield prose("this role may not read the decision and its entries", "dim")
        return
    if decision.verdict == "happened":
        yield prose(f"answer that is stored: {json.dumps(decision.result, ensure_ascii=False)}")
    if decision.entries:
        yield rendering.with_parents(decision.entries)
    if gone := decision.count - len(decision.entries):
        yield prose(f"{gone:,} of its {decision.count:,} entries were deleted since", "dim")


def _drawn(found: "Sequence[Proposal]") -> "Iterator[RenderableType]":
    if not found:
        yield prose("none")
        return
    drawn = table("ID", "STATE", "BY", "UNTIL", "DECISION", elastic=["DECISION"])
    for each in found:
        state = each.state if each.decided_by is None else f"{each.state} by {each.decided_by}"
        drawn.add_row(*map(cell, (each.id, state, each.actor, instant(each.expires_at), each.sentence)))
    yield drawn
    yield prose("outbox confirm ID --dry-run shows the entries and the answer", "dim")
