"""Finds entries and requests by what a customer or a service quotes: a key, an id, or a part of the service's answer.

Ids, the app's own keys and ordering keys have an index, and are searched everywhere. Nothing else has one: it is compared with a
bounded number of entries and requests, and the result says how far that went.
"""

import binascii
import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CTE, ColumnElement, Connection, LargeBinary, Select, and_, func, literal, or_, select, true

from dispatchers.admin.read import requests
from dispatchers.admin.read.entries import EntrySummary, ids_beginning_with, read_entries_where
from dispatchers.admin.read.entry_filter import ENDED_STATES, Filter
from dispatchers.admin.read.entry_pages import beginning, parts_of
from dispatchers.admin.read.requests import OPEN_STATES, RequestSummary
from dispatchers.store.records.queries import unreadable
from outbox.encryption import MARK
from outbox.errors import InvalidValue
from outbox.keys import ParentKey, check_field, parent_id
from outbox.sql.clock import database_now
from outbox.sql.deployment import recorded_environment
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.rights import Right, without_right
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import read_by_index

MAX_ROWS = 250
"""How many rows of each list are read: a row that is not in memory takes up to 0.1 ms, and there are six lists."""
MAX_FOUND = 50
PART_CHARS_MIN = 4
ID_DIGITS_MIN = 8
_NATIVE = re.compile(r"ck1_[A-Za-z0-9_-]{32}")
_HEX = re.compile(r"[0-9A-Fa-f]{64}")

