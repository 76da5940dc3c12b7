"""What the tests of claims and settlements share: a store on each database, and one transition of each kind."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Release, Retry, Settle, Transition
from support.database import Database
from support.entries import put_one, queue_row

MINUTE = timedelta(minutes=1)


@dataclass
class Bench:
    """A database with its store, and the outbox that fills it."""

    database: Database
    store: DatabaseStore
    ob: outbox.Outbox

    def put(self, **settings: Any) -> UUID:
        return put_one(self.database, self.ob, **settings)

    def row(self, id: UUID) -> Any:
        return queue_row(self.database, id)


def moves(entry: ClaimedEntry) -> dict[str, Transition]:
    """One transition of each kind, as a dispatcher would decide it."""
    return {
        "delivered": Settle("delivered", entry.attempts + 1, result={"id": "ch_1"}),
        "failed": Settle("failed", entry.attempts + 1, reason="declined"),
        "retry": Retry(MINUTE, "slow", entry.attempts + 1, True, entry.leased_at),
        "uncertain": MarkUncertain("vanished", entry.attempts + 1, True, entry.leased_at),
        "released": Release("no time left", MINUTE),
    }
