"""`outbox verify`: checks the invariants on every row that is still stored.

It only reads. If a rule finds a row, other software has changed this row, or this library has a bug.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, Select, exists, func, select

from dispatchers.admin.check.verify_rules import RULES, Query, may_be_forgotten
from dispatchers.stored_outcome import Known, MalformedOutcome, read_outcome
from outbox.errors import InvalidValue
from outbox.keys import Keyring, ParentKey, derive_tag, entry_id, key_fields, parent_id
from outbox.sql.schema.tables import Tables

MAX_FOUND = 100
"""How many violations of one rule are returned; `has_more` is set if there are more."""

ROWS_AT_ONCE = 1000

Finding: TypeAlias = tuple[UUID | None, str]
"""The entry, if there is one, and the end of a sentence that begins with "entry ID"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One row that breaks a rule. text: a sentence with what was expected and what was found."""

    entry_id: UUID | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one rule. has_more: there are further violations."""

    rule: str
    invariant: str
    violations: list[Violation]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of all rules. entries: how many are stored. without_secret: of how many the key was not checked."""

    entries: int
    without_secret: int
    verdicts: list[Verdict]

    @property
    def is_clean(self) -> bool:
        return not any(verdict.violations for verdict in self.verdicts)


def verify(connection: Connection, tables: Tables, keyring: Keyring | None = None) -> Verification:
    """Check every rule. Reads all entries in the connection's transaction, which should keep its snapshot.

    keyring: the key of each entry whose secret is in the ring is derived again.
    """
    keys = _Keys(keyring)
    rules: dict[str, tuple[str, Iterator[Finding]]] = {
        name: (invariant, _found(connection, queries(tables))) for name, (invariant, queries) in RULES.items()
    }
    rules |= {
        "stored outcome": (STORED_OUTCOME, _unexplained(connection, tables)),
        "derived key": (DERIVED, keys.check(connection, tables)),
    }
    verdicts = [_verdict(name, invariant, findings) for name, (invariant, findings) in rules.items()]
    entries: int = connection.execute(select(func.count()).select_from(tables.entry)).scalar_one()
    return Verification(entries=entries, without_secret=keys.without_secret, verdicts=verdicts)


def _verdict(rule: str, invariant: str, findings: Iterator[Finding]) -> Verdict:
    violations = [
        Violation(entry_id=id, text=f"entry {id} {text}. Expected: {invariant}.")
        for id, text in islice(findings, MAX_FOUND)
    ]
    return Verdict(rule=rule, invariant=invariant, violations=violations, has_more=next(findings, None) is not None)


def _found(connection: Connection, queries: Iterable[Query]) -> Iterator[Finding]:
    for query in queries:
        for row in connection.execute(query.limit(MAX_FOUND + 1)):
            yield row.id, row.text


def _pages(connection: Connection, page: Select[*tuple[Any, ...]], id: Any) -> Iterator[Row[Any]]:
    page = page.order_by(id).limit(ROWS_AT_ONCE)
    rows = connection.execute(page).all()
    while rows:
        yield from rows
        rows = connection.execute(page.where(id > rows[-1].id)).all()


# --- the stored outcome of a waiting entry, which a dispatcher settles when it claims the entry

STORED_OUTCOME = "a stored outcome comes from an operator's decision in the history, or from a send or a status lookup"
_AS_DECIDED: Mapping[str, str] = {"delivered": "happened: ", "failed": "did_not_happen: ", "send_again": "send_again: "}
"""The prefix of a decision's reason in the history, by its outcome. A decision to cancel has no prefix."""


def _unexplained(connection: Connection, tables: Tables) -> Iterator[Finding]:
    queue = tables.queue.c
    stored = select(queue.id, queue.outcome, queue.maybe_sent).where(queue.outcome.is_not(None))
    for row in _pages(connection, stored, queue.id):
        try:
            outcome = read_outcome(row.outcome)
        except MalformedOutcome:
            yield row.id, "has a stored outcome that cannot be read"
            continue
        known = outcome.known
        if known is None:
            continue
        if known.attempts is not None and not row.maybe_sent:
            yield row.id, f"has the stored outcome {known.state}, but maybe_sent is false"
        elif not _is_on_record(connection, tables, row.id, known, outcome.reason or ""):
            yield row.id, f"has the stored outcome {known.state}, but its history does not contain this outcome"


def _is_on_record(connection: Connection, tables: Tables, id: UUID, known: Known, reason: str) -> bool:
    """Whether the history has a decision, or the failure of a callback. It has no line for a callback that has not run yet, or
    that another process has.
    """
    event, entry = tables.event.c, tables.entry.c
    if known.attempts is None:
        by_event = event.kind == "decision", event.reason == _AS_DECIDED.get(known.state, "") + (known.reason or "")
    elif reason.startswith(f"{known.state}, but "):
        by_event = event.kind == "attempt", event.reason.startswith(f"{known.state}, but ")
    else:
        return True
    explained = exists().where(event.entry_id == id, *by_event)
    if known.state == "delivered":
        created_at = select(entry.created_at).where(entry.id == id).scalar_subquery()
        explained = explained | may_be_forgotten(tables, created_at)
    return bool(connection.execute(select(explained)).scalar_one())


# --- ids and keys, which only the library can derive

DERIVED = "an entry's id and key are derived from its fields"


class _Keys:
    """Derives each entry's id, parent id and key again. without_secret: how many keys it could not derive."""

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
            yield row.id, f"has invalid fields: {error}"
            return
        if row.id != entry_id(fields):
            yield row.id, f"has another id than the one derived from its fields, {entry_id(fields)}"
        if row.parent_id != parent_id(row.env, parent):
            yield row.id, "has another parent id than the one derived from its parent key"
        if self._keyring is None or row.kid not in self._keyring:
            self.without_secret += 1
        elif row.tag != derive_tag(self._keyring, row.kid, fields):
            yield row.id, f"has another key than the one derived from its fields and the secret {row.kid!r}"


def _entries(connection: Connection, tables: Tables) -> Iterator[Row[Any]]:
    entry = tables.entry.c
    columns = (entry.id, entry.env, entry.scope, entry.source, entry.parent, entry.operation, entry.discriminator)
    return _pages(connection, select(*columns, entry.kid, entry.tag, entry.parent_id), entry.id)
