"""Decisions that need a second person: one operator proposes, another one confirms within a time limit.

A proposal has the ids of its entries, so what is confirmed is what was proposed. The confirming transaction carries the decision
out; what has changed meanwhile is left alone and counted, as in bulk.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, insert, select, update

from dispatchers.admin.audit import write_audit
from dispatchers.admin.bulk import BulkDecision, Preview, decide_batch, preview
from dispatchers.admin.bulk_sentence import asks_again
from dispatchers.admin.decisions import check_decision
from dispatchers.admin.entry_filter import Filter
from outbox.configuration import Configuration
from outbox.errors import DecisionRefused, EntryNotFound, InvalidValue
from outbox.sql.dialect import clock, database_now
from outbox.sql.schema import Tables

ENTRIES_MAX = 1000  # they are decided in one transaction, which holds its locks for some seconds
VALID_FOR = timedelta(hours=4)
VALID_FOR_MAX = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposed decision. state: `open`, `expired`, `confirmed` or `withdrawn`. sentence: what it does, with the count.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """What a confirmed proposal did. skipped: how many entries were left alone, for which reason."""

    proposal: Proposal
    done: int
    skipped: Mapping[str, int]


def propose(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    decision: BulkDecision,
    *,
    among: Sequence[UUID] | None = None,
    seen_at: datetime | None = None,
    valid_for: timedelta = VALID_FOR,
) -> Proposal:
    """Store the decision about the entries that the filter selects now, for another operator to confirm.

    among, seen_at: as of `preview`. Raises `DecisionRefused` if the decision is allowed for none of them, `InvalidValue` for more
    than `ENTRIES_MAX` entries and for a time limit above `VALID_FOR_MAX`, and what `preview` raises.
    """
    if not timedelta(0) < valid_for <= VALID_FOR_MAX:
        raise InvalidValue("valid_for", valid_for, f"must be positive, and at most {VALID_FOR_MAX}")
    found = preview(connection, tables, wanted, decision, among=among, seen_at=seen_at)
    if not found.ids:
        why = "; ".join(found.left_alone) or "no entry meets the filter"
        raise DecisionRefused(f"nothing to propose: {why}", "none")
    if len(found.ids) > ENTRIES_MAX:
        rule = f"are more than {ENTRIES_MAX} entries, the most that one proposal may have: narrow the filter"
        raise InvalidValue("entries", len(found.ids), rule)
    stored = {
        "action": decision.action,
        "verdict": decision.verdict,
        "result": decision.result,
        "states": list(wanted.states),
        "ids": [str(id) for id in found.ids],
    }
    actor, reason, sentence = decision.actor, decision.reason, found.sentence
    made = insert(tables.proposal).values(
        id=uuid4(),
        at=found.at,
        expires_at=found.at + valid_for,
        actor=actor,
        sentence=sentence,
        reason=reason,
        decision=json.dumps(stored),
        state="open",
    )
    row = connection.execute(made.returning(*_shown(tables))).one()
    _log(connection, tables, actor=actor, action="propose", target=sentence, reason=reason, count=len(found.ids))
    return _proposal(row, found.at)


def confirm(
    connection: Connection, tables: Tables, id: UUID, *, actor: str, configuration: Configuration | None = None
) -> Confirmed:
    """Carry the proposed decision out, in the caller's transaction. configuration: as of `BulkDecision`, for `again`.

    Raises `EntryNotFound` for an unknown proposal, and `DecisionRefused` for the operator who proposed it, after its time limit,
    and if it was confirmed or withdrawn before. Raises `ConfigurationError` if it needs the app's secret, and this is another or
    none.
    """
    row = _open_row(connection, tables, id, actor)
    if actor.strip().casefold() == row.actor.strip().casefold():
        raise DecisionRefused(f"proposal {id} was made by {row.actor!r}: another operator must confirm it", "open")
    stored = json.loads(row.decision)
    decision = BulkDecision(
        action=stored["action"],
        actor=row.actor,
        reason=row.reason,
        verdict=stored["verdict"],
        result=stored["result"],
        configuration=configuration,
    )
    ids = [UUID(each) for each in stored["ids"]]
    found = Preview(at=row.at, sentence=row.sentence, wanted=Filter(states=stored["states"]), ids=ids, left_alone={})
    done = decide_batch(connection, tables, decision, found, ids)
    why = f"{row.reason} (proposed by {row.actor})"
    _log(connection, tables, actor=actor, action=decision.action, target=row.sentence, reason=why, count=done.done)
    closed = _close(connection, tables, id, "confirmed", actor)
    return Confirmed(proposal=closed, done=done.done, skipped=done.skipped)


def withdraw(connection: Connection, tables: Tables, id: UUID, *, actor: str) -> Proposal:
    """Close a proposal without carrying it out; its own operator may, too. Raises as `confirm`."""
    row = _open_row(connection, tables, id, actor)
    _log(connection, tables, actor=actor, action="withdraw", target=row.sentence, reason=None, count=0)
    return _close(connection, tables, id, "withdrawn", actor)


def read_proposals(connection: Connection, tables: Tables, *, rows_max: int = 100) -> list[Proposal]:
    """The newest proposals, in every state."""
    proposal, now = tables.proposal, database_now(connection)
    newest: Any = select(*_shown(tables)).order_by(proposal.c.at.desc(), proposal.c.id).limit(rows_max)
    return [_proposal(row, now) for row in connection.execute(newest)]


def _shown(tables: Tables) -> list[Any]:
    return [column for column in tables.proposal.c if column.name != "decision"]


def _open_row(connection: Connection, tables: Tables, id: UUID, actor: str) -> Row[Any]:
    """The proposal, locked: of two who confirm at once, the second finds it confirmed."""
    check_decision(actor, None)
    locked = select(tables.proposal).where(tables.proposal.c.id == id).with_for_update()
    row = connection.execute(locked).one_or_none()
    if row is None:
        raise EntryNotFound(f"no proposal has the id {id}")
    if row.state != "open":
        raise DecisionRefused(f"proposal {id} was {row.state} by {row.decided_by!r}", row.state)
    if row.expires_at <= database_now(connection):
        raise DecisionRefused(f"proposal {id} has expired: propose the decision again", "expired")
    return row


def _close(connection: Connection, tables: Tables, id: UUID, state: str, actor: str) -> Proposal:
    closed = update(tables.proposal).where(tables.proposal.c.id == id)
    closed = closed.values(state=state, decided_by=actor, decided_at=clock())
    connection.execute(closed)
    shown: Any = select(*_shown(tables)).where(tables.proposal.c.id == id)
    row = connection.execute(shown).one()
    return _proposal(row, row.decided_at)


_log = partial(write_audit, kind="entries")


def _proposal(row: Row[Any], now: datetime) -> Proposal:
    is_expired = row.state == "open" and row.expires_at <= now
    state, needs_secret = "expired" if is_expired else row.state, asks_again(row.sentence)
    return Proposal(**{**row._mapping, "state": state, "needs_secret": needs_secret})
