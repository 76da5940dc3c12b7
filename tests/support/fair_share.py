"""A fair destination's queue: entries of many scopes, and how many of each a claim takes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry
from support.database import TABLES, Database
from support.entries import claim, put_one, queue_row, quota

MOMENT = timedelta(microseconds=1)
numbers = iter(range(1_000_000_000))


@dataclass
class Bench:
    """A database with its store, and the outbox that fills it. of: whose each entry is."""

    database: Database
    ob: outbox.Outbox
    store: DatabaseStore = field(init=False)
    of: dict[UUID, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = DatabaseStore(self.database.engine, self.ob.configuration)

    def put(self, scope: str, *, ob: outbox.Outbox | None = None, **given: Any) -> UUID:
        parent = outbox.ParentKey(f"order:{next(numbers)}", scope=scope)
        id = put_one(self.database, ob or self.ob, parent=parent, **given)
        self.of[id] = scope
        return id

    def flood(self, scope: str, count: int, **given: Any) -> list[UUID]:
        """Many entries that are alike, but for a microsecond each by which they are due earlier than the one before."""
        first = self.put(scope, **given)
        (entry,) = (row._asdict() for row in self.database.entries if row.id == first)
        row = queue_row(self.database, first)._asdict()
        ids = [uuid4() for _ in range(count - 1)]
        rows = [row | {"id": id, "due_at": row["due_at"] - n * MOMENT} for n, id in enumerate(ids, start=1)]
        if rows:
            with self.database.engine.begin() as connection:
                connection.execute(sa.insert(TABLES.entry), [entry | {"id": id} for id in ids])
                connection.execute(sa.insert(TABLES.queue), rows)
        self.of |= dict.fromkeys(ids, scope)
        return [first, *ids]

    def claim(self, permits: int, **given: Any) -> Counter[str]:
        """How many entries of each scope a claim brings."""
        return self.counted(claim(self.store, quota(permits=permits), **given))

    def counted(self, entries: Sequence[ClaimedEntry]) -> Counter[str]:
        return Counter(self.of[entry.id] for entry in entries)
