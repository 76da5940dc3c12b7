"""Proposals as they are stored: the decision, its entries, and how both are read."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select

from dispatchers.admin.decide.audit import AuditRow
from dispatchers.admin.decide.bulk import BulkDecision
from dispatchers.admin.decide.bulk_sentence import asks_again
from dispatchers.admin.decide.effects import Action
from dispatchers.admin.decide.rules import Verdict
from dispatchers.admin.read.entries import EntrySummary, read_entries_where
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.errors import EntryNotFound
from dispatchers.store.records.queries import unreadable
from outbox.sql.clock import database_now
from outbox.sql.schema.rights import Right, without_right
from outbox.sql.schema.tables import Tables

MAX_FOUND = 1000
SAME_TRANSACTION = timedelta(minutes=1)  # it writes at most 1,000 entries between the two times
ENTRIES_LISTED = 5
"""How many entries of each proposal in a list are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedDecision:
    """The whole decision. verdict: of `resolve`. result: with `happened`, the service's answer that will be stored.

    count: how many entries it is about. ids: all of them. entries: as they are now, the first few in a list; without those that
    were deleted.
    """

    action: Action
    verdict: Verdict | None
    result: Any
    count: int
    ids: list[UUID]
    entries: list[EntrySummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposed decision. state: `open`, `expired`, `confirmed` or `withdrawn`. sentence: what it does, with the count and the
    filter. decision: None for a reader who may not read it.

    decided_by: who confirmed it, or withdrew it. needs_secret: whether only a process with the app's secret can confirm it.
    """

    id: UUID
    at: datetime
    expires_at: datetime
    actor: str
    sentence: str
    reason: str
    state: str
    decided_by: str | None
    decided_at: datetime | None
    needs_secret: bool
    decision: ProposedDecision | None


def stored_text(decision: BulkDecision, wanted: Filter, ids: Sequence[UUID]) -> str:
    """The decision as the column has it."""
    members = {
        "action": decision.action,
        "verdict": decision.verdict,
        "result": decision.result,
        "states": list(wanted.states),
        "ids": [str(id) for id in ids],
    }
    return json.dumps(members)


def ids_in(stored: str) -> list[UUID]:
    return [UUID(each) for each in json.loads(stored)["ids"]]


def read_proposals(
    connection: Connection, tables: Tables, *, max_rows: int = 100, rights: Collection[Right] = tuple(Right)
) -> list[Proposal]:
    """The newest proposals, in every state. rights: of the reader."""
    proposal, now = tables.proposal, database_now(connection)
    newest: Any = select(*_columns(connection, tables, rights)).order_by(proposal.c.at.desc(), proposal.c.id)
    rows = connection.execute(newest.limit(max_rows)).all()
    return _proposals(connection, tables, rows, now, ENTRIES_LISTED)


def read_proposal(
    connection: Connection, tables: Tables, id: UUID, *, rights: Collection[Right] = tuple(Right)
) -> Proposal:
    """One proposal with all of its entries. rights: of the reader. Raises `EntryNotFound`."""
    one: Any = select(*_columns(connection, tables, rights)).where(tables.proposal.c.id == id)
    row = connection.execute(one).one_or_none()
    if row is None:
        raise EntryNotFound(f"no proposal has the id {id}")
    return _proposals(connection, tables, [row], database_now(connection), None)[0]


def find_proposals(connection: Connection, tables: Tables, rows: Sequence[AuditRow]) -> dict[int, UUID]:
    """The proposals that rows of the audit log are about, by the row's id: a row has only their sentence, actor and time."""
    proposal, sentences = tables.proposal, {row.target for row in rows if row.kind == "entries"}
    if not sentences:
        return {}
    some = select(proposal.c.id, proposal.c.sentence, proposal.c.actor, proposal.c.at)
    some = some.add_columns(proposal.c.decided_by, proposal.c.decided_at).where(proposal.c.sentence.in_(sentences))
    made = [
        (each.sentence, actor, at, each.id)
        for each in connection.execute(some.order_by(proposal.c.at.desc()).limit(MAX_FOUND))
        for actor, at in ((each.actor, each.at), (each.decided_by, each.decided_at))
        if at is not None
    ]
    found = {}
    for row in rows:
        near = [
            (abs(row.at - at), id)
            for sentence, actor, at, id in made
            if (sentence, actor) == (row.target, row.actor) and abs(row.at - at) < SAME_TRANSACTION
        ]
        if near:
            found[row.id] = min(near)[1]
    return found


def _columns(connection: Connection, tables: Tables, rights: Collection[Right]) -> list[Any]:
    decision = tables.proposal.c.decision
    withheld = unreadable(connection, [decision]) | without_right(tables, [decision], rights)
    return [column for column in tables.proposal.c if column not in withheld]


def _proposals(
    connection: Connection, tables: Tables, rows: Sequence[Row[Any]], now: datetime, listed: int | None
) -> list[Proposal]:
    stored = {row.id: json.loads(row.decision) for row in rows if "decision" in row._mapping}
    ids = {id: [UUID(each) for each in members["ids"]] for id, members in stored.items()}
    wanted = {each for listing in ids.values() for each in listing[:listed]}
    entries = {each.id: each for each in read_entries_where(connection, tables, tables.entry.c.id.in_(wanted))}

    def decision(id: UUID) -> ProposedDecision | None:
        if id not in stored:
            return None
        members = {name: stored[id][name] for name in ("action", "verdict", "result")}
        shown = [entries[each] for each in ids[id][:listed] if each in entries]
        return ProposedDecision(**members, count=len(ids[id]), ids=ids[id], entries=shown)

    return [_proposal(row, now, decision(row.id)) for row in rows]


def _proposal(row: Row[Any], now: datetime, decision: ProposedDecision | None) -> Proposal:
    is_expired = row.state == "open" and row.expires_at <= now
    state, needs_secret = "expired" if is_expired else row.state, asks_again(row.sentence)
    return Proposal(**{**row._mapping, "state": state, "needs_secret": needs_secret, "decision": decision})
