"""What the tests of shared flow control have in common: a service, its row in the database, and one round of a dispatcher."""

from datetime import timedelta
from typing import Any

import outbox
from dispatchers import Breaker, Limits, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.cli.connections import repeated_after_conflicts
from dispatchers.flow_control.state import FlowUpdate, News
from support.database import TABLES, Database
from support.entries import HOUR, run_once

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
LASTING = Breaker(wait=HOUR, max_wait=DAY)  # longer than any machine takes for a test
FRAGILE = {"crm": Limits(concurrency=1, breaker=Breaker(failures=3, wait=HOUR, max_wait=DAY))}
ONE_AT_A_TIME = {"crm": Limits(concurrency=1)}


class Crm(MemoryAdapter):
    """Answers every delivery alike, with the last given answer."""

    def __init__(self, answer: Outcome) -> None:
        super().__init__(lambda delivery: self.answer)
        self.answer = answer


def crm_row(database: Database) -> Any:
    (row,) = (row for row in database.rows(TABLES.destination) if row.name == "crm")
    return row


def work(database: Database, ob: outbox.Outbox, adapter: Any, **settings: Any) -> int:
    """One round of a dispatcher of its own; returns how many entries the service was sent by it."""
    before = len(adapter.deliveries)
    run_once(database.new_engine(), ob, adapters={"crm": adapter}, **settings)
    return len(adapter.deliveries) - before


def untouched(database: Database) -> list[Any]:
    """The entries that show no trace of a claim."""
    return [row for row in database.queue if (row.state, row.deliveries, row.attempts) == ("pending", 0, 0)]


@repeated_after_conflicts
def decide(database: Database, decision: Any, name: str = "crm", reason: str | None = None) -> None:
    with database.engine.begin() as connection:
        decision(connection, TABLES, name, actor="ada", reason=reason)


def news(reported: dict[str, News], **settings: Any) -> FlowUpdate:
    return FlowUpdate(**{"news": reported, "decided": frozenset(), "limits": {}} | settings)
