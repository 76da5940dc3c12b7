"""Decisions in bulk: the page with the sentence and the exact count, and the action, which decides a piece in each request.

The page writes nothing. It returns the ids of the entries that it has counted. The action gets them back: it changes only
these, however many requests it takes, and returns those that are left.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, func, select

from dispatchers.admin.decide import proposals
from dispatchers.admin.decide.again import why_no_keys
from dispatchers.admin.decide.bulk import NOTHING_DONE, STATES, BulkDecision, Preview, Progress, decide, preview
from dispatchers.admin.decide.bulk_breakdown import Breakdown, break_down
from dispatchers.admin.decide.bulk_sentence import command_line, sentence
from dispatchers.admin.decide.proposed import Proposal
from dispatchers.admin.read.entry_filter import (
    ENDED_STATES,
    WAITING_STATES,
    Filter,
    check_filter,
    instant_of,
    require_plain,
    select_ids,
)
from dispatchers.admin.read.plain_values import ids_text, instant
from dispatchers.dashboard.access import Role
from dispatchers.dashboard.actions import Action, Deciding, DecidingInBatches, require_alone, require_keys
from dispatchers.dashboard.decision_texts import BULK, BulkName
from dispatchers.dashboard.failures import Failure
from dispatchers.dashboard.pages.entries import EntriesWanted, require_readable
from dispatchers.dashboard.pages.proposals import PROPOSED
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Context, Reading, View
from outbox.sql.clock import database_now

MAX_MATCHING = 10_000
"""How many entries may meet the filter: reading them takes about a second, and a form with their ids has 220 kB."""
PIECE_SECONDS = 2.0
"""How long a request begins new batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkQuery(EntriesWanted):
    """What is decided, about which entries."""

    decision: BulkName | None = parameter("What to do about each entry; without it nothing is counted.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkPage:
    """What the decision would change now.

    states: of each decision that the filter allows, those that it is about unless the filter names others.
    why_not_again: why this dashboard cannot ask again. sentence: None without a decision, and if more than 10,000 entries meet
    the filter. count: of the entries that would change. left_alone: of the others that meet the filter, how many for which
    reason. breakdown: of the entries that would change, with samples. parameters, entries: what the action needs, besides a
    reason. second_person: whether another operator must confirm it. command: which does the same, or asks again where this
    dashboard cannot.
    """

    at: datetime
    states: Mapping[str, list[str]]
    why_not_again: str | None = None
    is_too_many: bool = False
    sentence: str | None = None
    count: int = 0
    left_alone: Mapping[str, int] | None = None
    breakdown: Breakdown | None = None
    parameters: Mapping[str, Any] | None = None
    entries: str = ""
    second_person: bool = False
    command: str | None = None


class _About(NamedTuple):
    wanted: Filter
    decision: BulkDecision


def _about(
    context: Context, connection: Connection, query: "BulkQuery | CountedForm", name: BulkName, reason: str
) -> _About:
    require_readable(context.identity, query)
    text, asks = BULK[name], name == "again"
    wanted = query.filter(STATES[text.action])
    if set(wanted.states) & set(WAITING_STATES if asks else ENDED_STATES):
        kind, other = ("finished", "unfinished") if asks else ("unfinished", "finished")
        rule = f"this decision is about {kind} entries: leave the {other} states out"
        raise Failure(422, "mixed_states", rule, "state")
    if text.action == "release":
        wanted = replace(wanted, suspended=True)
    decision = BulkDecision(
        action=text.action,
        verdict=text.verdict,
        actor=context.identity.name,
        reason=reason,
        configuration=require_keys(context, connection) if asks else None,
    )
    return _About(wanted, decision)


def _choices(query: BulkQuery) -> dict[str, list[str]]:
    """The decisions that fit the filter's states, each with those that it has by default."""
    named: dict[str, list[str]] = {name: list(STATES[text.action]) for name, text in BULK.items()}
    if query.suspended:
        named.pop("again")
    if not query.state:
        return named
    is_ended = query.filter(()).is_ended
    return {name: states for name, states in named.items() if (name == "again") == is_ended}


def read(reading: Reading, query: BulkQuery) -> BulkPage:
    """Count what a decision in bulk would change, and say it in a sentence."""
    connection, tables = reading.connection, reading.tables
    empty = BulkPage(at=database_now(connection), states=_choices(query))
    if "again" in empty.states:
        empty = replace(empty, why_not_again=why_no_keys(connection, tables, reading.configuration))
    require_readable(reading.identity, query)
    if query.decision in (None, "again") and empty.why_not_again is not None:
        return replace(empty, command=command_line("again", None, query.filter(STATES["again"])))
    if query.decision is None:
        return empty
    wanted, decision = _about(reading, connection, query, query.decision, "not asked yet")
    check_filter(connection, tables, wanted)
    some = select_ids(tables, wanted, empty.at).limit(MAX_MATCHING + 1).subquery()
    if connection.execute(select(func.count()).select_from(some)).scalar_one() > MAX_MATCHING:
        return replace(empty, is_too_many=True, command=command_line(decision.action, decision.verdict, wanted))
    found = preview(connection, tables, wanted, decision)
    return replace(
        empty,
        at=found.at,
        sentence=found.sentence,
        count=len(found.ids),
        left_alone=found.left_alone,
        breakdown=break_down(connection, tables, found.wanted, found.ids) if found.ids else None,
        parameters=_parameters(found.wanted, query.decision, found.at),
        entries=ids_text(found.ids),
        second_person=query.decision in reading.second_person,
        command=command_line(decision.action, decision.verdict, found.wanted),
    )


def _parameters(wanted: Filter, decision: BulkName, at: datetime) -> dict[str, Any]:
    """The filter as parameters of the action, its spans as instants. at: when the entries were counted."""
    parent = wanted.parent
    given: dict[str, Any] = {
        "decision": decision,
        "counted_at": instant(at),
        "state": list(wanted.states),
        "operation": wanted.operation,
        "destination": wanted.destination,
        "parent_prefix": wanted.parent_prefix,
        "payload": [str(member) for member in wanted.payload] or None,
        "ordering_key": wanted.ordering_key,
        "reason_contains": wanted.reason,
        "suspended": "true" if wanted.suspended else None,
        "since": _moment(wanted.since),
        "enqueued_since": _moment(wanted.enqueued_since),
        "enqueued_before": _moment(wanted.enqueued_before),
    }
    if parent is not None:
        given |= {"parent": parent.key, "scope": parent.scope, "source": parent.source, "env": parent.env}
    return {name: value for name, value in given.items() if value is not None}


def _moment(when: datetime | timedelta | None) -> str | None:
    return instant(when) if isinstance(when, datetime) else None  # a preview has no span left


VIEW = View(
    "bulk",
    read,
    title="Decide for all that match",
    role=Role.OPERATOR,
    in_navigation=False,
    is_live=False,
    decides=True,
)


# --- decide


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedForm(EntriesWanted):
    """A decision about the entries that the page has counted."""

    decision: BulkName = parameter("What to do about each entry.")
    entries: tuple[UUID, ...] = parameter("The entries, as the previous answer returned them.")
    reason: str = parameter("Why, and how you know; it is recorded with your name.")
    counted_at: timedelta | datetime | None = parameter(
        "The view's `at`: an uncertain entry whose history has grown since is left alone.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkForm(CountedForm):
    """A `CountedForm` with what earlier requests did."""

    done: int = parameter("How many entries earlier requests have changed.", 0, minimum=0, maximum=MAX_MATCHING)
    skipped: Any = parameter("How many they have left alone, for which reason.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkDone:
    """What is committed so far.

    total: how many entries were confirmed. done: of these, how many were changed. skipped: how many were left alone, for which
    reason. left: how many a further request is needed for, with these `parameters`, `entries`, `reason`, `done` and `skipped`.
    """

    sentence: str
    total: int
    done: int
    skipped: Mapping[str, int]
    left: int
    parameters: Mapping[str, Any]
    entries: str
    reason: str


def run(deciding: DecidingInBatches, form: BulkForm) -> BulkDone:
    """Decide about the entries that the view has counted, for about two seconds; returns those that are left."""
    require_alone(deciding, form.decision)
    entries = tuple(dict.fromkeys(form.entries))  # a program may send one twice
    if len(entries) > MAX_MATCHING:
        raise Failure(422, "invalid", f"entries: {len(entries)} are more than {MAX_MATCHING}", "entries")
    before = Progress(form.done, _skipped_of(form.skipped))
    with deciding.engine.connect() as connection:
        wanted, decision = _about(deciding, connection, form, form.decision, form.reason)
        check_filter(connection, deciding.tables, wanted)
        require_plain(connection, deciding.tables, wanted, entries)
        now = database_now(connection)
    at = now if form.counted_at is None else instant_of(form.counted_at, now)
    previewed = Preview(at=at, sentence="", wanted=wanted, ids=entries, left_alone={})
    piece = _piece(deciding, decision, previewed)
    reached, rest = before.plus(piece), entries[piece.total :]
    total = reached.total + len(rest)
    return BulkDone(
        sentence=sentence(decision.action, decision.verdict, wanted, total),
        total=total,
        done=reached.done,
        skipped=reached.skipped,
        left=len(rest),
        parameters=_parameters(wanted, form.decision, at),
        entries=ids_text(rest),
        reason=form.reason,
    )


def _piece(deciding: DecidingInBatches, decision: BulkDecision, previewed: Preview) -> Progress:
    until = time.monotonic() + PIECE_SECONDS
    reached = NOTHING_DONE
    for progress in decide(deciding.engine, deciding.tables, decision, previewed):
        reached = progress
        if time.monotonic() >= until:
            break
    return reached


def _skipped_of(given: Any) -> Mapping[str, int]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(count, int) and count >= 0 for count in given.values()):
        raise Failure(422, "invalid", "skipped: pass what the previous answer returned", "skipped")
    return given


# --- propose


def propose(deciding: Deciding, form: CountedForm) -> Proposal:
    """Propose the decision about the entries that the view has counted, for another operator to confirm."""
    connection, at = deciding.connection, form.counted_at
    wanted, decision = _about(deciding, connection, form, form.decision, form.reason)
    seen_at = None if at is None else instant_of(at, database_now(connection))
    return proposals.propose(connection, deciding.tables, wanted, decision, among=form.entries, seen_at=seen_at)


ACTIONS = (
    Action("decide-in-bulk", "/bulk/decide", run, template="bulk_result.html", in_batches=True),
    Action("propose-in-bulk", "/bulk/propose", propose, done=PROPOSED),
)
