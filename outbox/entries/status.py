"""The status of a parent's entries, and cancelling an entry that was certainly never sent."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, select, text, true
from sqlalchemy.orm import Session

from outbox.configuration import Configuration
from outbox.encryption import Encryption, StoredField, open_json
from outbox.errors import EncryptionError
from outbox.keys import ParentKey, Tag, as_parent_key, check_id, encode_native, ids_under, parent_id
from outbox.sessions.session import flush_all
from outbox.sql.clock import clock
from outbox.sql.connections.requirements import require_connection
from outbox.sql.connections.transactions import require_transaction
from outbox.sql.dialect import dialect_of
from outbox.sql.ordering import Place, advance
from outbox.sql.schema.functions import function_name
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables

ALL_IDS = (UUID(int=0), UUID(int=2**128 - 1))

State = Literal["pending", "sending", "retry", "uncertain", "delivered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStatus:
    """The present status of one entry.

    state: delivered, failed and cancelled are final and true. Uncertain means that the effect may have happened: only a
        status lookup at the service, or an operator, can decide.
    result: the part of the service's answer that the adapter kept; None until the entry is settled. Raises `CannotDecrypt` or
        `KeyServiceFailed` if it is encrypted and could not be decrypted: the other attributes can be read nevertheless.
    reason: why the entry failed, waits or is uncertain, if so.
    attempts: how many sends may have left.
    """

    id: UUID
    operation: str
    discriminator: str
    child_key: str
    state: State
    reason: str | None
    attempts: int
    created_at: datetime
    settled_at: datetime | None
    _result: Any = field(repr=False)

    @property
    def result(self) -> Any:
        if isinstance(self._result, EncryptionError):
            raise self._result.with_traceback(None)
        return self._result


def read_status(configuration: Configuration, session: Session, parent: str | ParentKey) -> list[EntryStatus]:
    """Every entry under `parent`, oldest first, including what this session has enqueued."""
    flush_all(session)
    connection = session.connection()
    require_connection(connection, configuration.schema)
    return _of_parent(connection, configuration, parent_id(configuration.env, as_parent_key(parent)))


def every_status(connection: Connection, configuration: Configuration) -> list[EntryStatus]:
    """Every entry, oldest first: for the tests of an app."""
    return _read(connection, configuration, true())


def entries_of_request(connection: Connection, configuration: Configuration, record_id: UUID) -> list[EntryStatus]:
    """Every entry that the request of this record caused, oldest first: under its own key and under other parents."""
    entry = configuration.tables.entry
    own = _of_parent(connection, configuration, record_id)
    caused = and_(entry.c.record_id == record_id, entry.c.record_id != entry.c.parent_id)
    elsewhere = _read(connection, configuration, caused)
    return sorted([*own, *elsewhere], key=lambda status: (status.created_at, status.id))


def _of_parent(connection: Connection, configuration: Configuration, parent: UUID) -> list[EntryStatus]:
    return _read(connection, configuration, is_under(configuration.tables.entry, parent), ids_under(parent))


def _read(
    connection: Connection,
    configuration: Configuration,
    condition: ColumnElement[bool],
    ids: tuple[UUID, UUID] = ALL_IDS,
) -> list[EntryStatus]:
    """ids: the range of their ids. Without it the join reads the whole queue where the planner believes that it is empty."""
    tables, encryption = configuration.tables, configuration.encryption
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement

    def is_of_entry(id: ColumnElement[UUID]) -> ColumnElement[bool]:
        return and_(id == entry.c.id, id.between(*ids))

    statement = (
        select(
            entry.c.id,
            entry.c.env,
            entry.c.operation,
            entry.c.discriminator,
            entry.c.tag,
            func.coalesce(settlement.c.state, queue.c.state).label("state"),
            settlement.c.result,
            settlement.c.reason,
            queue.c.outcome,
            func.coalesce(settlement.c.attempts, queue.c.attempts).label("attempts"),
            entry.c.created_at,
            settlement.c.settled_at,
        )
        .select_from(
            entry.outerjoin(queue, is_of_entry(queue.c.id)).outerjoin(settlement, is_of_entry(settlement.c.id))
        )
        .where(condition)
        .order_by(entry.c.created_at, entry.c.id)
    )
    return [
        EntryStatus(
            id=row.id,
            operation=row.operation,
            discriminator=row.discriminator,
            child_key=encode_native(Tag(bytes(row.tag))),
            state=row.state,
            reason=row.reason if row.settled_at else waiting_reason(row.state, row.outcome),
            attempts=row.attempts,
            created_at=row.created_at,
            settled_at=row.settled_at,
            _result=None if row.result is None else _result(encryption, row),
        )
        for row in connection.execute(statement)
    ]


def _result(encryption: Encryption | None, row: Any) -> Any:
    """The result, or why it cannot be decrypted. It is opened here: a key service is called without blocking an event loop."""
    stored = row.result.encode() if isinstance(row.result, str) else row.result
    try:
        return json.loads(open_json(encryption, stored, StoredField(row.env, row.id, row.operation, "result")))
    except EncryptionError as error:
        return error


def waiting_reason(state: str, outcome: str | None) -> str | None:
    """Why an entry that has not ended is in its state, by the queue's `outcome`.

    While it is being sent, not what a process wrote that could not serve it.
    """
    on_record = json.loads(outcome) if outcome else {}
    reason: str | None = on_record.get("reason")
    return None if state == "sending" and on_record.get("unserved") else reason


def cancel_entry(configuration: Configuration, session: Session, entry_id: UUID) -> bool:
    """Cancel an entry that was certainly never sent. On PostgreSQL, by the function that the app's role may call."""
    check_id("entry_id", entry_id)
    flush_all(session)
    connection = session.connection()
    require_transaction(connection, configuration.schema)
    if dialect_of(connection).has_functions:
        function = function_name("cancel", configuration.schema, configuration.prefix)
        return bool(connection.execute(text(f"SELECT {function}(:id)"), {"id": entry_id}).scalar_one())
    return _cancel_by_hand(connection, configuration.tables, entry_id)


def _cancel_by_hand(connection: Connection, tables: Tables, entry_id: UUID) -> bool:
    """Cancel where there are no functions or roles: one DELETE with the condition, and the inserts that follow."""
    queue, settlement = tables.queue, tables.settlement
    gone = dialect_of(connection).delete_returning(
        connection,
        queue,
        [queue.c.deliveries, queue.c.attempts, queue.c.key_epoch, queue.c.ordering_key, queue.c.position],
        queue.c.id == entry_id,
        queue.c.state.in_(("pending", "retry")),
        queue.c.lease_token.is_(None),
        ~queue.c.maybe_sent,
        ~exists().where(settlement.c.id == queue.c.id),
        ~exists().where(tables.meta.c.suspended_reason.is_not(None)),
    )
    if not gone:
        return False
    (cancelled,) = gone
    connection.execute(
        insert(settlement).values(
            id=entry_id,
            state="cancelled",
            deliveries=cancelled.deliveries,
            attempts=cancelled.attempts,
            key_epoch=cancelled.key_epoch,
            settled_at=clock(),
        )
    )
    if cancelled.position is not None:
        advance(connection, tables, [Place(cancelled.ordering_key, cancelled.position)])
    return True
