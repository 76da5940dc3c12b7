"""Decisions that need a second person: what was proposed, and the actions to propose, confirm and withdraw."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from dispatchers.admin import proposals
from dispatchers.admin.bulk import BulkDecision
from dispatchers.admin.entry_filter import WAITING_STATES, Filter
from dispatchers.admin.proposals import Confirmed, Proposal
from dispatchers.dashboard.actions import VERSION, Action, Deciding, require_version
from dispatchers.dashboard.decision_texts import BULK
from dispatchers.dashboard.parameters import Nothing, parameter
from dispatchers.dashboard.views import Reading, View
from outbox.errors import InvalidValue
from outbox.sql.dialect import database_now

PROPOSED = "The decision is proposed. Nothing changes until another operator confirms it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalsPage:
    """The newest 100 proposals, in every state."""

    at: datetime
    proposals: list[Proposal]


def read(reading: Reading, query: Nothing) -> ProposalsPage:
    """The proposals, the newest first."""
    connection = reading.connection
    return ProposalsPage(at=database_now(connection), proposals=proposals.read_proposals(connection, reading.tables))


VIEW = View(
    name="proposals",
    path="/proposals",
    title="Proposals",
    summary="List the decisions that operators have proposed, the newest first",
    read=read,
    result=ProposalsPage,
    template="proposals.html",
    in_navigation=False,
    is_live=False,
    decides=True,
)


# --- propose


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryProposal:
    """A decision about one entry, for another operator to confirm."""

    id: UUID = parameter("The entry's id.")
    decision: Literal["retry", "cancel", "release", "happened", "did_not_happen"] = parameter("What to do.")
    reason: str = parameter("Why, and how you know; it is recorded with your name.")
    result: Any = parameter("With `happened`: the service's answer, as JSON.", None)
    version: str | None = parameter(VERSION, None)


def _propose(deciding: Deciding, form: EntryProposal) -> Proposal:
    if form.result is not None and form.decision != "happened":
        raise InvalidValue("result", form.result, "is the service's answer: give it with `happened` only")
    require_version(deciding, form.id, form.version)
    text = BULK[form.decision]
    decision = BulkDecision(
        action=text.action,
        verdict=text.verdict,
        actor=deciding.identity.name,
        reason=form.reason,
        result=form.result,
    )
    wanted = Filter(states=WAITING_STATES)
    return proposals.propose(deciding.connection, deciding.tables, wanted, decision, among=[form.id])


# --- confirm


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalForm:
    """Which proposal."""

    id: UUID = parameter("The proposal's id.")


def _confirm(deciding: Deciding, form: ProposalForm) -> Confirmed:
    return proposals.confirm(deciding.connection, deciding.tables, form.id, actor=deciding.identity.name)


def _withdraw(deciding: Deciding, form: ProposalForm) -> Proposal:
    return proposals.withdraw(deciding.connection, deciding.tables, form.id, actor=deciding.identity.name)


ACTIONS = (
    Action(
        name="propose",
        path="/entries/{id}/propose",
        summary="Propose a decision about an entry, for another operator to confirm",
        form=EntryProposal,
        run=_propose,
        result=Proposal,
        done=PROPOSED,
    ),
    Action(
        name="confirm",
        path="/proposals/{id}/confirm",
        summary="Confirm what another operator proposed",
        form=ProposalForm,
        run=_confirm,
        result=Confirmed,
        done="",
        template="confirmed.html",
    ),
    Action(
        name="withdraw",
        path="/proposals/{id}/withdraw",
        summary="Close a proposal without carrying it out",
        form=ProposalForm,
        run=_withdraw,
        result=Proposal,
        done="The proposal is withdrawn.",
    ),
)
