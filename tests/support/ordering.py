"""What the tests of groups share: entries of ordering keys, a service that writes down who came when, one step at a time."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

import outbox
from dispatchers import Deferred, Delivered, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.queue.ordering import MOMENT
from outbox.sql.clock import clock_plus
from outbox.sql.ordering import is_blocked
from support.database import TABLES, Database
from support.entries import run_once, state


def put_in_group(database: Database, ob: outbox.Outbox, *names: str, group: str = "ada", **settings: Any) -> list[UUID]:
    """Entries of one group, each in a transaction of its own, and with a name of its own."""
    ids = []
    for name in names:
        with database.begin() as session:
            given = {"parent": name, "ordering_key": group, "payload": {"group": group, "name": name}, **settings}
            ids.append(ob.enqueue(session, "crm.upsert", **given).id)
    return ids


BUSY = Deferred("busy", after=timedelta(minutes=10))  # longer than a test takes, on the slowest machine


class OrderedService(MemoryAdapter):
    """Writes down the names in each group, in the order in which they came; answers by name, else well."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers
        self.came: dict[str, list[str]] = defaultdict(list)
        self.under_way: Counter[str] = Counter()

    async def send(self, delivery: Delivery) -> Outcome:
        group, name = delivery.payload["group"], delivery.payload["name"]
        self.under_way[group] += 1
        assert self.under_way[group] == 1, f"two concurrent sends of the group {group!r}"
        self.came[group].append(name)
        await asyncio.sleep(0)
        self.under_way[group] -= 1
        answer: Outcome = self.answers.get(name, Delivered())
        return answer


def send_all(database: Database, ob: outbox.Outbox, service: Any, **adapters: Any) -> None:
    """Call dispatchers until they have nothing more to do, nor in a moment, as after a head that was just being settled."""
    while run_once(database, ob, adapters={"crm": service, **adapters}) or _is_due_in_a_moment(database):
        pass


def _is_due_in_a_moment(database: Database) -> bool:
    queue = TABLES.queue
    soon = sa.select(queue.c.id).where(queue.c.state == "pending", queue.c.due_at <= clock_plus(MOMENT))
    with database.engine.connect() as connection:
        return connection.execute(soon.limit(1)).first() is not None


def states_of(database: Database, ids: Sequence[UUID]) -> list[str]:
    """The state of each; `blocked` for what waits for the head of its group."""
    with database.engine.connect() as connection:
        blocked = set(connection.execute(sa.select(TABLES.queue.c.id).where(is_blocked(TABLES.queue))).scalars())
    return ["blocked" if id in blocked else state(database, id) for id in ids]


def blocked(database: Database) -> dict[str, UUID]:
    """The entry that blocks each blocked group."""
    return {row.ordering_key: row.entry_id for row in database.rows(TABLES.blocked_group)}


def decide(database: Database, decision: Any, id: UUID, *arguments: Any, **settings: Any) -> None:
    with database.engine.begin() as connection:
        decision(connection, TABLES, id, *arguments, actor="bob", reason="looked", **settings)
