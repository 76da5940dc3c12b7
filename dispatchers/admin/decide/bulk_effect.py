"""The progress of a decision in bulk: how many of its entries a dispatcher has not settled yet."""

from collections.abc import Sequence
from itertools import islice
from uuid import UUID

from sqlalchemy import Connection, func, select

from dispatchers.admin.decide.effects import Action
from outbox.sql.schema.tables import Tables

CARRIED_OUT: frozenset[Action] = frozenset({"cancel", "resolve"})
"""A dispatcher carries these decisions out. The others take effect with their own commit."""

MAX_IDS = 1000  # in one statement


def count_open(connection: Connection, tables: Tables, ids: Sequence[UUID]) -> int:
    """How many of these entries are decided, and not settled."""
    queue = tables.queue
    rest, found = iter(ids), 0
    while some := list(islice(rest, MAX_IDS)):
        decided = select(func.count()).where(queue.c.id.in_(some), queue.c.known.is_not(None))
        found += connection.execute(decided).scalar_one()
    return found
