"""Resume after a failover, a restore or a copy, on an operator's decision: unsettled entries count as maybe sent.

Every send that the database forgot was claimed after the last stored identity that the database still contains. So doubt begins
at that time, and so does the window in which an entry may be sent again. An entry's row does not prove that no send succeeded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Engine, and_, case, insert, literal, or_, select, update

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.decisions import check_decision
from dispatchers.store.connections.guards import guard
from dispatchers.store.records.identity import (
    can_read_server,
    later_resume,
    read_identity,
    read_server,
    suspend,
    values_of,
)
from outbox.errors import InvalidValue
from outbox.sql.clock import clock, database_now
from outbox.sql.deployment import recorded_environment, refuse_other_environment
from outbox.sql.dialect import dialect_of
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import change_in_order
from outbox.times import NEVER

MAX_ROWS = 1000  # a batch holds its locks for some 50 ms
RESUMING = "`outbox resume --after-restore` is running: run it again if it was interrupted"
FOREIGN = "it belongs to another env: the deployment that this database was copied from may send it too"
NO_ID = UUID(int=0)

Transact: TypeAlias = Callable[[Callable[[Connection], Any]], Any]
"""Runs a piece of work in a transaction of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """An operator's decision about the database. env: the deployment that it belongs to from now on.

    adopt_from: the deployment that it belonged to until now, if that is another one.
    since: from when on commits may be missing; None for the last stored identity. nothing_lost: every commit is there.
    """

    env: str
    actor: str
    reason: str
    since: datetime | timedelta | None = None
    nothing_lost: bool = False
    adopt_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """since: from when on they may have been sent; None if nothing was lost. doubted: how many entries count as maybe sent now.

    suspended: how many belong to another deployment and are suspended permanently.
    """

    since: datetime | None
    doubted: int
    suspended: int


def resume(
    engine: Engine,
    tables: Tables,
    decision: OperatorDecision,
    repeated: Callable[[Transact], Transact] = lambda once: once,
) -> Resumed:
    """Let the dispatchers resume, in short transactions. Call it again if it was interrupted: it continues.

    It also works when nothing is suspended: an operator may know of a restore that was not detected. Raises, with nothing
    written, `InvalidValue`, and `ConfigurationError` if the database belongs to another env than the one that is named to be
    adopted from.
    repeated: wraps the function that runs one transaction, to run it again after a conflict.
    """
    check_decision(decision.actor, decision.reason)
    engine = dialect_of(engine).at_own_level(engine)

    @repeated
    def transact(work: Callable[[Connection], Any]) -> Any:
        with engine.begin() as connection:
            return work(connection)

    def begin(connection: Connection) -> datetime:
        _require_owner(connection, tables, decision)
        since = _since(connection, tables, decision)
        identity, _ = read_identity(connection, tables)
        suspend(connection, tables, identity, RESUMING)
        return since

    def change(connection: Connection, ids: Sequence[UUID], since: datetime) -> tuple[int, int]:
        foreign = _foreign(connection, tables, ids, decision.env)
        doubted = _doubt(connection, tables, foreign if decision.nothing_lost else ids, since, decision)
        return doubted, _suspend(connection, tables, foreign)

    since = transact(begin)
    doubted = suspended = 0
    for ids in _batches(transact, tables):
        more_doubted, more_suspended = transact(partial(change, ids=ids, since=since))
        doubted += more_doubted
        suspended += more_suspended
    reads_server = transact(lambda connection: can_read_server(connection, tables))
    transact(
        partial(
            _resume_sending, tables=tables, decision=decision, reads_server=reads_server, changed=doubted + suspended
        )
    )
    return Resumed(since=None if decision.nothing_lost else since, doubted=doubted, suspended=suspended)


def _require_owner(connection: Connection, tables: Tables, decision: OperatorDecision) -> None:
    recorded = recorded_environment(connection, tables)
    owner = decision.env if recorded is None else recorded
    if decision.adopt_from is None:
        refuse_other_environment(connection, owner, decision.env)
    elif decision.adopt_from != owner or owner == decision.env:
        raise InvalidValue(
            "adopt_from",
            decision.adopt_from,
            f"the database belongs to env {owner!r}: to adopt the database, pass that env here, and the new env with --env",
        )


