"""Decisions about an uncertain entry that depend on what the service remembers: look it up again, or send it again.

Each is refused unless it is safe now by the rules of `safe`. A dispatcher carries it out, and then checks again what is safe.
"""

from typing import Any, Literal, cast
from uuid import UUID

from sqlalchemy import Connection, Row, select

from dispatchers.admin.decide.decisions import check_decision, entry_row, log_decision
from dispatchers.admin.decide.effects import look_up_row, refused, send_again_row
from dispatchers.admin.decide.key_window import memory_of
from dispatchers.admin.decide.safe import why_not_look_up, why_not_new_key, why_not_same_key
from dispatchers.store.records.heartbeats import read_dispatchers
from dispatchers.time_limits import Memory
from outbox.sql.clock import database_now
from outbox.sql.schema.tables import Tables


def look_up(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str) -> None:
    """Let a dispatcher look the entry up at the service now. If it finds the effect, the entry becomes delivered.

    If the service proves that it did not happen, the dispatcher sends it again, within its limits. Otherwise it stays uncertain.
    Raises `EntryNotFound` and `InvalidValue`. Raises `DecisionRefused` unless the entry is uncertain and undecided, and a live
    dispatcher has a status lookup for it.
    """
    row, memory = _prepared(connection, tables, entry_id, actor, reason)
    if (why_not := why_not_look_up(row, memory)) is not None:
        raise refused(row, why_not)
    fencing_delay = cast(Memory, memory).fencing_delay  # None was refused
    look_up_row(connection, tables, row, fencing_delay, actor, f"look_up: {reason}")
    log_decision(connection, tables, entry_id, actor, "look_up", reason)


def send_again(
    connection: Connection,
    tables: Tables,
    entry_id: UUID,
    key: Literal["same", "new"],
    *,
    actor: str,
    reason: str,
) -> None:
    """Let a dispatcher send the entry again, under the same key while the service remembers it, or under a new key after that.

    If that is no longer so when a dispatcher claims the entry, it stays uncertain.
    Raises `EntryNotFound` and `InvalidValue`. Raises `DecisionRefused` unless the entry is uncertain, and for the same key after
    the window, and for a new key before its end.
    """
    row, memory = _prepared(connection, tables, entry_id, actor, reason)
    why = why_not_same_key if key == "same" else why_not_new_key
    if (why_not := why(row, memory, database_now(connection))) is not None:
        raise refused(row, why_not)
    epoch = row.key_epoch if key == "same" else row.key_epoch + 1
    text = f"send_again under {'the same' if key == 'same' else 'a new'} key: {reason}"
    send_again_row(connection, tables, row, epoch, actor, reason, text)
    log_decision(connection, tables, entry_id, actor, "resolve", text)


def _prepared(
    connection: Connection, tables: Tables, entry_id: UUID, actor: str, reason: str
) -> tuple[Row[Any], Memory | None]:
    check_decision(actor, reason)
    row = entry_row(connection, tables, entry_id)
    entry = tables.entry
    operation: str = connection.execute(select(entry.c.operation).where(entry.c.id == entry_id)).scalar_one()
    return row, memory_of(operation, read_dispatchers(connection, tables, database_now(connection)))