ENTRIES = {
    "uncertain entries, the oldest doubt first": Filter(states=("uncertain",)),
    "waiting entries, the longest due first": Filter(),
    "ended entries, the newest first": Filter(states=ENDED_STATES),
}
REQUESTS = {f"{state} requests, the oldest first": state for state in OPEN_STATES} | {
    "answered requests, those kept longest first": None
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A list that was searched without an index. rows: how many were compared. is_whole: whether these were all of them.

    until: the last that was compared: since when it is in doubt or due, when it ended, or until when it is kept.
    """

    list: str
    rows: int
    is_whole: bool
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found, and where it was searched.

    has_more: there are more than are listed. withheld: what this reader may not read, and so was not compared.
    """

    at: datetime
    entries: list[EntrySummary]
    requests: list[RequestSummary]
    has_more: bool
    searched: list[Searched]
    withheld: list[str]


def find(
    connection: Connection,
    tables: Tables,
    text: str,
    *,
    max_rows: int = MAX_ROWS,
    rights: Collection[Right] = tuple(Right),
) -> Found:
    """Entries and requests that `text` names.

    text: the beginning of an entry's or a request's id (8 digits or more); a parent key, such as an Idempotency-Key; an
    ordering key; a child key of epoch 0, native or as 64 hexadecimal digits; or a part of a service's answer (4 characters
    or more), such as `pi_...`.
    max_rows: of each list without an index so many rows are read; waiting entries are read of each destination.
    rights: of the reader; what they do not read is not compared, and neither is what this role of the database may not read.
    Raises `InvalidValue` for a text that no key can be.
    """
    text = text.strip()
    try:
        check_field("parent", text)
    except InvalidValue as error:
        raise InvalidValue("text", text, f"this cannot be a key: {error}") from None
    answers = {"child keys": tables.entry.c.tag, "services' answers": tables.settlement.c.result}
    compared = [*answers.values(), tables.queue.c.outcome]
    withheld = unreadable(connection, compared) | without_right(tables, compared, rights)
    search = _Search(connection, tables, text, database_now(connection), max_rows, withheld)
    ids, record_ids, searched = search.indexed_entries(), search.indexed_requests(), []
    read_by_index(connection)
    for name, wanted in ENTRIES.items():
        seen, found = search.compared_entries(name, wanted)
        searched.append(seen)
        ids += found
    for name, state in REQUESTS.items():
        seen, found = search.compared_requests(name, state)
        searched.append(seen)
        record_ids += found
    records = requests.read_records(connection, tables, tables.record.c.id.in_(record_ids))
    ids += [id for record in records for id in search.under(record.id)]
    listed = list(dict.fromkeys(ids))
    return Found(
        at=search.at,
        entries=read_entries_where(connection, tables, tables.entry.c.id.in_(listed[:MAX_FOUND])),
        requests=records[:MAX_FOUND],
        has_more=max(len(listed), len(records)) > MAX_FOUND,
        searched=searched,
        withheld=[name for name, column in answers.items() if column in withheld],
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """The searches for one text, each for the ids of entries or of requests."""

    connection: Connection
    tables: Tables
    text: str
    at: datetime
    max_rows: int
    withheld: frozenset[Any]

    # --- by an index

    def indexed_entries(self) -> list[UUID]:
        found = self._beginning_with(self.tables.entry.c.id)
        env, queue = recorded_environment(self.connection, self.tables), self.tables.queue
        if env is not None:
            found += self.under(parent_id(env, ParentKey(self.text)))
        of_group = select(queue.c.id).where(queue.c.ordering_key == self.text)
        return found + self._first(of_group.order_by(queue.c.position))

    def indexed_requests(self) -> list[UUID]:
        return self._beginning_with(self.tables.record.c.id)

    def under(self, parent: UUID) -> list[UUID]:
        entry = self.tables.entry
        return self._first(select(entry.c.id).where(is_under(entry, parent)).order_by(entry.c.id))

    def _beginning_with(self, id: ColumnElement[UUID]) -> list[UUID]:
        digits = self.text.replace("-", "").lower()
        is_beginning = ID_DIGITS_MIN <= len(digits) <= 32 and not digits.strip("0123456789abcdef")
        return ids_beginning_with(self.connection, id, digits) if is_beginning else []

    # --- by comparing

    def compared_entries(self, name: str, wanted: Filter) -> tuple[Searched, list[UUID]]:
        entry, row = self.tables.entry, wanted.rows(self.tables)
        limit = max(
            self.max_rows // parts_of(self.connection, self.tables, wanted), 1
        )  # each part is read so far, and sorted
        rows = beginning(self.connection, self.tables, wanted, limit).cte("scanned")
        matches = [entry.c[field] == self.text for field in ("parent", "discriminator", "ordering_key")]
        if entry.c.tag not in self.withheld:
            matches += _tags(self.tables, self.text)
        answer = row.c.result if wanted.is_ended else row.c.outcome
        if answer not in self.withheld and len(self.text) >= PART_CHARS_MIN:
            parts = {self.text, json.dumps(self.text)[1:-1]}  # as it may be copied, and as JSON has it
            texts = or_(*(answer.contains(part, autoescape=True) for part in sorted(parts)))
            matches.append(and_(texts, ~answer.contains(f'"{MARK}')))  # what is encrypted has any letters
        joined = rows.join(entry, entry.c.id == rows.c.id).join(row, row.c.id == rows.c.id)
        found = select(rows.c.id).select_from(joined).where(or_(*matches))
        return self._compared(name, rows, limit, found, is_descending=wanted.is_ended)

    def compared_requests(self, name: str, state: str | None) -> tuple[Searched, list[UUID]]:
        record = self.tables.record
        rows = requests.scanned(self.tables, state, after=None, limit=self.max_rows).cte("scanned")
        same = select(rows.c.id).join(record, record.c.id == rows.c.id).where(record.c.parent == self.text)
        return self._compared(name, rows, self.max_rows, same, is_descending=state is None)

    def _first(self, ids: Select[UUID]) -> list[UUID]:
        return list(self.connection.execute(ids.limit(MAX_FOUND + 1)).scalars())

    def _compared(
        self, name: str, rows: CTE, limit: int, found: Select[UUID], *, is_descending: bool
    ) -> tuple[Searched, list[UUID]]:
        """What is found among the rows of a list, and how far they go: one statement, which reads them once."""
        last = func.min(rows.c.at) if is_descending else func.max(rows.c.at)
        read = select(func.count().label("rows"), last.label("until")).select_from(rows).subquery("read")
        some = found.limit(MAX_FOUND + 1).subquery("found")
        both = select(read.c.rows, read.c.until, some.c.id).select_from(read.outerjoin(some, true()))
        answer = self.connection.execute(both).all()
        count, until, _ = answer[0]
        searched = Searched(list=name, rows=count, is_whole=count < limit, until=until)
        return searched, [row.id for row in answer if row.id is not None]


def _tags(tables: Tables, text: str) -> list[ColumnElement[bool]]:
    """The conditions under which it is a child key of epoch 0: a later epoch's key is derived at the send, and not stored."""
    tag = tables.entry.c.tag
    if _HEX.fullmatch(text):
        return [tag == binascii.unhexlify(text)]
    if not _NATIVE.fullmatch(text):
        return []
    beginning = urlsafe_b64decode(text.removeprefix("ck1_"))
    lowest, highest = (literal(beginning + end * 8, LargeBinary) for end in (b"\x00", b"\xff"))
    return [and_(tag >= lowest, tag <= highest)]
