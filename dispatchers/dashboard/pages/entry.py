"""One entry: its fields, its history, its siblings, and the decisions about it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.admin.decide import decisions
from dispatchers.admin.decide import uncertain as uncertain_decisions
from dispatchers.admin.decide.again import again, offer_again
from dispatchers.admin.decide.cases import Case, read_cases
from dispatchers.admin.decide.entry_version import version_text
from dispatchers.admin.decide.key_window import KeyWindow
from dispatchers.admin.decide.payloads import SentAndAnswered, reveal
from dispatchers.admin.decide.safe import Decision, Offer
from dispatchers.admin.read.dispatchers import failure_fields
from dispatchers.admin.read.entries import (
    EntryDetails,
    EntryFacts,
    EntrySummary,
    read_entries_of_parent,
    read_entry,
)
from dispatchers.admin.read.entry_filter import ParentWanted
from dispatchers.admin.read.requests import RequestSummary, read_request
from dispatchers.dashboard.access import Role
from dispatchers.dashboard.actions import VERSION, Action, Deciding, require_alone, require_keys, require_version
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View, encryption_of
from dispatchers.errors import EntryNotFound
from dispatchers.store.records.heartbeats import read_dispatchers
from outbox.errors import InvalidValue
from outbox.sql.schema.tables import Tables

MAX_SIBLINGS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryQuery:
    """Which entry."""

    id: UUID = parameter("The entry's id.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPage(EntryFacts):
    """Everything that is known about one entry, except what was sent and answered.

    has_result: whether the service's answer is stored. failure: of a failed entry, how the service classifies it: those members
        of the answer that the adapter of a running dispatcher declares for it.
    window: None once it has ended. offers: None for one that was delivered, and for an identity that may not decide.
    request: the request that it belongs to. siblings: the entries of that request, or under the same parent, the oldest first,
        this one included.
    """

    entry: EntrySummary
    version: str
    has_result: bool
    failure: dict[str, Any] | None
    window: KeyWindow | None
    offers: list[Offer] | None
    request: RequestSummary | None
    siblings: list[EntrySummary]
    has_more_siblings: bool


def read(reading: Reading, query: EntryQuery) -> EntryPage:
    """Show one entry: its fields, its history, its siblings and the decisions that are safe now."""
    connection, tables = reading.connection, reading.tables
    found = read_entry(connection, tables, query.id)
    case = next(iter(read_cases(connection, tables, [query.id], found.at)), None)
    request, family = _family(connection, tables, found)
    return EntryPage(
        **{each.name: getattr(found, each.name) for each in fields(EntryFacts)},
        entry=EntrySummary(**{each.name: getattr(found, each.name) for each in fields(EntrySummary)}),
        version=version_text(found.attempts, len(found.events)),
        has_result=found.result is not None,
        failure=_failure(connection, tables, found),
        window=None if case is None else case.window,
        offers=_offers(reading, found, case) if reading.identity.may(Role.OPERATOR) else None,
        request=request,
        siblings=family[:MAX_SIBLINGS],
        has_more_siblings=len(family) > MAX_SIBLINGS,
    )


def _offers(reading: Reading, found: EntryDetails, case: Case | None) -> list[Offer] | None:
    if case is not None:
        return case.offers
    offer = offer_again(reading.connection, reading.tables, reading.configuration, found.id)
    return None if offer is None else [offer]


def _failure(connection: Connection, tables: Tables, found: EntryDetails) -> dict[str, Any] | None:
    """The part of its answer that the operation's adapter declares: other answers may contain the customer's data."""
    if found.state != "failed" or not isinstance(found.result, Mapping):
        return None
    names = failure_fields(found.operation, read_dispatchers(connection, tables, found.at))
    return {
        name: value for name, value in found.result.items() if name in names and isinstance(value, str | int)
    } or None


def _family(
    connection: Connection, tables: Tables, found: EntryDetails
) -> tuple[RequestSummary | None, list[EntrySummary]]:
    if found.record_id is not None:
        with suppress(EntryNotFound):  # maintenance has deleted the record
            request = read_request(connection, tables, found.record_id)
            return request.record, request.entries
    parent = ParentWanted(found.parent, found.env, found.scope, found.source)
    return None, read_entries_of_parent(connection, tables, parent)


VIEW = View("entry", read, path="/entries/{id}", in_navigation=False, decides=True)


# --- decide


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionForm:
    """A decision about one entry."""

    id: UUID = parameter("The entry's id.")
    decision: Decision = parameter("What to do; the view of the entry lists what is safe now.")
    reason: str = parameter("Why, and how you know; it is recorded with your name.")
    result: Any = parameter("With `happened`: the service's answer, as JSON.", None)
    version: str | None = parameter(VERSION, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision that is recorded. A running dispatcher carries it out.

    again, is_new: the entry that was asked for again, and whether this decision made it.
    """

    id: UUID
    decision: str
    actor: str
    again: UUID | None = None
    is_new: bool | None = None


def decide(deciding: Deciding, form: DecisionForm) -> Decided:
    """Record a decision about an entry."""
    require_alone(deciding, form.decision)
    require_version(deciding, form.id, form.decision, form.version)
    where = deciding.connection, deciding.tables, form.id
    by: dict[str, Any] = {"actor": deciding.identity.name, "reason": form.reason}
    decided = Decided(id=form.id, decision=form.decision, actor=deciding.identity.name)
    if form.result is not None and form.decision != "happened":
        raise InvalidValue("result", form.result, "is the service's answer: give it with `happened` only")
    match form.decision:
        case "retry":
            decisions.retry(*where, **by)
        case "cancel":
            decisions.cancel(*where, **by)
        case "release":
            decisions.release(*where, **by)
        case "look_up":
            uncertain_decisions.look_up(*where, **by)
        case "same_key":
            uncertain_decisions.send_again(*where, "same", **by)
        case "new_key":
            uncertain_decisions.send_again(*where, "new", **by)
        case "happened" | "did_not_happen":
            decisions.resolve(*where, form.decision, result=form.result, encryption=encryption_of(deciding), **by)
        case "again":
            configuration = require_keys(deciding, deciding.connection)
            made = again(deciding.connection, configuration, form.id, **by)
            return replace(decided, again=made.id, is_new=made.is_new)
    return decided


DECIDE = Action(
    "decide", "/entries/{id}/decide", decide, done="The decision is recorded. A running dispatcher carries it out."
)


# --- reveal


@dataclass(frozen=True, slots=True, kw_only=True)
class RevealForm:
    """The entry whose payload is shown, and why."""

    id: UUID = parameter("The entry's id.")
    reason: str = parameter("Why you need to see it; it is recorded with your name.")


def show(deciding: Deciding, form: RevealForm) -> SentAndAnswered:
    """Reveal what was sent and answered, which is recorded."""
    actor = deciding.identity.name
    encryption = encryption_of(deciding)
    return reveal(deciding.connection, deciding.tables, form.id, actor=actor, reason=form.reason, encryption=encryption)


REVEAL = Action("reveal", "/entries/{id}/reveal", show, role=Role.PAYLOAD_READER, template="reveal.html")

ACTIONS = (DECIDE, REVEAL)
