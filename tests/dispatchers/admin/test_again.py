"""Asking again for what failed: one new entry with all that the first one had, under a key of its own."""

import threading
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.accepted import Checkout
from support.callbacks import Shop
from support.database import CHARGE, REQUEST, TABLES, Database
from support.entries import put, put_one, queue_row, reasons, run_once, states

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import again as asking
from dispatchers.admin.decide.again import Again, again, first_of
from dispatchers.admin.decide.bulk import BulkDecision, decide, preview
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.errors import DecisionRefused, EntryNotFound
from outbox.configuration import Configuration
from outbox.errors import ConfigurationError
from outbox.keys import Keyring

REJECTING = {"crm": MemoryAdapter(lambda delivery: Rejected("no such customer"))}
COPIED = (
    *("env", "scope", "source", "parent", "operation", "parent_id", "record_id", "destination", "payload", "options"),
    *("headers", "ordering_key", "schema_version"),
)


def failed(database: Database, ob: outbox.Outbox, **settings: Any) -> UUID:
    id = put_one(database, ob, **settings)
    run_once(database, ob, adapters=REJECTING)
    return id


def ask(database: Database, ob: outbox.Outbox, id: UUID, **settings: Any) -> Again:
    with database.engine.begin() as connection:
        return again(connection, ob.configuration, id, **{"actor": "ada", "reason": "it exists now", **settings})


def entry_row(database: Database, id: UUID) -> Any:
    (row,) = [row for row in database.entries if row.id == id]
    return row


# --- one entry


def test_the_new_entry_has_all_that_the_first_one_had_but_the_key(database: Database, ob: outbox.Outbox) -> None:
    first = failed(
        database,
        ob,
        payload={"b": 1, "a": "ä"},
        options={"account": "acct_1"},
        discriminator="line-1",
        destination="crm",
    )

    made = ask(database, ob, first)

    before, after = entry_row(database, first), entry_row(database, made.id)
    assert {name: getattr(before, name) for name in COPIED} == {name: getattr(after, name) for name in COPIED}
    assert (made.is_new, after.discriminator, first_of(after.discriminator)) == (True, f"again:{first}", first)
    assert ob.child_key(before.parent, before.operation, after.discriminator) != ob.child_key(
        before.parent, before.operation, "line-1"
    )
    adapter = MemoryAdapter()
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert adapter.deliveries[0].payload == {"b": 1, "a": "ä"}
    assert states(database) == {"failed": 1, "delivered": 1}


def test_both_the_history_and_the_audit_log_have_who_and_why(database: Database, ob: outbox.Outbox) -> None:
    first = failed(database, ob)

    made = ask(database, ob, first)

    assert reasons(database, first)[-1] == f"it exists now (again as {made.id})"
    (row,) = database.rows(TABLES.audit)
    assert (row.action, row.kind, row.target, row.actor) == ("again", "entry", str(first), "ada")


def test_asked_twice_there_is_one_new_entry(database: Database, ob: outbox.Outbox) -> None:
    first = failed(database, ob)

    made = ask(database, ob, first)
    same = ask(database, ob, first)

    assert same == Again(id=made.id, is_new=False)
    assert (len(database.entries), len(database.rows(TABLES.audit))) == (2, 1)


