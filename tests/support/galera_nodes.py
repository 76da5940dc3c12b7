"""Transactions and entries on the nodes of a Galera cluster, and races between two of them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from dispatchers.store.queue import claims_rows
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sql.clock import clock, earlier
from outbox.sql.errors.driver import DEADLOCK, sqlstate
from support.database import TABLES
from support.entries import HOUR, claim_request, quota

Result = TypeVar("Result")


def in_transaction(engine: sa.Engine, work: Callable[[Session], object]) -> int:
    """Run it again as long as another node's transaction is preferred, as an app must. Returns how often."""
    for again in range(50):
        try:
            with Session(engine) as session, session.begin():
                work(session)
        except sa.exc.OperationalError as error:
            if sqlstate(error.orig) != DEADLOCK:
                raise
        else:
            return again
    raise AssertionError("it was never preferred")


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(TABLES.queue)) or 0


# --- two transactions on two nodes, both at work before either commits


class Race(NamedTuple):
    """What both returned, and whether the second commit was refused."""

    first: Any
    second: Any
    is_refused: bool


def race(engines: list[sa.Engine], first: Callable[..., Any], second: Callable[..., Any]) -> Race:
    """The first one, on the first node, commits before the second one, on the second node."""
    wait_for_all(engines)
    with engines[0].connect() as one, engines[1].connect() as other:
        one.begin()
        other.begin()
        results = first(one), second(other)
        one.commit()
        try:
            other.commit()
        except sa.exc.OperationalError as error:
            if sqlstate(error.orig) != DEADLOCK:
                raise
            return Race(*results, is_refused=True)
    return Race(*results, is_refused=False)


def wait_for_all(engines: list[sa.Engine]) -> None:
    """Until each node has applied what the others have committed."""
    for engine in engines:
        with engine.connect() as connection:
            connection.exec_driver_sql("SET STATEMENT wsrep_sync_wait = 1 FOR SELECT 1")


def enqueued(engines: list[sa.Engine], ob: outbox.Outbox, parent: str) -> UUID:
    with Session(engines[0]) as session, session.begin():
        id = ob.enqueue(session, "crm.upsert", {}, parent=parent).id
    wait_for_all(engines)
    return id


def claim(connection: sa.Connection) -> list[ClaimedEntry]:
    return claims_rows.claim(connection, TABLES, claim_request(quota()))


def ending(entry: ClaimedEntry, state: Literal["delivered", "failed"]) -> Callable[[sa.Connection], set[UUID]]:
    return lambda connection: claims_rows.settle(connection, TABLES, [(entry, Settle(state, 1))])


def on_a_node(engine: sa.Engine, work: Callable[[sa.Connection], Result]) -> Result:
    with engine.begin() as connection:
        return work(connection)


def claimed_with_an_expired_lease(engines: list[sa.Engine], ob: outbox.Outbox, parent: str) -> ClaimedEntry:
    enqueued(engines, ob, parent)
    (entry,) = on_a_node(engines[0], claim)
    past = sa.update(TABLES.queue).values(lease_until=earlier(clock(), HOUR))
    on_a_node(engines[0], lambda connection: connection.execute(past))
    return entry


def ended_states(engines: list[sa.Engine], id: UUID) -> tuple[list[str], list[str]]:
    """Its states in the queue and among the settlements, on the third node."""
    wait_for_all(engines)
    with engines[2].connect() as connection:
        found = [sa.select(table.c.state).where(table.c.id == id) for table in (TABLES.queue, TABLES.settlement)]
        queued, settled = [list(connection.execute(each).scalars()) for each in found]
    return queued, settled
