"""Shows what was sent and answered for an entry, and records in the audit log who saw it."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, select

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.admin.read.entries import no_entry
from dispatchers.admin.read.plain_values import parsed_or_text
from outbox.encryption import Encryption, FieldName, StoredField, open_json
from outbox.errors import EncryptionError
from outbox.sql.schema.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAndAnswered:
    """headers: as they were enqueued. result: the part of the service's answer that the adapter kept; None until it has ended.

    What is nested deeper than 100 levels is its text. What cannot be decrypted is the reason why not.
    """

    id: UUID
    payload: Any
    headers: Any
    result: Any


def reveal(
    connection: Connection,
    tables: Tables,
    id: UUID,
    *,
    actor: str,
    reason: str,
    encryption: Encryption | None = None,
) -> SentAndAnswered:
    """What was sent and answered. The audit log has who saw it, once the caller's transaction has committed: show it then.

    encryption: the data keys. Raises `EntryNotFound`, `InvalidValue` for an actor or a reason outside its limits, and
    `EncryptionError` if neither the payload nor a result can be shown.
    """
    check_decision(actor, reason)
    entry, settlement = tables.entry, tables.settlement
    joined = entry.outerjoin(settlement, settlement.c.id == entry.c.id)
    columns = select(entry.c.env, entry.c.operation, entry.c.payload, entry.c.headers, settlement.c.result)
    row = connection.execute(columns.select_from(joined).where(entry.c.id == id)).one_or_none()
    if row is None:
        raise no_entry(id)
    write_audit(connection, tables, actor=actor, action="reveal_payload", kind="entry", target=str(id), reason=reason)
    stored: dict[FieldName, bytes | None] = {
        "payload": bytes(row.payload),
        "result": None if row.result is None else row.result.encode(),
    }
    shown, failed = dict[FieldName, Any](), list[EncryptionError]()
    for field, value in stored.items():
        try:
            opened = value and open_json(encryption, value, StoredField(row.env, id, row.operation, field))
            shown[field] = opened and parsed_or_text(opened.decode())
        except EncryptionError as error:
            shown[field] = str(error)
            failed.append(error)
    if len(failed) == sum(value is not None for value in stored.values()):
        raise failed[0]
    return SentAndAnswered(id=id, headers=parsed_or_text(row.headers), **shown)
