"""The audit log: one row for each decision of an operator, and for each payload that was shown, with who and why.

A row is written in the transaction of its decision, so one exists exactly if the other does. A decision about an entry is in the
entry's history too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, insert, select, update

from dispatchers.admin.read.keyset import following
from dispatchers.admin.read.plain_values import Place
from outbox.sql.clock import clock, database_now
from outbox.sql.schema.tables import Tables

Kind: TypeAlias = Literal[
    "entry", "entries", "proposed_entry", "destination", "ordering_group", "request", "database", "schedule"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One decision.

    action: `retry`, `pause`, `reveal_payload`, ... kind: what `target` is: the id of an entry, the sentence that names several
    entries, the name of a destination or of a schedule, the key of an ordering group, the id of a request, or the env of the
    database. A `proposed_entry` is one of the entries of a proposal; its rows are found together with the proposal's own.
    count: how many of them the decision changed, or showed. login: of the database, on PostgreSQL with the roles of `outbox db
    roles`; an operator can choose the actor's name, but not this.
    """

    id: int
    at: datetime
    actor: str
    action: str
    kind: str
    target: str
    reason: str | None
    count: int
    login: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which rows; None for all. The rows of single entries of a proposal are listed only by their target or kind.

    since: a timedelta counts back from the database's clock.
    """

    actor: str | None = None
    action: str | None = None
    kind: str | None = None
    target: str | None = None
    since: datetime | timedelta | None = None


EVERYTHING = AuditFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Rows, the newest first, and where the next page begins; None at the end. at: the database's clock."""

    at: datetime
    rows: Sequence[AuditRow]
    next: Place[int] | None


def write_audit(
    connection: Connection,
    tables: Tables,
    *,
    actor: str,
    action: str,
    kind: Kind,
    target: str,
    reason: str | None,
    count: int = 1,
) -> int:
    """Add a row, in the transaction of the decision. Returns its id."""
    written = insert(tables.audit).values(
        at=clock(), actor=actor, action=action, kind=kind, target=target, reason=reason, count=count
    )
    key: Any = connection.execute(written).inserted_primary_key
    return int(key[0])


def write_proposed(
    connection: Connection,
    tables: Tables,
    ids: Collection[UUID],
    *,
    actor: str,
    action: str,
    reason: str,
) -> None:
    """Add a row for each entry of a proposal, so that the log is found by any of them."""
    common = {"actor": actor, "action": action, "kind": "proposed_entry", "reason": reason, "count": 1}
    connection.execute(insert(tables.audit).values(at=clock()), [common | {"target": str(id)} for id in ids])


def count_more(connection: Connection, tables: Tables, id: int, more: int) -> None:
    """Add to the count of a decision that is made in several transactions."""
    audit = tables.audit
    connection.execute(update(audit).where(audit.c.id == id).values(count=audit.c.count + more))


def read_audit(
    connection: Connection,
    tables: Tables,
    wanted: AuditFilter = EVERYTHING,
    *,
    max_rows: int,
    after: Place[int] | None = None,
) -> AuditPage:
    """A page of the audit log, the newest row first. With a filter it reads on until the page is full, in the worst case all."""
    audit, now = tables.audit, database_now(connection)
    at, id = audit.c.at, audit.c.id
    later = following(after, at, id, is_descending=True, has_ids_descending=True)
    found = (
        select(audit)
        .where(*_conditions(tables, wanted, now), *later)
        .order_by(at.desc(), id.desc())
        .limit(max_rows + 1)
    )
    rows = [AuditRow(**row._mapping) for row in connection.execute(found)]
    page, has_more = rows[:max_rows], len(rows) > max_rows
    return AuditPage(at=now, rows=page, next=Place(page[-1].at, page[-1].id) if has_more else None)


def _conditions(tables: Tables, wanted: AuditFilter, now: datetime) -> list[ColumnElement[bool]]:
    audit = tables.audit
    names = ("actor", "action", "kind", "target")
    given: list[ColumnElement[bool]] = [
        audit.c[name] == value for name in names if (value := getattr(wanted, name)) is not None
    ]
    if wanted.target is None and wanted.kind is None:
        given.append(audit.c.kind != "proposed_entry")
    since = now - wanted.since if isinstance(wanted.since, timedelta) else wanted.since
    return given if since is None else [*given, audit.c.at >= since]