def test_two_operators_who_ask_at_once_make_one_entry(postgresql: Database, ob: outbox.Outbox) -> None:
    first = failed(postgresql, ob)
    barrier, made = threading.Barrier(2), []

    def operate() -> None:
        barrier.wait()
        made.append(ask(postgresql, ob, first))

    operators = [threading.Thread(target=operate) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()

    assert sorted(each.is_new for each in made) == [False, True]
    assert made[0].id == made[1].id
    assert (len(postgresql.entries), len(postgresql.rows(TABLES.audit))) == (2, 1)


def test_one_that_fails_again_can_be_asked_for_again(database: Database, ob: outbox.Outbox) -> None:
    first = failed(database, ob)
    second = ask(database, ob, first).id
    run_once(database, ob, adapters=REJECTING)

    third = ask(database, ob, second).id

    assert len({first, second, third}) == 3
    assert first_of(entry_row(database, third).discriminator) == second


def test_a_cancelled_entry_can_be_asked_for_again(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    with database.begin() as session:
        assert ob.cancel(session, id)

    assert ask(database, ob, id).is_new


def test_the_callback_of_the_operation_runs_for_the_new_entry(database: Database, ob: outbox.Outbox) -> None:
    shop = Shop(database, ob, is_async=False)
    seen: list[UUID] = []
    shop.on_settled(lambda session, settlement: seen.append(settlement.entry.id))  # type: ignore[arg-type, return-value]
    id = put_one(database, ob)
    shop.run_once(adapters=REJECTING)

    made = ask(database, ob, id)
    shop.run_once(adapters={"crm": MemoryAdapter()})

    assert seen == [id, made.id]


def test_the_new_entry_belongs_to_the_same_request(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "key-1", scope="acct_1", content=REQUEST) as claim:
        id = ob.enqueue(session, "crm.upsert", {}).id
        claim.respond(201)
    run_once(database, ob, adapters=REJECTING)

    made = ask(database, ob, id)

    assert entry_row(database, made.id).record_id == entry_row(database, id).record_id is not None
    with database.begin() as session:
        parent = outbox.ParentKey("key-1", scope="acct_1", source="http")
        assert {entry.id for entry in ob.status(session, parent)} == {id, made.id}


@pytest.mark.parametrize("others", [0, 1], ids=["answered", "still open"])
def test_a_request_that_is_open_waits_for_the_new_entry_too(database: Database, ob: outbox.Outbox, others: int) -> None:
    shop = Checkout(database, ob)
    shop.on_completed()
    shop.accept(CHARGE, *["later.entry"] * others)
    shop.run_once(MemoryAdapter(lambda delivery: Rejected("no such customer")))
    (first,) = [row.id for row in database.entries if row.operation == CHARGE]

    ask(database, ob, first)
    shop.run_once()
    during = shop.record.state
    if others:
        shop.cancel("later.entry")
        shop.run_once()

    states = [sorted(entry.state for entry in completed.entries) for completed in shop.seen]
    assert (during, shop.record.state) == ("accepted" if others else "failed", "failed")
    assert states == [["cancelled", "delivered", "failed"] if others else ["failed"]]


def test_in_an_ordering_group_it_goes_to_the_end(database: Database, ob: outbox.Outbox) -> None:
    first = failed(database, ob, ordering_key="ada")
    waiting = put_one(database, ob, ordering_key="ada", parent="order:9")

    made = ask(database, ob, first)

    assert queue_row(database, made.id).position > queue_row(database, waiting).position
    assert queue_row(database, made.id).ordering_key == "ada"


def test_at_a_fair_destination_it_keeps_its_scope(database: Database, ob: outbox.Outbox) -> None:
    fair = outbox.Outbox(ob.configuration.keyring, env="test", fair={"crm"})
    parent = outbox.ParentKey("order:1", scope="acct_1", source="http")
    first = failed(database, fair, parent=parent)
    put_one(database, fair, parent=outbox.ParentKey("order:2", scope="acct_2", source="http"))

    made = ask(database, ob, first)

    row = queue_row(database, made.id)
    assert (row.fair, row.scope) == ("crm", "acct_1")


# --- what is refused


def test_what_was_delivered_or_has_not_ended_is_refused(database: Database, ob: outbox.Outbox) -> None:
    delivered = put_one(database, ob)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    waiting = put_one(database, ob)

    with pytest.raises(DecisionRefused, match="it was delivered, and asking for it again would repeat its effect"):
        ask(database, ob, delivered)
    with pytest.raises(DecisionRefused, match="only a failed or cancelled entry can be asked for again"):
        ask(database, ob, waiting)
    with pytest.raises(EntryNotFound):
        ask(database, ob, uuid4())
    assert len(database.entries) == 2


def test_another_deployment_or_secret_asks_nothing(database: Database, ob: outbox.Outbox) -> None:
    first = failed(database, ob)
    elsewhere = outbox.Outbox(ob.configuration.keyring, env="prod")

    with pytest.raises(DecisionRefused, match="it belongs to env 'test', and this process to 'prod'"):
        ask(database, elsewhere, first)
    for ring in (Keyring({ob.configuration.keyring.current: b"x" * 32}), Keyring({"unknown": b"x" * 32})):
        with pytest.raises(ConfigurationError, match="secret of kid"):
            ask(database, outbox.Outbox(ring, env="test"), first)
    assert len(database.entries) == 1


# --- in bulk


def deciding(configuration: Configuration) -> BulkDecision:
    return BulkDecision(action="again", actor="ada", reason="they exist now", configuration=configuration)


def test_all_that_failed_are_asked_for_again_once(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=5)
    run_once(database, ob, adapters=REJECTING)
    ask(database, ob, database.entries[0].id)
    decision, wanted = deciding(ob.configuration), Filter(states=("failed",), operation="crm")

    with database.engine.connect() as connection:
        found = preview(connection, TABLES, wanted, decision)
    (done,) = decide(database.engine, TABLES, decision, found)
    with database.engine.connect() as connection:
        repeated = preview(connection, TABLES, wanted, decision)

    assert found.sentence == "enqueue again 4 entries that are failed, of operation 'crm' or below it"
    assert (done.done, found.left_alone) == (4, {"it was asked for again already": 1})
    assert (repeated.ids, repeated.left_alone) == ([], {"it was asked for again already": 5})
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 5


def test_two_who_ask_again_in_bulk_make_one_entry_each(postgresql: Database, ob: outbox.Outbox) -> None:
    ids = put(postgresql, ob, count=150)
    row = {"state": "failed", "deliveries": 1, "attempts": 1, "key_epoch": 0, "settled_at": sa.func.now()}
    postgresql.execute(sa.delete(TABLES.queue))
    for id in ids:
        postgresql.execute(sa.insert(TABLES.settlement).values(id=id, **row))
    decision = deciding(ob.configuration)
    with postgresql.engine.connect() as connection:
        found = preview(connection, TABLES, Filter(states=("failed",)), decision)
    barrier, results = threading.Barrier(2), []

    def operate() -> None:
        barrier.wait()
        *_, last = decide(postgresql.engine, TABLES, decision, found, pause=lambda seconds: None)
        results.append(last)

    operators = [threading.Thread(target=operate) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()

    assert sum(result.done for result in results) == 150
    assert [result.done + sum(result.skipped.values()) for result in results] == [150, 150]
    assert len(postgresql.entries) == 300
    assert len(postgresql.rows(TABLES.event)) == 150


def test_what_maintenance_deletes_meanwhile_is_counted_as_deleted(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = failed(postgresql, ob, parent="order:1")
    failed(postgresql, ob, parent="order:2")
    decision = deciding(ob.configuration)
    with postgresql.engine.connect() as connection:
        found = preview(connection, TABLES, Filter(states=("failed",)), decision)

    def allowed(connection: Any, tables: Any, env: str, rows: Any) -> list[None]:
        postgresql.execute(sa.delete(TABLES.entry).where(TABLES.entry.c.id == gone))
        return [None] * len(rows)

    monkeypatch.setattr(asking, "why_not_all", allowed)
    (done,) = decide(postgresql.engine, TABLES, decision, found)

    assert done == (1, {"it was deleted": 1})
