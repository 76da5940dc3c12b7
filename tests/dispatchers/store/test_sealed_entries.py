"""Encrypted entries and answers on each database: sent only by a process with their key, and shown to no one else."""

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.encrypted import D1, D2, SECRET, FakeService, answering, outbox_with, put_secret, stored
from support.entries import age, change, put_one, queue_row, run_once, settlement_row

import outbox
from dispatchers import DecisionRefused, Delivered, Operations, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel, resolve
from outbox.encryption import Encryption
from outbox.testing import all_enqueued

pytestmark = [pytest.mark.on_mariadb]


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox_with(D1)


def test_a_payload_is_encrypted_in_the_database_and_sent_as_it_was(database: Database, ob: outbox.Outbox) -> None:
    id = put_secret(database, ob)
    adapter = answering(Delivered({"answer": SECRET}))

    assert SECRET not in stored(database)
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert [delivery.payload for delivery in adapter.deliveries] == [{"card": SECRET}]
    assert SECRET not in stored(database)
    with database.begin() as session:
        (status,) = ob.status(session, "order:0")
        assert status.result == {"answer": SECRET}
        assert all_enqueued(session, outbox=ob)[0].payload == {"card": SECRET}
    assert json.loads(settlement_row(database, id).result).startswith("obx1:d1:")


