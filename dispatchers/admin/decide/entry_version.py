"""The version of an entry: it changes with each attempt and with each line of the entry's history.

An operator decides on the evidence of one version. Meanwhile the entry may have been sent again, and be uncertain for another
reason, or an ended one may have been asked for again: the decision about the older version is then refused.
"""

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, func, select

from dispatchers.admin.decide.decisions import entry_row
from outbox.sql.schema.tables import Tables


def events_of(tables: Tables) -> Any:
    """How many lines the history of a row of the queue has."""
    event = tables.event
    return select(func.count()).where(event.c.entry_id == tables.queue.c.id).scalar_subquery()


def version_text(attempts: int, events: int) -> str:
    return f"{attempts}.{events}"


def what_changed(
    connection: Connection, tables: Tables, entry_id: UUID, version: str, *, may_have_ended: bool = False
) -> str | None:
    """What an operator missed who saw the entry in this version; None if nothing. The row of an unfinished entry stays locked.

    Raises as `entry_row`, for an entry that has ended too unless `may_have_ended`.
    """
    row, event = _settlement(connection, tables, entry_id) if may_have_ended else None, tables.event
    if row is None:
        row = entry_row(connection, tables, entry_id)
    history = select(event.c.kind, event.c.actor, event.c.reason).where(event.c.entry_id == entry_id)
    events = connection.execute(history.order_by(event.c.id)).all()
    if version == version_text(row.attempts, len(events)):
        return None
    sent = f"was sent {row.attempts} {'time' if row.attempts == 1 else 'times'}"
    if not events:
        return f"entry {entry_id} has changed since you read it: it is {row.state} and {sent}"
    last = events[-1]
    by = f" by {last.actor}" if last.actor else ""
    text = f"entry {entry_id} has changed since you read it: it is {row.state}, {sent}, and its last event is"
    return f"{text} the {last.kind}{by}: {last.reason or 'no reason given'}"


def _settlement(connection: Connection, tables: Tables, entry_id: UUID) -> Row[Any] | None:
    settlement = tables.settlement
    return connection.execute(select(settlement).where(settlement.c.id == entry_id)).one_or_none()