def _since(connection: Connection, tables: Tables, decision: OperatorDecision) -> datetime:
    now = database_now(connection)
    identity, _ = read_identity(connection, tables)
    if decision.since is None and identity is None and not decision.nothing_lost:
        raise InvalidValue(
            "since", None, "must say when the backup was taken: the database has no recorded identity to derive it from"
        )
    if decision.since is None:
        return now if identity is None else identity.checked_at
    since = now - decision.since if isinstance(decision.since, timedelta) else decision.since
    if since > now:
        raise InvalidValue(
            "since", since.isoformat(), f"is in the future: the database's clock shows {now.isoformat()}"
        )
    return since


def _batches(transact: Transact, tables: Tables) -> Iterator[Sequence[UUID]]:
    after = NO_ID
    while ids := transact(partial(_ids, tables=tables, after=after)):
        yield ids
        after = ids[-1]


def _ids(connection: Connection, tables: Tables, after: UUID) -> Sequence[UUID]:
    id = tables.queue.c.id
    return connection.execute(select(id).where(id > after).order_by(id).limit(MAX_ROWS)).scalars().all()


def _doubt(
    connection: Connection, tables: Tables, ids: Sequence[UUID], since: datetime, decision: OperatorDecision
) -> int:
    """Count them as maybe sent since `since`, and take their leases from senders whose failures are no longer believed."""
    queue = tables.queue
    leased = queue.c.lease_token.is_not(None)
    doubtless = or_(~queue.c.maybe_sent, queue.c.in_doubt_since.is_(None), queue.c.in_doubt_since > since)
    began = case(
        (queue.c.in_doubt_since < since, queue.c.in_doubt_since),
        (queue.c.leased_at < since, queue.c.leased_at),
        else_=literal(since, Instant),
    )
    again = or_(queue.c.state == "uncertain", and_(queue.c.state == "pending", queue.c.maybe_sent))
    values: dict[str, Any] = {
        "in_doubt_since": began,
        "due_at": case((leased, queue.c.lease_until), else_=queue.c.due_at),
        "attempts": queue.c.attempts + case((leased, 1), else_=0),
        "state": case((again, queue.c.state), else_="retry"),
        "maybe_sent": True,
        "lease_token": None,
        "lease_until": None,
        "leased_at": None,
    }
    uncounted = select(queue.c.id).where(queue.c.id.in_(ids), or_(doubtless, leased)).with_for_update()
    doubted = connection.execute(uncounted).scalars().all()
    connection.execute(change_in_order(update(queue).where(queue.c.id.in_(doubted)), values))
    text = f"may have been sent after {since:%Y-%m-%d %H:%M:%S UTC}: {decision.reason}"
    decided = select(queue.c.id, clock(), literal("decision"), literal(decision.actor), literal(text))
    columns = ["entry_id", "at", "kind", "actor", "reason"]
    connection.execute(insert(tables.event).from_select(columns, decided.where(queue.c.id.in_(doubted))))
    return len(doubted)


def _foreign(connection: Connection, tables: Tables, ids: Sequence[UUID], env: str) -> Sequence[UUID]:
    entry = tables.entry
    return connection.execute(select(entry.c.id).where(entry.c.id.in_(ids), entry.c.env != env)).scalars().all()


def _suspend(connection: Connection, tables: Tables, foreign: Sequence[UUID]) -> int:
    """Suspend the entries of the deployment that this database was copied from: that deployment sends them."""
    queue = tables.queue
    unsuspended = queue.c.id.in_(foreign) & queue.c.suspended_reason.is_(None)
    return connection.execute(update(queue).where(unsuspended).values(suspended_reason=FOREIGN, due_at=NEVER)).rowcount


def _resume_sending(
    connection: Connection, tables: Tables, decision: OperatorDecision, *, reads_server: bool, changed: int
) -> None:
    """Store a new identity, and who resumed and why: with this commit the dispatchers resume."""
    guard(connection)
    now = read_server(connection, tables, decision.env, reads_server=reads_server)
    row = connection.execute(select(tables.meta)).one()
    resumed_at = later_resume(now.checked_at, row.resumed_at)
    identity = replace(now, resumed_at=resumed_at, number=(row.number or 0) + 1)
    on_record = {"suspended_reason": None, "resumed_by": decision.actor, "resumed_reason": decision.reason}
    connection.execute(update(tables.meta).values(values_of(identity) | on_record))
    write_audit(
        connection,
        tables,
        actor=decision.actor,
        action="resume_after_restore",
        kind="database",
        target=decision.env,
        reason=decision.reason,
        count=changed,
    )