def test_an_entry_with_an_ordering_key_and_many_at_once_are_encrypted(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        for number in range(5):
            ob.enqueue(
                session, "crm.upsert", {"card": SECRET}, parent=f"a:{number}", ordering_key="k" if number else None
            )

    assert {row.schema_version for row in database.entries} == {2}
    assert SECRET not in stored(database)
    adapter = answering(Delivered())
    run_once(database, ob, adapters={"crm": adapter})
    assert [delivery.payload for delivery in adapter.deliveries] == [{"card": SECRET}] * 5


def test_plain_and_encrypted_entries_are_sent_side_by_side(database: Database, ob: outbox.Outbox) -> None:
    plain = outbox_with(None)
    put_secret(database, plain)
    put_secret(database, ob)
    adapter = answering(Delivered({"id": 1}))

    assert run_once(database, ob, adapters={"crm": adapter}) == 2
    assert [delivery.payload for delivery in adapter.deliveries] == [{"card": SECRET}] * 2


def test_without_a_key_nothing_is_sent_and_the_reason_is_shown(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    id = put_secret(database, ob)
    keyless, adapter = outbox_with(None), answering(Delivered())
    put_secret(database, keyless)

    assert run_once(database, keyless, adapters={"crm": adapter}) == 1
    assert caplog.text.count("set OUTBOX_DATA_KEYS") == 1
    assert run_once(database, keyless, adapters={"crm": adapter}) == 0
    assert len(adapter.deliveries) == 1
    row = queue_row(database, id)
    assert (row.state, row.attempts) == ("pending", 0)
    assert "set OUTBOX_DATA_KEYS" in json.loads(row.outcome)["reason"]
    assert run_once(database, ob, adapters={"crm": adapter}) == 1


def swap(database: Database, first: UUID, second: UUID) -> None:
    by_id = {row.id: row.payload for row in database.entries}
    for to, source in ((first, second), (second, first)):
        database.execute(sa.update(TABLES.entry).where(TABLES.entry.c.id == to).values(payload=by_id[source]))


def truncate(database: Database, first: UUID, second: UUID) -> None:
    by_id = {row.id: bytes(row.payload) for row in database.entries}
    for id in (first, second):
        database.execute(sa.update(TABLES.entry).where(TABLES.entry.c.id == id).values(payload=by_id[id][:-9] + b'"'))


@pytest.mark.owner
@pytest.mark.parametrize("attack", [swap, truncate])
def test_a_changed_ciphertext_is_never_sent(database: Database, ob: outbox.Outbox, attack: Any) -> None:
    adapter = answering(Delivered())
    assert run_once(database, ob, adapters={"crm": adapter}) == 0  # a dispatcher has recorded the data key
    first, second = put_secret(database, ob), put_secret(database, ob)
    attack(database, first, second)

    for _ in range(3):
        assert run_once(database, ob, adapters={"crm": adapter}) == 0
        age(database, timedelta(minutes=2))
    assert adapter.deliveries == []
    for id in (first, second):
        row = queue_row(database, id)
        assert (row.state, row.attempts) == ("pending", 0)
        assert json.loads(row.outcome)["reason"].startswith("cannot be decrypted")


def test_a_process_with_another_key_sends_nothing(database: Database, ob: outbox.Outbox) -> None:
    id = put_secret(database, ob)
    adapter = answering(Delivered())

    assert run_once(database, outbox_with(D2), adapters={"crm": adapter}) == 0
    assert adapter.deliveries == []
    assert "d1" in json.loads(queue_row(database, id).outcome)["reason"]
    age(database, timedelta(minutes=1))
    assert run_once(database, outbox_with({**D2, **D1}), adapters={"crm": adapter}) == 1


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_process_with_other_bytes_under_a_key_id_does_not_start(
    database: Database, ob: outbox.Outbox, is_recorded: bool
) -> None:
    other, crm = outbox_with({"d1": bytes(32)}), {"crm": answering(Unknown("no answer"))}
    if is_recorded:
        run_once(database, ob, adapters=crm)
        with pytest.raises(outbox.ConfigurationError, match="data key 'd1' has other bytes"):
            other.check(database.engine)
    else:
        put_secret(database, ob)
    with pytest.raises(outbox.ConfigurationError, match="data key 'd1' has other bytes"):
        run_once(database, other, adapters=crm)

    assert crm["crm"].deliveries == []
    ob.check(database.engine)
    run_once(database, ob, adapters=crm)
    assert "data:d1" in {row.kid for row in database.rows(TABLES.kid)}
    assert D1["d1"].hex() not in stored(database)


def test_while_the_key_service_is_down_entries_wait_without_an_attempt(database: Database) -> None:
    service = FakeService()
    id = put_secret(database, outbox_with({"kms": service}))
    service.down = True
    adapter = answering(Delivered({"answer": SECRET}))
    late = outbox_with({"kms": service})
    for _ in range(3):
        assert run_once(database, late, adapters={"crm": adapter}) == 0
        age(database, timedelta(hours=1))
    assert adapter.deliveries == []
    row = queue_row(database, id)
    assert (row.state, row.attempts) == ("pending", 0)
    assert "key service 'kms'" in json.loads(row.outcome)["reason"]
    service.down = False

    assert run_once(database, outbox_with({"kms": service}), adapters={"crm": adapter}) == 1
    assert settlement_row(database, id).state == "delivered"
    assert SECRET not in stored(database)


def test_nothing_is_sent_whose_result_could_not_be_encrypted(database: Database) -> None:
    service, adapter = FakeService(down=True), answering(Delivered({"answer": SECRET}))
    plain = put_secret(database, outbox_with(None))
    late = outbox_with({"kms": service})

    assert run_once(database, late, adapters={"crm": adapter}) == 0
    assert (adapter.deliveries, queue_row(database, plain).attempts) == ([], 0)
    service.down = False
    age(database, timedelta(minutes=1))
    assert run_once(database, outbox_with({"kms": service}), adapters={"crm": adapter}) == 1
    assert json.loads(settlement_row(database, plain).result).startswith("obx1:kms:")


def test_a_callback_gets_both_in_plain_and_may_enqueue_more(database: Database, ob: outbox.Outbox) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append((settlement.entry.payload, settlement.result))
        if len(seen) == 1:
            raise RuntimeError("again")  # then the result waits in the queue
        ob.enqueue(session, "crm.next", {"card": SECRET})

    put_secret(database, ob)
    crm = {"crm": answering(Rejected("no", result={"answer": SECRET}))}
    run_once(database, ob, include=[effects], adapters=crm)
    assert SECRET not in stored(database)
    age(database, timedelta(hours=1))
    run_once(database, ob, include=[effects], adapters=crm)

    assert seen == [({"card": SECRET}, {"answer": SECRET})] * 2
    assert SECRET not in stored(database)
    assert {row.schema_version for row in database.entries} == {2}


def test_a_stored_result_without_its_key_is_not_settled(database: Database, ob: outbox.Outbox) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append(settlement.result)
        if len(seen) == 1:
            raise RuntimeError("again")

    id = put_one(database, outbox_with(None), payload={"card": SECRET})  # a plain payload, and an encrypted result
    crm = {"crm": answering(Delivered({"answer": SECRET}))}
    run_once(database, ob, include=[effects], adapters=crm)
    for keyless in (outbox_with(None), outbox_with(D2)):
        age(database, timedelta(hours=1))
        assert run_once(database, keyless, include=[effects], adapters=crm) == 0
        assert queue_row(database, id) is not None
    age(database, timedelta(hours=1))
    run_once(database, ob, include=[effects], adapters=crm)

    assert seen == [{"answer": SECRET}] * 2


def test_a_cancelled_entry_ends_although_its_key_is_lost(database: Database, ob: outbox.Outbox) -> None:
    effects, seen = Operations(), list[Any]()
    effects.on_settled("crm.upsert")(lambda session, settlement: seen.append(settlement.state))
    id = put_secret(database, ob)
    run_once(database, outbox_with(D2), include=[effects], adapters={"crm": answering(Delivered())})
    with database.owner() as connection:
        cancel(connection, TABLES, id, actor="ada", reason="its key is lost")
    age(database, timedelta(minutes=5))

    assert run_once(database, outbox_with(D2), include=[effects], adapters={"crm": answering(Delivered())}) == 1
    assert settlement_row(database, id).state == "cancelled"
    assert seen == ["cancelled"]


@pytest.mark.parametrize("verdict", ["happened", "did_not_happen"])
def test_an_uncertain_entry_ends_as_resolved_although_its_key_is_lost(
    database: Database, ob: outbox.Outbox, verdict: Any
) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append(settlement.state)
        if len(seen) == 1:
            raise RuntimeError("again")

    id = put_secret(database, ob)
    change(database, id, state="uncertain", maybe_sent=True)
    with database.owner() as connection:
        resolve(connection, TABLES, id, verdict, actor="ada", reason="the service says so")
    adapter = answering(Delivered())
    for _ in range(2):
        run_once(database, outbox_with(D2), include=[effects], adapters={"crm": adapter})
        age(database, timedelta(hours=1))

    assert (settlement_row(database, id).state, adapter.deliveries) == (seen[1], [])
    assert seen == [{"happened": "delivered", "did_not_happen": "failed"}[verdict]] * 2


def test_a_cancelled_entry_without_its_key_ends_after_its_callback_failed(
    database: Database, ob: outbox.Outbox
) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append(settlement.state)
        if len(seen) == 1:
            raise RuntimeError("again")

    id = put_secret(database, ob)
    with database.owner() as connection:
        cancel(connection, TABLES, id, actor="ada", reason="its key is lost")
    for _ in range(2):
        age(database, timedelta(hours=1))
        run_once(database, outbox_with(D2), include=[effects], adapters={"crm": answering(Delivered())})

    assert seen == ["cancelled"] * 2
    assert settlement_row(database, id).state == "cancelled"


def test_an_entry_with_a_lost_key_and_a_due_callback_ends_as_recorded(database: Database, ob: outbox.Outbox) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        seen.append((settlement.state, settlement.result))
        if len(seen) == 1:
            raise RuntimeError("again")

    id = put_secret(database, ob)
    crm = {"crm": answering(Delivered({"answer": SECRET}))}
    run_once(database, ob, include=[effects], adapters=crm)
    age(database, timedelta(hours=1))
    run_once(database, outbox_with(D2), include=[effects], adapters=crm)
    for verdict in ("did_not_happen", "send_again"):
        with database.owner() as connection, pytest.raises(DecisionRefused):
            resolve(connection, TABLES, id, verdict, actor="ada", reason="its key is lost")  # type: ignore[arg-type]
    with database.owner() as connection:
        resolve(connection, TABLES, id, "happened", actor="ada", reason="its key is lost")
    run_once(database, outbox_with(D2), include=[effects], adapters=crm)

    assert seen == [("delivered", {"answer": SECRET}), ("delivered", None)]
    assert (settlement_row(database, id).state, len(crm["crm"].deliveries)) == ("delivered", 1)


def test_a_readable_entry_that_waits_cannot_be_resolved(database: Database, ob: outbox.Outbox) -> None:
    id = put_secret(database, ob)
    run_once(database, ob, adapters={"crm": answering(Unknown("no answer"))})

    with database.owner() as connection, pytest.raises(DecisionRefused, match="only an uncertain entry"):
        resolve(connection, TABLES, id, "happened", actor="ada", reason="r")


def test_an_entry_that_waits_for_a_lookup_without_its_key_can_be_resolved(
    database: Database, ob: outbox.Outbox
) -> None:
    id = put_secret(database, ob)
    forgets = MemoryAdapter(lambda delivery: Unknown("no answer"), window=timedelta(minutes=10), find=True)
    run_once(database, ob, adapters={"crm": forgets})
    for _ in range(3):  # it waits for the lookup, and cannot be opened for it
        age(database, timedelta(hours=1))
        run_once(database, outbox_with(D2), adapters={"crm": forgets})
    row = queue_row(database, id)
    assert (row.state, set(json.loads(row.outcome)) >= {"lookup", "reason"}) == ("retry", True)
    with database.owner() as connection:
        resolve(connection, TABLES, id, "did_not_happen", actor="ada", reason="the service has no such record")
    run_once(database, outbox_with(D2), adapters={"crm": forgets})

    assert settlement_row(database, id).state == "failed"


def test_a_retried_entry_without_its_key_becomes_uncertain_in_time(database: Database, ob: outbox.Outbox) -> None:
    forgets = MemoryAdapter(lambda delivery: Unknown("no answer"), window=timedelta(minutes=10))
    id = put_secret(database, ob)
    run_once(database, ob, adapters={"crm": forgets})
    assert queue_row(database, id).state == "retry"
    age(database, timedelta(hours=1))

    run_once(database, outbox_with(D2), adapters={"crm": forgets})

    assert queue_row(database, id).state == "uncertain"  # an operator can resolve it
    assert len(forgets.deliveries) == 1


def test_an_unreadable_head_blocks_its_group_until_it_is_cancelled(database: Database, ob: outbox.Outbox) -> None:
    head = put_secret(database, ob, ordering_key="customer:7")
    put_one(database, outbox_with(D2), payload={"card": "next"}, ordering_key="customer:7")
    adapter = answering(Delivered())
    run_once(database, outbox_with(D2), adapters={"crm": adapter})
    assert adapter.deliveries == []

    with database.owner() as connection:
        cancel(connection, TABLES, head, actor="ada", reason="its key is lost")
    for _ in range(2):
        age(database, timedelta(minutes=5))
        run_once(database, outbox_with(D2), adapters={"crm": adapter})

    assert [delivery.payload for delivery in adapter.deliveries] == [{"card": "next"}]


@dataclass
class Card:
    number: str


def test_a_typed_effect_and_its_callback_read_encrypted_objects(database: Database, ob: outbox.Outbox) -> None:
    charge, effects, seen = outbox.Effect("crm.charge", Card, result=Card), Operations(), list[Any]()

    @effects.handles(charge)
    async def send(delivery: Any) -> Any:
        seen.append(delivery.payload)
        return Delivered(Card(SECRET))

    @effects.on_settled(charge)
    def settled(session: Any, settlement: Any) -> None:
        seen.append((settlement.entry.payload, settlement.result))

    with database.begin() as session:
        charge.enqueue(session, Card(SECRET), parent="order:1", outbox=ob)
    run_once(database, ob, include=[effects])

    assert seen == [Card(SECRET), (Card(SECRET), Card(SECRET))]
    assert SECRET not in stored(database)


def test_a_result_that_begins_as_an_encrypted_one_is_refused(database: Database) -> None:
    id = put_one(database, outbox_with(None))
    change(database, id, state="uncertain", maybe_sent=True)

    with database.owner() as connection, pytest.raises(outbox.InvalidValue, match="begins as an encrypted result"):
        resolve(connection, TABLES, id, "happened", actor="ada", reason="r", result="obx1:d1::AAAA")


def test_after_it_is_turned_off_old_values_are_read_and_new_ones_are_plain(
    database: Database, ob: outbox.Outbox
) -> None:
    put_secret(database, ob)
    off = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", encryption=Encryption(D1, encrypts=False))
    put_one(database, off, payload={"plain": 1})
    adapter = answering(Delivered({"id": "ch_1"}))

    assert run_once(database, off, adapters={"crm": adapter}) == 2
    assert [each.payload for each in sorted(adapter.deliveries, key=lambda each: "plain" in each.payload)] == [
        {"card": SECRET},
        {"plain": 1},
    ]
    assert sorted(row.schema_version for row in database.entries) == [1, 2]
    assert {row.result for row in database.rows(TABLES.settlement)} == {'{"id": "ch_1"}'}


@pytest.mark.owner
@pytest.mark.parametrize("keys", [D1, {"kms": FakeService()}], ids=["ring", "service"])
def test_a_damaged_envelope_does_not_stop_the_other_entries(database: Database, keys: Any) -> None:
    ob = outbox_with(keys)
    damaged, whole = put_secret(database, ob), put_secret(database, ob)
    (head,) = keys
    payload = f'"obx1:{head}:\xe9:AAAA"'.encode()
    database.execute(sa.update(TABLES.entry).where(TABLES.entry.c.id == damaged).values(payload=payload))
    adapter = answering(Delivered())

    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert settlement_row(database, whole).state == "delivered"
    assert "cannot be decrypted" in json.loads(queue_row(database, damaged).outcome)["reason"]
