"""Shows what was sent and answered for an entry, and records in the audit log who saw it."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, select

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.admin.read.entries import no_entry
from dispatchers.admin.read.plain_values import parsed_or_text
from outbox.sql.schema.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAndAnswered:
    """headers: as they were enqueued. result: the part of the service's answer that the adapter kept; None until it has ended.

    What is nested deeper than 100 levels is its text.
    """

    id: UUID
    payload: Any
    headers: Any
    result: Any


def reveal(connection: Connection, tables: Tables, id: UUID, *, actor: str, reason: str) -> SentAndAnswered:
    """What was sent and answered. The audit log has who saw it, once the caller's transaction has committed: show it then.

    Raises `EntryNotFound`, and `InvalidValue` for an actor or a reason outside its limits.
    """
    check_decision(actor, reason)
    entry, settlement = tables.entry, tables.settlement
    joined = entry.outerjoin(settlement, settlement.c.id == entry.c.id)
    columns = select(entry.c.payload, entry.c.headers, settlement.c.result)
    row = connection.execute(columns.select_from(joined).where(entry.c.id == id)).one_or_none()
    if row is None:
        raise no_entry(id)
    write_audit(connection, tables, actor=actor, action="reveal_payload", kind="entry", target=str(id), reason=reason)
    return SentAndAnswered(
        id=id,
        payload=parsed_or_text(bytes(row.payload).decode()),
        headers=parsed_or_text(row.headers),
        result=None if row.result is None else parsed_or_text(row.result),
    )
