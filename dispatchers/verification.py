"""Does the stored history keep the promises? What `outbox verify` asks of every row that is still kept.

It reads, and changes nothing. A rule is a question with no answer as long as all is well: whatever it finds was changed by
something else than this library, or is a bug in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, Select, String, and_, exists, func, literal, or_, select
from sqlalchemy import cast as as_type

from outbox.errors import InvalidValue
from outbox.keys import Keyring, ParentKey, derive_tag, entry_id, key_fields, parent_id
from outbox.schema import Tables

FOUND_MAX = 100
"""How many violations of one rule are told; that there are more is told, too."""

ROWS_AT_ONCE = 1000

Finding: TypeAlias = tuple[UUID | None, str]
"""The entry, if it is about one, and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One row that breaks a rule."""

    entry_id: UUID | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one rule. has_more: there are further violations than those told."""

    rule: str
    promise: str
    violations: list[Violation]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was looked at, and what was found. entries: how many are kept. without_secret: of how many the key was not checked."""

    entries: int
    without_secret: int
    verdicts: list[Verdict]

    @property
    def is_clean(self) -> bool:
        return not any(verdict.violations for verdict in self.verdicts)


def verify(connection: Connection, tables: Tables, keyring: Keyring | None = None) -> Verification:
    """Ask every rule. Reads all entries, in whatever transaction the connection is in: one that keeps its snapshot, please.

    keyring: with it, the key of each entry is derived anew where its secret is in the ring.
    """
    keys = _Keys(keyring)
    rules: Mapping[str, tuple[str, Iterator[Finding]]] = {
        name: (promise, _found(connection, question(tables))) for name, (promise, question) in QUESTIONS.items()
    } | {"derived": (DERIVED, keys.check(connection, tables))}
    verdicts = [_verdict(name, promise, findings) for name, (promise, findings) in rules.items()]
    entries: int = connection.execute(select(func.count()).select_from(tables.entry)).scalar_one()
    return Verification(entries=entries, without_secret=keys.without_secret, verdicts=verdicts)


def _verdict(rule: str, promise: str, findings: Iterator[Finding]) -> Verdict:
    told = [Violation(entry_id=id, text=text) for id, text in islice(findings, FOUND_MAX)]
    return Verdict(rule=rule, promise=promise, violations=told, has_more=next(findings, None) is not None)


def _found(connection: Connection, question: Select[*tuple[Any, ...]]) -> Iterator[Finding]:
    for row in connection.execute(question.limit(FOUND_MAX + 1)):
        yield row.id, row.text


# --- the questions: each selects the rows that break its rule, as (id, text)


def _lost(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry = tables.entry
    stands = or_(_has(tables.queue.c.id, entry.c.id), _has(tables.settlement.c.id, entry.c.id))
    return select(entry.c.id, literal("neither waits nor has ended").label("text")).where(~stands)


def _twice(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, settlement = tables.queue, tables.settlement
    text = _joined("waits as ", queue.c.state, ", and has ended as ", settlement.c.state)
    return select(queue.c.id, text).join(settlement, settlement.c.id == queue.c.id)


def _orphaned(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, settlement = tables.queue.c.id, tables.settlement.c.id
    rows = select(queue.label("id")).union_all(select(settlement.label("id"))).subquery()
    text = literal("waits or has ended, and is no entry").label("text")
    return select(rows.c.id, text).where(~_has(tables.entry.c.id, rows.c.id)).distinct()


def _sharing_a_key(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry, other = tables.entry, tables.entry.alias()
    text = _joined("has the key of entry ", other.c.id)
    return select(entry.c.id, text).join(other, and_(other.c.tag == entry.c.tag, other.c.id != entry.c.id))


def _miscounted(tables: Tables) -> Select[*tuple[Any, ...]]:
    rows = _progress(tables)
    text = _joined("was sent ", rows.c.attempts, " times in ", rows.c.deliveries, " deliveries")
    return select(rows.c.id, text).where(rows.c.attempts > rows.c.deliveries)


def _unexplained_epoch(tables: Tables) -> Select[*tuple[Any, ...]]:
    rows, event = _progress(tables), tables.event
    decided = event.c.entry_id == rows.c.id, event.c.kind != "attempt"
    decisions = select(func.count()).select_from(event).where(*decided).scalar_subquery()  # one epoch each, at most
    text = _joined("has key epoch ", rows.c.key_epoch, ", and nobody decided that it was to be sent anew so often")
    return select(rows.c.id, text).where(rows.c.key_epoch > 0, rows.c.key_epoch > decisions)


def _before_its_time(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry, settlement = tables.entry, tables.settlement
    text = _joined(settlement.c.state, " before it was enqueued")
    ended = select(entry.c.id, text).join(settlement, settlement.c.id == entry.c.id)
    return ended.where(settlement.c.settled_at < entry.c.created_at)


def _halting_nothing(tables: Tables) -> Select[*tuple[Any, ...]]:
    halted = tables.halted
    text = _joined("halts the lane ", halted.c.ordering_key, ", and is no entry")
    return select(halted.c.entry_id.label("id"), text).where(~_has(tables.entry.c.id, halted.c.entry_id))


QUESTIONS: Mapping[str, tuple[str, Callable[[Tables], Select[*tuple[Any, ...]]]]] = {
    "kept": ("an entry that was committed is never lost", _lost),
    "ended once": ("an entry that has ended does not wait any more", _twice),
    "whole": ("what waits or has ended is an entry", _orphaned),
    "own key": ("no two entries share a key", _sharing_a_key),
    "counted": ("an entry is not sent more often than it was claimed", _miscounted),
    "same key": ("an entry keeps its key, unless a person or a proof decided otherwise", _unexplained_epoch),
    "in order": ("an entry ends after it was enqueued", _before_its_time),
    "halted": ("what halts a lane is an entry", _halting_nothing),
}

DERIVED = "an entry's id and key are those of its fields"


def _has(column: Any, id: Any) -> Any:
    return exists().where(column == id)


def _joined(*parts: Any) -> Any:
    """A text made of constants and columns, in the database."""
    pieces = [literal(part) if isinstance(part, str) else as_type(part, String) for part in parts]
    text: Any = pieces[0]
    for piece in pieces[1:]:
        text = text + piece
    return text.label("text")


def _progress(tables: Tables) -> Any:
    """How far each entry has come, waiting or ended."""
    waiting, ended = (
        select(table.c.id, table.c.deliveries, table.c.attempts, table.c.key_epoch)
        for table in (tables.queue, tables.settlement)
    )
    return waiting.union_all(ended).subquery()


# --- ids and keys: what only the library can derive


class _Keys:
    """Derives each entry's id, its parent's and its key anew. without_secret: how many keys it could not."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self.without_secret = 0

    def check(self, connection: Connection, tables: Tables) -> Iterator[Finding]:
        return chain.from_iterable(map(self._wrong, _entries(connection, tables)))

    def _wrong(self, row: Row[Any]) -> Iterator[Finding]:
        try:
            parent = ParentKey(row.parent, scope=row.scope, source=row.source)
            fields = key_fields(row.env, parent, row.operation, row.discriminator)
        except InvalidValue as error:
            yield row.id, str(error)
            return
        if row.id != entry_id(fields):
            yield row.id, f"its id is not that of its fields, {entry_id(fields)}"
        if row.parent_id != parent_id(row.env, parent):
            yield row.id, "its parent's id is not that of its parent"
        if self._keyring is None or row.kid not in self._keyring:
            self.without_secret += 1
        elif row.tag != derive_tag(self._keyring, row.kid, fields):
            yield row.id, f"its key is not the one that derives from its fields with the secret {row.kid!r}"


def _entries(connection: Connection, tables: Tables) -> Iterator[Row[Any]]:
    """Every entry's key fields, a page at a time."""
    entry = tables.entry.c
    columns = (entry.id, entry.env, entry.scope, entry.source, entry.parent, entry.operation, entry.discriminator)
    page: Select[*tuple[Any, ...]] = (
        select(*columns, entry.kid, entry.tag, entry.parent_id).order_by(entry.id).limit(ROWS_AT_ONCE)
    )
    rows = connection.execute(page).all()
    while rows:
        yield from rows
        rows = connection.execute(page.where(entry.id > rows[-1].id)).all()
