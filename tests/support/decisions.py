"""Operator decisions on entries, and entries that wait for one."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import outbox
from dispatchers import Outcome, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue.claim_request import Forms
from dispatchers.transitions import MarkUncertain
from support.database import TABLES, Database
from support.entries import claim_one, put_one, queue_row, run_once, settle, state


def decide(database: Database, what: Callable[..., Any], id: UUID, *verdict: str, **settings: Any) -> None:
    with database.engine.begin() as connection:
        what(connection, TABLES, id, *verdict, **{"actor": "ada", "reason": "looked at it", **settings})


def history(database: Database, id: UUID) -> list[tuple[str, str | None, str | None]]:
    return [(row.kind, row.actor, row.reason) for row in database.rows(TABLES.event) if row.entry_id == id]


def uncertain(database: Database, ob: outbox.Outbox, outcome: Outcome | None = None, **settings: Any) -> UUID:
    """An entry that may have happened: by default one whose sender got no answer from a service that keeps no keys."""
    id = put_one(database, ob, **settings)
    adapter = MemoryAdapter([outcome or Unknown("no answer")], window=None)
    run_once(database, ob, adapters={"crm": adapter})
    assert state(database, id) == "uncertain"
    return id


def in_doubt(database: Database, ob: outbox.Outbox) -> UUID:
    """An entry that may have happened under a key which the service still knows, and whose answer it does not."""
    id = put_one(database, ob, parent="invoice:42")
    store = DatabaseStore(database.engine, ob.configuration)
    claimed = claim_one(store, forms=Forms({"crm": "native"}))
    settle(store, (claimed, MarkUncertain("an operator must look", 1, True, claimed.leased_at)))
    return id


MAYBE_SENT = "it may have been sent, so it cannot be cancelled"


def send_again(database: Database, ob: outbox.Outbox, id: UUID, adapter: MemoryAdapter) -> Any:
    """Decide so, and let a dispatcher take note; the row as it then waits."""
    decide(database, decisions.resolve, id, "send_again")
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    return queue_row(database, id)
