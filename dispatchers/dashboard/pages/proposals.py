"""Decisions that need a second person: what was proposed, and the actions to propose, confirm and withdraw."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from dispatchers.admin.decide import proposals
from dispatchers.admin.decide.again import why_no_keys
from dispatchers.admin.decide.bulk import BulkDecision
from dispatchers.admin.decide.persons import is_same_person
from dispatchers.admin.decide.proposals import Confirmed, Effect
from dispatchers.admin.decide.proposed import Proposal, read_proposal, read_proposals
from dispatchers.admin.read.entry_filter import ENDED_STATES, WAITING_STATES, Filter
from dispatchers.dashboard.access import rights_of
from dispatchers.dashboard.actions import VERSION, Action, Deciding, no_keys, require_keys, require_version
from dispatchers.dashboard.decision_texts import BULK, BulkName, name_of
from dispatchers.dashboard.parameters import Nothing, parameter
from dispatchers.dashboard.views import Reading, View
from outbox.errors import ConfigurationError, InvalidValue
from outbox.sql.clock import database_now

PROPOSED = "The decision is proposed. Nothing changes until another operator confirms it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalsPage:
    """The newest 100 proposals, in every state. own: those that the reader made, and so cannot confirm. why_not_again: why those
    that ask again cannot be confirmed in this dashboard.
    """

    at: datetime
    proposals: list[Proposal]
    own: list[UUID]
    why_not_again: str | None


def read(reading: Reading, query: Nothing) -> ProposalsPage:
    """List the decisions that operators have proposed, the newest first."""
    return _page(reading, read_proposals(reading.connection, reading.tables, rights=rights_of(reading.identity)))


def _page(reading: Reading, found: list[Proposal]) -> ProposalsPage:
    connection, tables = reading.connection, reading.tables
    asks = any(each.needs_secret and each.state == "open" for each in found)
    return ProposalsPage(
        at=database_now(connection),
        proposals=found,
        own=[each.id for each in found if is_same_person(each.actor, reading.identity.name)],
        why_not_again=why_no_keys(connection, tables, reading.configuration) if asks else None,
    )


VIEW = View("proposals", read, is_live=False, decides=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalForm:
    """Which proposal."""

    id: UUID = parameter("The proposal's id.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalPage(ProposalsPage):
    """One proposal. text: what its decision means. effect: of an open one, what it would do now; None for a reader who may not
    read the decision, and where it cannot be known.
    """

    text: BulkName | None
    effect: Effect | None


def read_one(reading: Reading, query: ProposalForm) -> ProposalPage:
    """Show one proposal: the whole decision, all of its entries, and what it would do now."""
    connection, tables = reading.connection, reading.tables
    found = read_proposal(connection, tables, query.id, rights=rights_of(reading.identity))
    page = _page(reading, [found])
    decision = found.decision
    is_open = found.state == "open" and page.why_not_again is None
    return ProposalPage(
        at=page.at,
        proposals=page.proposals,
        own=page.own,
        why_not_again=page.why_not_again,
        text=None if decision is None else name_of(decision.action, decision.verdict),
        effect=proposals.effect_now(connection, tables, query.id, reading.configuration)
        if is_open and decision is not None
        else None,
    )


PROPOSAL = View(
    "proposal",
    read_one,
    path="/proposals/{id}",
    in_navigation=False,
    is_live=False,
    decides=True,
)


# --- propose


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryProposal:
    """A decision about one entry, for another operator to confirm."""

    id: UUID = parameter("The entry's id.")
    decision: Literal["retry", "cancel", "release", "happened", "did_not_happen", "again"] = parameter("What to do.")
    reason: str = parameter("Why, and how you know; it is recorded with your name.")
    result: Any = parameter("With `happened`: the service's answer, as JSON.", None)
    version: str | None = parameter(VERSION, None)


def _propose(deciding: Deciding, form: EntryProposal) -> Proposal:
    """Propose a decision about an entry, for another operator to confirm."""
    if form.result is not None and form.decision != "happened":
        raise InvalidValue("result", form.result, "is the service's answer: give it with `happened` only")
    require_version(deciding, form.id, form.decision, form.version)
    text, asks = BULK[form.decision], form.decision == "again"
    decision = BulkDecision(
        action=text.action,
        verdict=text.verdict,
        actor=deciding.identity.name,
        reason=form.reason,
        result=form.result,
        configuration=require_keys(deciding, deciding.connection) if asks else None,
    )
    wanted = Filter(states=ENDED_STATES if asks else WAITING_STATES)
    return proposals.propose(deciding.connection, deciding.tables, wanted, decision, among=[form.id])


# --- confirm


def _confirm(deciding: Deciding, form: ProposalForm) -> Confirmed:
    """Confirm what another operator proposed."""
    connection, tables, actor = deciding.connection, deciding.tables, deciding.identity.name
    try:
        return proposals.confirm(connection, tables, form.id, actor=actor, configuration=deciding.configuration)
    except ConfigurationError:  # it asks again
        raise no_keys(why_no_keys(connection, tables, deciding.configuration)) from None


def _withdraw(deciding: Deciding, form: ProposalForm) -> Proposal:
    """Close a proposal without carrying it out."""
    return proposals.withdraw(deciding.connection, deciding.tables, form.id, actor=deciding.identity.name)


ACTIONS = (
    Action("propose", "/entries/{id}/propose", _propose, done=PROPOSED),
    Action("confirm", "/proposals/{id}/confirm", _confirm, template="confirmed.html"),
    Action("withdraw", "/proposals/{id}/withdraw", _withdraw, done="The proposal is withdrawn."),
)
