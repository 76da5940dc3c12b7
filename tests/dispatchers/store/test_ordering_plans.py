"""A group's length costs nothing: what is asked of it reads its head. Nor does it cost a statement that so many leave theirs."""

from typing import Any

import sqlalchemy as sa
from support.database import TABLES, Database, nodes, statements_of
from support.entries import HOUR, age, claim, claim_request, quota, settle
from support.ordering import OrderedService, blocked, put_in_group, send_all

import outbox
from dispatchers import Unknown
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_postgresql
from dispatchers.store.queue.ordering import sort_out
from dispatchers.transitions import Settle


def test_the_dead_rows_before_a_head_are_walked_over_once_a_group(postgresql: Database, ob: outbox.Outbox) -> None:
    """Vacuum may not remove what was drained while a report holds the horizon; fifty entries of a group meet it once."""
    put_in_group(postgresql, ob, *(f"entry {number}" for number in range(50)), group="group 0")
    postgresql.execute(sa.update(TABLES.queue).values(due_at=sa.func.now()))
    engine = postgresql.new_engine()
    lookup: list[int] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if not statement.startswith("SELECT ordering_group"):
            return
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
        (plan,) = connection.connection.dbapi_connection.execute(query, parameters).fetchone()[0]
        lookup.extend(node["Actual Loops"] for node in nodes(plan["Plan"]) if node.get("Alias") == "first")

    with engine.begin() as connection:
        claimed = claims_postgresql.claim(connection, TABLES, claim_request(quota(permits=50)))
        sa.event.listen(engine, "before_cursor_execute", explain)
        sort_out(connection, TABLES, claimed)

    assert len(claimed) == 50
    assert lookup == [1]


def test_late_proof_lifts_the_blocks_of_its_own_entries_in_one_statement(database: Database, ob: outbox.Outbox) -> None:
    names = ("ada", "bob", "eve")
    ids = [put_in_group(database, ob, f"{name} 1", f"{name} 2", group=name)[0] for name in names]
    store = DatabaseStore(database.engine, ob.configuration)
    crashed = {entry.id: entry for entry in claim(store) if entry.id in ids}
    age(database, HOUR)
    send_all(database, ob, OrderedService(**dict.fromkeys([f"{name} 1" for name in names], Unknown("", final=True))))
    assert set(blocked(database)) == set(names)

    with statements_of(database.engine) as sent:
        settle(store, *((crashed[id], Settle("delivered", 1)) for id in ids[:2]))

    assert blocked(database) == {"eve": ids[2]}
    assert len([statement for statement in sent if "DELETE FROM outbox_blocked_group" in statement]) == 1
