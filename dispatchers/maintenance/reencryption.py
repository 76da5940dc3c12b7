"""Counts which data keys the stored values are encrypted with, and encrypts them again with the current one.

It goes through each table by its primary key, a page in each transaction. A row is changed only if it still has the value that
was read. A run that was interrupted is repeated: it leaves alone what has the current key already.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, select, text, update

from dispatchers.store.queue.sealed_entries import seal_result
from dispatchers.stored_outcome import MalformedOutcome, read_outcome
from outbox.encryption import Encryption, StoredField, is_sealed, is_sealed_json, key_id_of, open_json, seal_json
from outbox.errors import EncryptionError
from outbox.sql.schema.body_partitions import body_table
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables
from outbox.sql.statements import stored_body

PAGE_ROWS = 200  # a page of the largest payloads is some 70 MB, and a row is locked only until the page's commit

Kind: TypeAlias = Literal["payloads", "results", "answers", "waiting results"]
NOT_ENCRYPTED = ""
"""In the place of a key's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What was done with one page. after: the last id, None at the end.

    found: by key id, how many values it has. again: how many of them were encrypted again.
    failed: the ids of rows that cannot be decrypted, with the reason.
    """

    after: UUID | None
    found: Mapping[str, int]
    again: int
    failed: Mapping[UUID, str]


@dataclass(frozen=True, slots=True)
class Value:
    """A stored value. key_id: of its key; `NOT_ENCRYPTED` for none. change: stores it again; False if it is another by now."""

    id: UUID
    key_id: str
    change: Callable[[Connection, Encryption], bool]


def read_page(connection: Connection, tables: Tables, kind: Kind, after: UUID | None) -> Page:
    """Count the values of a page. Writes nothing."""
    values, last = _PAGES[kind](connection, tables, after)
    return Page(after=last, found=Counter(value.key_id for value in values), again=0, failed={})


def encrypt_page(
    connection: Connection,
    tables: Tables,
    kind: Kind,
    after: UUID | None,
    encryption: Encryption,
    *,
    with_plain: bool = False,
) -> Page:
    """Encrypt the values of a page with the current key. with_plain: those too that are not encrypted yet.

    A value that cannot be decrypted, or encrypted, is left as it is.
    """
    values, last = _PAGES[kind](connection, tables, after)
    again, failed = 0, dict[UUID, str]()
    for value in values:
        if value.key_id == encryption.current or (value.key_id == NOT_ENCRYPTED and not with_plain):
            continue
        try:
            again += value.change(connection, encryption)
        except EncryptionError as error:
            failed[value.id] = str(error)
    return Page(after=last, found=Counter(value.key_id for value in values), again=again, failed=failed)


# --- the values of each table


def _page(connection: Connection, rows: Any, id: Any, after: UUID | None) -> tuple[Sequence[Any], UUID | None]:
    found = connection.execute((rows if after is None else rows.where(id > after)).order_by(id).limit(PAGE_ROWS)).all()
    return found, found[-1].id if len(found) == PAGE_ROWS else None


def _key_of(stored: bytes | str) -> str:
    if not is_sealed_json(stored):
        return NOT_ENCRYPTED
    return key_id_of(stored.decode(errors="replace") if isinstance(stored, bytes) else stored)


def _payloads(connection: Connection, tables: Tables, after: UUID | None) -> tuple[list[Value], UUID | None]:
    entry = tables.entry
    rows, last = _page(
        connection, select(entry.c.id, entry.c.env, entry.c.operation, entry.c.payload), entry.c.id, after
    )

    def value(row: Any) -> Value:
        stored, where = bytes(row.payload), StoredField(row.env, row.id, row.operation, "payload")

        def change(connection: Connection, encryption: Encryption) -> bool:
            sealed = seal_json(encryption, open_json(encryption, stored, where), where)
            same = update(entry).where(entry.c.id == row.id, entry.c.payload == stored)
            return bool(connection.execute(same.values(payload=sealed, schema_version=ENCRYPTED_VERSION)).rowcount)

        return Value(row.id, _key_of(stored), change)

    return [value(row) for row in rows], last


def _results(connection: Connection, tables: Tables, after: UUID | None) -> tuple[list[Value], UUID | None]:
    entry, settlement = tables.entry, tables.settlement
    columns = select(settlement.c.id, entry.c.env, entry.c.operation, settlement.c.result)
    joined = columns.join(entry, entry.c.id == settlement.c.id).where(settlement.c.result.is_not(None))
    rows, last = _page(connection, joined, settlement.c.id, after)

    def value(row: Any) -> Value:
        where = StoredField(row.env, row.id, row.operation, "result")

        def change(connection: Connection, encryption: Encryption) -> bool:
            sealed = seal_json(encryption, open_json(encryption, row.result.encode(), where), where).decode()
            same = update(settlement).where(settlement.c.id == row.id, settlement.c.result == row.result)
            return bool(connection.execute(same.values(result=sealed)).rowcount)

        return Value(row.id, _key_of(row.result), change)

    return [value(row) for row in rows], last


def _answers(connection: Connection, tables: Tables, after: UUID | None) -> tuple[list[Value], UUID | None]:
    record = tables.record
    columns = (record.c.id, record.c.env, record.c.headers, record.c.body_day, stored_body(record).label("body"))
    answered = select(*columns).where(record.c.headers.is_not(None))
    rows, last = _page(connection, answered, record.c.id, after)

    def value(row: Any) -> Value:
        def change(connection: Connection, encryption: Encryption) -> bool:
            return _change_answer(connection, tables, row, encryption)

        return Value(row.id, _key_of(row.headers), change)

    # an answer without a body and headers, as of an inbox, is never encrypted
    return [value(row) for row in rows if row.body is not None and (row.body or row.headers != "{}")], last


def _change_answer(connection: Connection, tables: Tables, row: Any, encryption: Encryption) -> bool:
    record, body = tables.record, bytes(row.body)
    of_headers = StoredField(row.env, row.id, "", "response_headers")
    of_body = of_headers._replace(field="response_body")
    headers = open_json(encryption, row.headers.encode(), of_headers)
    opened = encryption.open(body.decode(errors="replace"), of_body) if is_sealed_json(row.headers) else body
    sealed = encryption.seal(opened, of_body).encode()
    changes: dict[str, Any] = {"headers": seal_json(encryption, headers, of_headers).decode()}
    same = update(record).where(record.c.id == row.id, record.c.headers == row.headers)
    if row.body_day is None:
        changes["body"] = sealed
        same = same.where(record.c.body == body, record.c.body_day.is_(None))
    elif not _change_body(connection, tables, row, sealed):
        return False
    return bool(connection.execute(same.values(changes)).rowcount)


def _change_body(connection: Connection, tables: Tables, row: Any, sealed: bytes) -> bool:
    """Change the body in its partition. The record is locked first: a key that was freed meanwhile has another answer there."""
    record = tables.record
    same = (record.c.id == row.id, record.c.headers == row.headers, record.c.body_day == row.body_day)
    if connection.execute(select(record.c.id).where(*same).with_for_update()).one_or_none() is None:
        return False
    change = text(f"UPDATE {body_table(tables)} SET body = :sealed WHERE id = :id AND day = :day AND body = :body")
    values = {"sealed": sealed, "id": row.id, "day": row.body_day, "body": bytes(row.body)}
    return bool(connection.execute(change, values).rowcount)


def _waiting(connection: Connection, tables: Tables, after: UUID | None) -> tuple[list[Value], UUID | None]:
    entry, queue = tables.entry, tables.queue
    columns = select(queue.c.id, entry.c.env, entry.c.operation, queue.c.outcome)
    joined = columns.join(entry, entry.c.id == queue.c.id).where(queue.c.known.is_not(None))
    rows, last = _page(connection, joined, queue.c.id, after)
    return [value for row in rows if (value := _waiting_value(tables, row)) is not None], last


def _waiting_value(tables: Tables, row: Any) -> Value | None:
    queue = tables.queue
    try:
        known = read_outcome(row.outcome).known
    except MalformedOutcome:  # `outbox verify` lists such rows
        return None
    if known is None or known.result is None:
        return None
    stored, where = known.result, StoredField(row.env, row.id, row.operation, "result")

    def change(connection: Connection, encryption: Encryption) -> bool:
        members = json.loads(row.outcome)
        result = json.loads(encryption.open(stored, where)) if is_sealed(stored) else stored
        members["known"]["result"] = seal_result(encryption, result, where)
        same = update(queue).where(queue.c.id == row.id, queue.c.outcome == row.outcome)
        return bool(connection.execute(same.values(outcome=json.dumps(members))).rowcount)

    return Value(row.id, key_id_of(stored) if is_sealed(stored) else NOT_ENCRYPTED, change)


_PAGES: Mapping[Kind, Callable[[Connection, Tables, UUID | None], tuple[list[Value], UUID | None]]] = {
    "payloads": _payloads,
    "results": _results,
    "answers": _answers,
    "waiting results": _waiting,
}

KINDS: tuple[Kind, ...] = tuple(_PAGES)


def pages(read: Callable[[Kind, UUID | None], Page]) -> Iterator[tuple[Kind, Page]]:
    """Every page of every table. read: reads or changes one, in a transaction of its own."""
    for kind in KINDS:
        after: UUID | None = None
        while True:
            page = read(kind, after)
            yield kind, page
            if (after := page.after) is None:
                break
