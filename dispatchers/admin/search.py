"""Finds entries and requests by what a customer or a service quotes: a key, an id, or a part of the service's answer.

Ids, the app's own keys and ordering keys have an index, and are searched everywhere. Nothing else has one: it is compared with a
bounded number of entries and requests, and the result says how far that went.
"""

import binascii
import re
from base64 import urlsafe_b64decode
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, LargeBinary, and_, false, func, literal, or_, select

from dispatchers.admin import requests
from dispatchers.admin.entries import CANDIDATES_MAX, EntrySummary, find_ids, read_entries_where
from dispatchers.admin.entry_filter import ENDED_STATES, Filter
from dispatchers.admin.entry_pages import everything, ordered, parts_of
from dispatchers.admin.requests import OPEN_STATES, RequestSummary
from dispatchers.store.queries import unreadable
from outbox.keys import ParentKey, check_field, parent_id
from outbox.sql.deployment import recorded_environment
from outbox.sql.dialect import database_now, read_by_index
from outbox.sql.parent_index import is_under
from outbox.sql.schema import Tables

ROWS_MAX = 2_000
"""Of each list so many rows are read: a row that is not in memory takes up to 0.1 ms, and there are six lists."""
FOUND_MAX = 50
PART_CHARS_MIN = 4
ID_DIGITS_MIN = 8
_NATIVE = re.compile(r"ck1_[A-Za-z0-9_-]{32}")
_HEX = re.compile(r"[0-9A-Fa-f]{64}")

LISTS = {
    "uncertain entries, the oldest doubt first": Filter(states=("uncertain",)),
    "waiting entries, the longest due first": Filter(),
    "ended entries, the newest first": Filter(states=ENDED_STATES),
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

    has_more: there are more than are listed. withheld: what this role may not read, and so was not compared.
    """

    at: datetime
    entries: list[EntrySummary]
    requests: list[RequestSummary]
    has_more: bool
    searched: list[Searched]
    withheld: list[str]


def find(connection: Connection, tables: Tables, text: str, *, rows_max: int = ROWS_MAX) -> Found:
    """Entries and requests that `text` names.

    text: the beginning of an entry's or a request's id (8 digits or more); a parent key, such as an Idempotency-Key; an
    ordering key; a child key of epoch 0, native or as 64 hexadecimal digits; or a part (4
    characters or more) of a service's answer, such as `pi_...`.
    rows_max: of each list without an index so many rows are read; waiting entries are read of each destination.
    Raises `InvalidValue` for a text that no key can be.
    """
    text = text.strip()
    check_field("parent", text)
    now = database_now(connection)
    withheld = unreadable(connection, [tables.entry.c.tag, tables.settlement.c.result, tables.queue.c.outcome])
    ids, condition = _indexed(connection, tables, text)
    records = requests.read_records(connection, tables, condition)
    read_by_index(connection)
    searched = []
    for name, wanted in LISTS.items():
        seen, found = _search_entries(connection, tables, text, wanted, withheld, name, now, rows_max)
        searched.append(seen)
        ids += found
    for state in (*OPEN_STATES, None):
        seen, more = _search_requests(connection, tables, text, state, rows_max)
        searched.append(seen)
        records += more
    for record in records:
        ids += _under(connection, tables, record.id)
    known = {tables.entry.c.tag: "child keys", tables.settlement.c.result: "services' answers"}
    listed = list(dict.fromkeys(ids))
    unique = list({record.id: record for record in records}.values())
    return Found(
        at=now,
        entries=read_entries_where(connection, tables, tables.entry.c.id.in_(listed[:FOUND_MAX])),
        requests=unique[:FOUND_MAX],
        has_more=max(len(listed), len(unique)) > FOUND_MAX,
        searched=searched,
        withheld=[name for column, name in known.items() if column in withheld],
    )


# --- by an index


def _indexed(connection: Connection, tables: Tables, text: str) -> tuple[list[UUID], ColumnElement[bool]]:
    """The entries that an index finds, and the condition on the requests that one finds."""
    ids: list[UUID] = []
    condition: ColumnElement[bool] = false()
    digits = text.replace("-", "").lower()
    if ID_DIGITS_MIN <= len(digits) <= 32 and not digits.strip("0123456789abcdef"):
        ids += find_ids(connection, tables, digits)
        condition = _ids_from(connection, tables, digits)
    env = recorded_environment(connection, tables)
    if env is not None:
        ids += _under(connection, tables, parent_id(env, ParentKey(text)))
    queue = tables.queue
    group = select(queue.c.id).where(queue.c.ordering_key == text).order_by(queue.c.position).limit(FOUND_MAX + 1)
    return [*ids, *connection.execute(group).scalars()], condition


def _ids_from(connection: Connection, tables: Tables, digits: str) -> ColumnElement[bool]:
    id = tables.record.c.id
    lowest, highest = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    first = select(id).where(id.between(lowest, highest)).order_by(id).limit(CANDIDATES_MAX)
    return id.in_(list(connection.execute(first).scalars()))


def _under(connection: Connection, tables: Tables, parent: UUID) -> list[UUID]:
    entry = tables.entry
    first = select(entry.c.id).where(is_under(entry, parent)).order_by(entry.c.id).limit(FOUND_MAX + 1)
    return list(connection.execute(first).scalars())


# --- by comparing


def _search_entries(
    connection: Connection,
    tables: Tables,
    text: str,
    wanted: Filter,
    withheld: frozenset[Any],
    name: str,
    now: datetime,
    rows_max: int,
) -> tuple[Searched, list[UUID]]:
    entry, queue, settlement = tables.entry, tables.queue, tables.settlement
    rows_max = max(rows_max // parts_of(connection, tables, wanted), 1)  # each part is read that far, and sorted
    rows = ordered(connection, tables, wanted, now, everything, after=None, limit=rows_max).subquery("scanned")
    matches = [entry.c[field] == text for field in ("parent", "discriminator", "ordering_key")]
    if entry.c.tag not in withheld:
        matches += _tags(tables, text)
    row = settlement if wanted.is_ended else queue
    answer = settlement.c.result if wanted.is_ended else queue.c.outcome
    if answer not in withheld and len(text) >= PART_CHARS_MIN:
        matches.append(answer.contains(text, autoescape=True))
    joined = rows.join(entry, entry.c.id == rows.c.id).join(row, row.c.id == rows.c.id)
    found = select(rows.c.id).select_from(joined).where(or_(*matches)).limit(FOUND_MAX + 1)
    return _seen(connection, rows, name, rows_max), list(connection.execute(found).scalars())


def _search_requests(
    connection: Connection, tables: Tables, text: str, state: str | None, rows_max: int
) -> tuple[Searched, list[RequestSummary]]:
    record = tables.record
    name = "answered requests, those kept longest first" if state is None else f"{state} requests, the oldest first"
    rows = requests.scanned(tables, state, after=None, limit=rows_max).subquery("scanned")
    same = select(rows.c.id).join(record, record.c.id == rows.c.id).where(record.c.parent == text).limit(FOUND_MAX + 1)
    ids = list(connection.execute(same).scalars())
    return _seen(connection, rows, name, rows_max), requests.read_records(connection, tables, record.c.id.in_(ids))


def _seen(connection: Connection, rows: Any, name: str, rows_max: int) -> Searched:
    # of what is listed the newest first, the last is the least; of all else the greatest
    last = func.min(rows.c.at) if name.startswith(("ended", "answered")) else func.max(rows.c.at)
    count, until = connection.execute(select(func.count(), last)).one()
    return Searched(list=name, rows=count, is_whole=count < rows_max, until=until)


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
