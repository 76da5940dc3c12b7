"""What a running dispatcher asks beside its claims: however long the queue, no statement reads it from end to end."""

import asyncio
from datetime import timedelta

from support.database import TABLES, Database
from test_claim_plans import fill, run
from test_retention_plans import nodes, plans_of

import outbox
from dispatchers.maintenance.jobs import report_lag
from dispatchers.store.database import DatabaseStore

ROWS = 30_000
SMALL = {"outbox_meta", "outbox_kid", "outbox_destination", "outbox_halted"}


async def ask_everything(store: DatabaseStore, ob: outbox.Outbox) -> None:
    await store.gauges()
    await store.unknown_kid(["k1"])
    await store.require_environment("test")
    await store.require_secrets(ob.configuration.keyring, recording=False)
    await store.destinations()
    await store.pressures()
    await store.accepted(None)
    await store.seek(lambda operation, sent_as: True, timedelta(seconds=1), None)
    await store.watch("test", None)
    await report_lag(store.run, TABLES)


def test_no_statement_of_a_running_dispatcher_reads_the_whole_queue(postgresql: Database, ob: outbox.Outbox) -> None:
    run(postgresql, *(f"ALTER TABLE outbox_{name} SET (autovacuum_enabled = off)" for name in ("queue", "entry")))
    run(postgresql, "ANALYZE outbox_queue", "ANALYZE outbox_entry")
    fill(postgresql, ROWS, "a", "b", "c")
    found = []
    for analyze in ([], ["ANALYZE outbox_queue", "ANALYZE outbox_entry"]):
        run(postgresql, *analyze)
        engine = postgresql.new_engine()
        with plans_of(engine) as plans:
            asyncio.run(ask_everything(DatabaseStore(engine, ob.configuration), ob))
        engine.dispose()
        found += [node for plan in plans for node in nodes(plan)]
    run(postgresql, *(f"ALTER TABLE outbox_{name} RESET (autovacuum_enabled)" for name in ("queue", "entry")))

    kinds = {(node["Node Type"], node.get("Relation Name")) for node in found}
    whole = {kind for kind in kinds if "Seq" in kind[0] or "Bitmap" in kind[0]}
    assert {name for _, name in whole} <= SMALL
    assert ("Index Scan", "outbox_queue") in kinds
