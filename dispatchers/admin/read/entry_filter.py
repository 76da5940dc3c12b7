"""Which entries a list shows and a decision in bulk concerns: one filter for both, and the conditions that it becomes."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, FromClause, Select, Table, func, or_, select

from dispatchers.admin.read.payload_filter import Member
from dispatchers.store.records.queries import unreadable
from outbox.errors import InvalidValue
from outbox.keys import ParentKey, parent_id
from outbox.sql.clock import database_now
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables
from outbox.times import NEVER

WAITING_STATES = ("pending", "sending", "retry", "uncertain")
ENDED_STATES = ("delivered", "failed", "cancelled")
Selected = TypeVar("Selected", bound=Select[*tuple[Any, ...]])
MAX_PART_CHARS = 1000  # of a reason; SQLite and PostgreSQL refuse patterns that are much longer


@dataclass(frozen=True, slots=True)
class ParentWanted:
    """The key of a business request; None for any. env, scope, source: only those of it; None for all.

    With all four an index finds its entries.
    """

    key: str | None
    env: str | None = None
    scope: str | None = None
    source: str | None = None

    def conditions(self, tables: Tables) -> list[ColumnElement[bool]]:
        entry = tables.entry
        key, env, scope, source = self.key, self.env, self.scope, self.source
        if key is not None and env is not None and scope is not None and source is not None:
            return [is_under(entry, parent_id(env, ParentKey(key, scope=scope, source=source)))]
        given = {"parent": key, "env": env, "scope": scope, "source": source}
        return [entry.c[name] == value for name, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which entries: those that meet every condition that is given. A timedelta counts back from the database's clock.

    states: all of WAITING_STATES or all of ENDED_STATES. operation: itself, or all below it: "stripe.refunds".
    suspended: only what an operator or a check suspended. since: only what was due, or ended, by then or later.
    enqueued_since, enqueued_before: by when it was enqueued. reason: a part of why it failed, waits, is uncertain or suspended,
    letter for letter. parent_prefix: how its parent key begins. payload: members that its payload has; a role that may not read
    payloads cannot ask for them.
    """

    states: Sequence[str] = WAITING_STATES
    operation: str | None = None
    destination: str | None = None
    parent: ParentWanted | None = None
    parent_prefix: str | None = None
    payload: Sequence[Member] = ()
    ordering_key: str | None = None
    suspended: bool = False
    reason: str | None = None
    since: datetime | timedelta | None = None
    enqueued_since: datetime | timedelta | None = None
    enqueued_before: datetime | timedelta | None = None

    @property
    def is_ended(self) -> bool:
        """Whether it selects settlements, and not rows of the queue."""
        return set(self.states) <= set(ENDED_STATES)

    def rows(self, tables: Tables) -> Table:
        """The settlements or the queue: one row of this table belongs to each entry that it selects."""
        return tables.settlement if self.is_ended else tables.queue

    def with_instants(self, now: datetime) -> "Filter":
        """The filter with an instant in place of each span."""
        spans = ("since", "enqueued_since", "enqueued_before")
        instants: dict[str, Any] = {
            name: instant_of(when, now) for name in spans if (when := getattr(self, name)) is not None
        }
        return replace(self, **instants)


def check_filter(connection: Connection, tables: Tables, wanted: Filter) -> None:
    """Raise `InvalidValue` for states of both kinds, for ended entries that are suspended, which none is, for a reason that no
    row can have, and for a reason or a payload that this role may not read.
    """
    states = set(wanted.states)
    if not states or not (states <= set(ENDED_STATES) or states <= set(WAITING_STATES)):
        rule = f"must be some of {list(WAITING_STATES)} or some of {list(ENDED_STATES)}, not of both"
        raise InvalidValue("states", wanted.states, rule)
    if wanted.suspended and wanted.is_ended:
        raise InvalidValue(
            "suspended", True, f"cannot be combined with {sorted(states)}: what has ended is not suspended"
        )
    if wanted.reason is not None:
        _check_part(wanted.reason)
    if wanted.reason is not None and not wanted.is_ended and unreadable(connection, [tables.queue.c.outcome]):
        rule = "cannot be searched by this role, which may not read why entries wait: use the dispatcher's role"
        raise InvalidValue("reason", wanted.reason, rule)
    if wanted.payload and unreadable(connection, [tables.entry.c.payload]):
        rule = (
            "cannot be searched by this role, which may not read payloads: use the dispatcher's role, or the operator's"
        )
        raise InvalidValue("payload", ", ".join(map(str, wanted.payload)), rule)


def require_plain(connection: Connection, tables: Tables, wanted: Filter, among: Sequence[UUID] | None = None) -> None:
    """Raise `InvalidValue` if the filter compares payloads, and the rest of it selects an encrypted entry: without its payload an
    answer would be wrong. Reads every entry that the rest selects. among: only these entries, whatever the rest says.
    """
    if not wanted.payload:
        return
    entry = tables.entry
    others = select_ids(tables, replace(wanted, payload=()), database_now(connection)).subquery()
    of_these = entry.c.id.in_(select(others) if among is None else among)
    sealed = select(entry.c.id).where(of_these, entry.c.schema_version == ENCRYPTED_VERSION)
    if connection.execute(sealed.limit(1)).first() is not None:
        rule = "cannot be searched, because payloads among these entries are encrypted: select them without --payload"
        raise InvalidValue("payload", ", ".join(map(str, wanted.payload)), rule)


