"""What the tests of status lookups share: a service that loses answers, and its lookups."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import outbox
from dispatchers import (
    Delivery,
    Outcome,
    Unknown,
)
from dispatchers.adapters import MemoryAdapter
from support.database import TABLES, Database
from support.entries import (
    HOUR,
    age,
    put_one,
    run_once,
)

DAY = 24 * HOUR
QUIET = timedelta(minutes=2)  # longer than lease and margin


class Losing(MemoryAdapter):
    """Its first answers are lost, each in its way: "request" before anything was executed, "answer" after it was.

    find: by its own books, or the given answers in turn.
    """

    def __init__(self, *lost: str | Outcome, finds: Any = True, **settings: Any) -> None:
        super().__init__(find=finds if finds is True or callable(finds) or finds is None else self._next, **settings)
        self.lost = list(lost)
        self.finds = finds
        self.lookup: list[Delivery] = []

    async def send(self, delivery: Delivery) -> Outcome:
        fate = self.lost.pop(0) if self.lost else "none"
        if isinstance(fate, str) and fate != "request":
            outcome = await super().send(delivery)
            return Unknown("no answer") if fate == "answer" else outcome
        return Unknown("no answer") if isinstance(fate, str) else fate

    def _next(self, delivery: Delivery) -> Any:
        self.lookup.append(delivery)
        finding = self.finds.pop(0)
        if isinstance(finding, BaseException):
            raise finding
        return finding


def keyless(*lost: str | Outcome, **settings: Any) -> Losing:
    return Losing(*lost, window=None, **settings)


def look_up(
    database: Database, ob: outbox.Outbox, adapter: MemoryAdapter, after: timedelta = QUIET, **rest: Any
) -> None:
    age(database, after)
    run_once(database, ob, adapters={"crm": adapter}, **rest)


def sent_and_looked_up(database: Database, ob: outbox.Outbox, adapter: MemoryAdapter, **rest: Any) -> UUID:
    id = put_one(database, ob)
    run_once(database, ob, adapters={"crm": adapter}, **rest)
    look_up(database, ob, adapter, **rest)
    return id


def events(database: Database, id: UUID) -> list[tuple[str, str | None]]:
    return [(row.kind, row.reason) for row in database.rows(TABLES.event) if row.entry_id == id]


def decide_on(database: Database, id: UUID, decision: Callable[..., None], *arguments: Any) -> None:
    with database.engine.begin() as connection:
        decision(connection, TABLES, id, *arguments, actor="ada", reason="looked there")


def awaiting_lookup(database: Database, ob: outbox.Outbox, *lost: str, **settings: Any) -> tuple[UUID, Losing]:
    """An entry whose status lookup is due."""
    id, adapter = put_one(database, ob), keyless(*(lost or ("answer",)), **settings)
    run_once(database, ob, adapters={"crm": adapter})
    age(database, QUIET)
    return id, adapter
