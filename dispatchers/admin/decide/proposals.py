"""Decisions that need a second person: one operator proposes, another one confirms within a time limit.

A proposal has the ids of its entries, so what is confirmed is what was proposed. The confirming transaction carries the decision
out; what has changed meanwhile is left alone and counted, as in bulk. The history of each entry and the audit log name both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, Select, insert, select, update

from dispatchers.admin.decide.audit import write_audit, write_proposed
from dispatchers.admin.decide.bulk import BulkDecision, Preview, decide_batch, preview
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.admin.decide.effects import require_storable
from dispatchers.admin.decide.persons import is_same_person
from dispatchers.admin.decide.proposed import Proposal, ids_in, read_proposal, stored_text
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.errors import DecisionRefused, EntryNotFound
from outbox.configuration import Configuration
from outbox.errors import InvalidValue
from outbox.sql.clock import clock, database_now
from outbox.sql.schema.tables import Tables

MAX_ENTRIES = 1000  # they are decided in one transaction, which holds its locks for some seconds
VALID_FOR = timedelta(hours=4)
CHANGED_STATE = "its state is another one now"


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
) -> Proposal:
    """Store the decision about the entries that the filter selects now, for another operator to confirm.

    among, seen_at: as of `preview`. Raises `DecisionRefused` if the decision is allowed for none of them, `InvalidValue` for more
    than `MAX_ENTRIES` entries, and what `preview` raises.
    """
    found = preview(connection, tables, wanted, decision, among=among, seen_at=seen_at)
    if not found.ids:
        why = "; ".join(found.left_alone) or "no entry meets the filter"
        raise DecisionRefused(f"nothing to propose: {why}", "none")
    if len(found.ids) > MAX_ENTRIES:
        rule = f"are more than {MAX_ENTRIES} entries, the most that one proposal may have: narrow the filter"
        raise InvalidValue("entries", len(found.ids), rule)
    require_storable(connection, tables, found.ids, decision.result)
    actor, reason = decision.actor, decision.reason
    check_decision(actor, _of_both(reason, actor))
    id = uuid4()
    made = insert(tables.proposal).values(
        id=id,
        at=found.at,
        expires_at=found.at + VALID_FOR,
        actor=actor,
        sentence=found.sentence,
        reason=reason,
        decision=stored_text(decision, wanted, found.ids),
        state="open",
    )
    connection.execute(made)
    _log(connection, tables, found.sentence, found.ids, actor=actor, action="propose", reason=reason)
    return read_proposal(connection, tables, id)


def confirm(
    connection: Connection, tables: Tables, id: UUID, *, actor: str, configuration: Configuration | None = None
) -> Confirmed:
    """Carry the proposed decision out, in the caller's transaction. configuration: as of `BulkDecision`, for `again`.

    Raises `EntryNotFound` for an unknown proposal, and `DecisionRefused` for the operator who proposed it, after its time limit,
    and if it was confirmed or withdrawn before. Raises `ConfigurationError` if it needs the app's secret, and this is another or
    none.
    """
    row = _open_row(connection, tables, id, actor)
    if is_same_person(actor, row.actor):
        raise DecisionRefused(f"proposal {id} was made by {row.actor!r}: another operator must confirm it", "open")
    decision, found = _stored(row, actor, configuration)
    ids, why = found.ids, decision.reason
    done = decide_batch(connection, tables, decision, found, ids)
    write_audit(
        connection,
        tables,
        actor=actor,
        action=decision.action,
        kind="entries",
        target=row.sentence,
        reason=why,
        count=done.done,
    )
    write_proposed(connection, tables, ids, actor=actor, action="confirm", reason=_about(row.sentence, why))
    closed = _close(connection, tables, id, "confirmed", actor)
    return Confirmed(proposal=closed, done=done.done, skipped=done.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a proposal would do if it were confirmed now: how many entries it would change, and leave alone for which reason."""

    would_change: int
    left_alone: Mapping[str, int]


def effect_now(connection: Connection, tables: Tables, id: UUID, configuration: Configuration | None = None) -> Effect:
    """Writes nothing. configuration: as of `confirm`. Raises as `confirm` for an unknown proposal and another secret."""
    row = _row(connection, select(tables.proposal).where(tables.proposal.c.id == id), id)
    decision, found = _stored(row, row.actor, configuration)
    among = preview(connection, tables, found.wanted, decision, among=found.ids, seen_at=row.at)
    others = len(found.ids) - len(among.ids) - sum(among.left_alone.values())
    return Effect(
        would_change=len(among.ids), left_alone={**among.left_alone} | ({CHANGED_STATE: others} if others else {})
    )


def withdraw(connection: Connection, tables: Tables, id: UUID, *, actor: str) -> Proposal:
    """Close a proposal without carrying it out; its own operator may, too. Raises as `confirm`."""
    row = _open_row(connection, tables, id, actor)
    why = _of_both(row.reason, row.actor)
    _log(connection, tables, row.sentence, ids_in(row.decision), actor=actor, action="withdraw", reason=why)
    return _close(connection, tables, id, "withdrawn", actor)


def _open_row(connection: Connection, tables: Tables, id: UUID, actor: str) -> Row[Any]:
    """The proposal, locked: of two who confirm at the same time, the second finds it confirmed."""
    check_decision(actor, None)
    locked = select(tables.proposal).where(tables.proposal.c.id == id).with_for_update()
    row = _row(connection, locked, id)
    if row.state != "open":
        raise DecisionRefused(f"proposal {id} was {row.state} by {row.decided_by!r}", row.state)
    if row.expires_at <= database_now(connection):
        raise DecisionRefused(f"proposal {id} has expired: propose the decision again", "expired")
    return row


def _row(connection: Connection, wanted: Select[Any], id: UUID) -> Row[Any]:
    row = connection.execute(wanted).one_or_none()
    if row is None:
        raise EntryNotFound(f"no proposal has the id {id}")
    return row


def _stored(row: Row[Any], actor: str, configuration: Configuration | None) -> tuple[BulkDecision, Preview]:
    """What was proposed, for this operator to carry out."""
    stored, ids = json.loads(row.decision), ids_in(row.decision)
    decision = BulkDecision(
        action=stored["action"],
        actor=actor,
        reason=_of_both(row.reason, row.actor),
        verdict=stored["verdict"],
        result=stored["result"],
        configuration=configuration,
    )
    wanted = Filter(states=stored["states"])
    return decision, Preview(at=row.at, sentence=row.sentence, wanted=wanted, ids=ids, left_alone={})


def _close(connection: Connection, tables: Tables, id: UUID, state: str, actor: str) -> Proposal:
    closed = update(tables.proposal).where(tables.proposal.c.id == id)
    connection.execute(closed.values(state=state, decided_by=actor, decided_at=clock()))
    return read_proposal(connection, tables, id)


def _of_both(reason: str, proposer: str) -> str:
    """The reason in the history and the audit log, where the actor is the one who confirms."""
    return f"{reason} (proposed by {proposer})"


def _about(sentence: str, reason: str) -> str:
    return f"{sentence}: {reason}"


def _log(
    connection: Connection,
    tables: Tables,
    sentence: str,
    ids: Sequence[UUID],
    *,
    actor: str,
    action: str,
    reason: str,
) -> None:
    """Record what was done with a proposal: once as a whole, and once for each of its entries."""
    count = len(ids) if action == "propose" else 0
    write_audit(
        connection, tables, actor=actor, action=action, kind="entries", target=sentence, reason=reason, count=count
    )
    write_proposed(connection, tables, ids, actor=actor, action=action, reason=_about(sentence, reason))