def _check_part(reason: str) -> None:
    if not 1 <= len(reason) <= MAX_PART_CHARS:
        raise InvalidValue("reason", reason, f"has {len(reason)} characters; 1 to {MAX_PART_CHARS} are allowed")
    if "\0" in reason or any("\ud800" <= char <= "\udfff" for char in reason):
        raise InvalidValue("reason", reason, "contains a NUL character or a lone surrogate, which no reason has")


def select_ids(tables: Tables, wanted: Filter, now: datetime) -> Select[UUID]:
    """The ids of the entries that `wanted` selects, in no order. now: the database's time."""
    return narrowed(tables, wanted, now, select(wanted.rows(tables).c.id))


def narrowed(tables: Tables, wanted: Filter, now: datetime, found: Selected, row: FromClause | None = None) -> Selected:
    """A statement about `wanted.rows`, with the filter's conditions. row: where its columns are, if not in that table itself."""
    row = wanted.rows(tables) if row is None else row
    found = found.where(*row_conditions(row, wanted, now))
    of_entry = entry_conditions(tables, wanted, now)
    return found.join(tables.entry, tables.entry.c.id == row.c.id).where(*of_entry) if of_entry else found


def row_conditions(row: FromClause, wanted: Filter, now: datetime) -> list[ColumnElement[bool]]:
    """The conditions that the entry's row of the queue, or its settlement, decides. row: one of them, or a part of one."""
    return _of_settlement(row, wanted, now) if wanted.is_ended else _of_queue(row, wanted, now)


def compared_columns(row: FromClause, wanted: Filter) -> list[ColumnElement[Any]]:
    """The columns of the row that the conditions may compare."""
    names = {"state", "destination", "ordering_key", "due_at", "suspended_reason", "settled_at", "reason"}
    if wanted.reason is not None:
        names.add("outcome")  # it may be long
    return [column for column in row.c if column.name in names]


def entry_conditions(tables: Tables, wanted: Filter, now: datetime) -> list[ColumnElement[bool]]:
    """The conditions that only the entry's own row decides; without any, that row is not read."""
    entry = tables.entry
    conditions: list[ColumnElement[bool]] = []
    if wanted.operation is not None:
        below = entry.c.operation.startswith(f"{wanted.operation}.", autoescape=True)
        conditions.append(or_(entry.c.operation == wanted.operation, below))
    if wanted.parent is not None:
        conditions += wanted.parent.conditions(tables)
    if wanted.parent_prefix is not None:  # not LIKE, which ignores case on SQLite
        conditions.append(func.substr(entry.c.parent, 1, len(wanted.parent_prefix)) == wanted.parent_prefix)
    conditions += [member.condition(tables) for member in wanted.payload]
    if wanted.is_ended:  # else the queue has them too
        given = {"destination": wanted.destination, "ordering_key": wanted.ordering_key}
        conditions += [entry.c[name] == value for name, value in given.items() if value is not None]
    if wanted.enqueued_since is not None:
        conditions.append(entry.c.created_at >= instant_of(wanted.enqueued_since, now))
    if wanted.enqueued_before is not None:
        conditions.append(entry.c.created_at < instant_of(wanted.enqueued_before, now))
    return conditions


def instant_of(when: datetime | timedelta, now: datetime) -> datetime:
    return now - when if isinstance(when, timedelta) else when


def _of_settlement(settlement: FromClause, wanted: Filter, now: datetime) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if set(wanted.states) < set(ENDED_STATES):
        conditions.append(settlement.c.state.in_(wanted.states))
    if wanted.reason is not None:
        conditions.append(_has_part(settlement.c.reason, wanted.reason))
    if wanted.since is not None:
        conditions.append(settlement.c.settled_at >= instant_of(wanted.since, now))
    return conditions


def _of_queue(queue: FromClause, wanted: Filter, now: datetime) -> list[ColumnElement[bool]]:
    given = {"destination": wanted.destination, "ordering_key": wanted.ordering_key}
    conditions = [queue.c[name] == value for name, value in given.items() if value is not None]
    if set(wanted.states) < set(WAITING_STATES):
        conditions.append(queue.c.state.in_(wanted.states))
    if wanted.suspended:
        conditions += [queue.c.suspended_reason.is_not(None), queue.c.due_at == NEVER]  # NEVER: uses the index
    if wanted.reason is not None:
        suspended = _has_part(queue.c.suspended_reason, wanted.reason)
        conditions.append(or_(has_reason(queue.c.outcome, wanted.reason), suspended))
    if wanted.since is not None:
        conditions.append(queue.c.due_at >= instant_of(wanted.since, now))
    return conditions


def has_reason(outcome: Any, part: str) -> ColumnElement[bool]:
    """Whether the reason that this JSON begins with has this part. No cast to JSON: one malformed row would end the statement.

    What comes later is not compared: an answer may have a member "reason" too. An escape is passed over as a whole: the digits of
    `\\u00fc` are no part of the reason.
    """
    before = r'^\{"reason": "([^"\\]|\\u[0-9a-f]{4}|\\[^u])*'
    condition: ColumnElement[bool] = outcome.regexp_match(before + re.escape(json.dumps(part)[1:-1]))
    return condition


def _has_part(column: Any, part: str) -> ColumnElement[bool]:
    """Letter for letter: LIKE ignores case on SQLite."""
    condition: ColumnElement[bool] = column.regexp_match(re.escape(part))
    return condition
