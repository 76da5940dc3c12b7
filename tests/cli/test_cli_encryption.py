"""The commands with encrypted entries: keys are generated, counted and rotated, and a payload is shown only with its key."""

import json
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, refused, succeeded
from support.database import TABLES, Client, Database
from support.encrypted import D1, D1_TEXT, D2, D2_TEXT, SECRET, outbox_with, stored
from support.entries import change, put_one, queue_row, run_once, settlement_row

import outbox
from dispatchers import Delivered, Operations, Rejected
from dispatchers.adapters import MemoryAdapter
from outbox import migrations

BOTH = f"{D2_TEXT},{D1_TEXT}"

pytestmark = [pytest.mark.on_mariadb]


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox_with(D1)


def put_failed(database: Database, ob: outbox.Outbox) -> UUID:
    id = put_one(database, ob, payload={"card": SECRET})
    adapter = MemoryAdapter(lambda delivery: Rejected("no", result={"answer": SECRET}))
    run_once(database, ob, adapters={"crm": adapter})
    return id


def test_a_generated_data_key_encrypts() -> None:
    text = succeeded("keys", "generate", "--data").strip()

    assert text.startswith("d1:")
    assert outbox.Encryption.from_text(text).current == "d1"


def test_show_needs_the_key_and_the_flag_for_a_payload(database: Database, ob: outbox.Outbox) -> None:
    id = put_failed(database, ob)
    asked = ("show", str(id), "--payload", "--actor", "ada", "--reason", "ticket 7")

    plain = document("show", str(id), database=database, OUTBOX_DATA_KEYS=D1_TEXT)
    assert (plain["result"], SECRET in str(plain)) == ("encrypted with key d1", False)
    status, text = refused(*asked, database=database)
    assert "OUTBOX_DATA_KEYS" in text
    assert status != 0
    assert database.rows(TABLES.audit) == []
    assert document(*asked, database=database, OUTBOX_DATA_KEYS=D1_TEXT)["payload"] == {"card": SECRET}
    assert [row.action for row in database.rows(TABLES.audit)] == ["reveal_payload"]


def test_what_can_be_decrypted_is_revealed_beside_what_cannot(database: Database, ob: outbox.Outbox) -> None:
    from dispatchers.admin.decide.payloads import reveal

    id = put_one(database, ob, payload={"card": SECRET})
    adapter = MemoryAdapter(lambda delivery: Rejected("no", result={"answer": SECRET}))
    run_once(database, outbox_with({**D2, **D1}), adapters={"crm": adapter})
    with database.owner() as connection:
        given = {"actor": "ada", "reason": "ticket 7", "encryption": outbox.Encryption(D2)}
        seen = reveal(connection, TABLES, id, **given)

    assert (seen.result, seen.payload) == (
        {"answer": SECRET},
        "cannot be decrypted: this process has no data key 'd1', only d2",
    )


def test_doctor_names_a_data_key_with_other_bytes(database: Database, ob: outbox.Outbox) -> None:
    run_once(database, ob, adapters={"crm": MemoryAdapter()})

    result = command("doctor", "--json", database=database, OUTBOX_DATA_KEYS=f"d1:{D2_TEXT[3:]}")
    texts = [each["text"] for each in json.loads(result.stdout)["findings"] if each["check"] == "encryption"]
    assert [text.startswith("data key 'd1' has other bytes") for text in texts] == [True]


def test_the_keys_of_a_key_service_come_from_a_module(database: Database, ob: outbox.Outbox, monkeypatch: Any) -> None:
    import support.encrypted

    monkeypatch.setattr(support.encrypted, "shown_keys", outbox.Encryption(D1), raising=False)
    id = put_failed(database, ob)

    shown = document(
        *("show", str(id), "--payload", "--actor", "ada", "--reason", "ticket 7"),
        database=database,
        OUTBOX_ENCRYPTION="support.encrypted:shown_keys",
    )

    assert shown["payload"] == {"card": SECRET}


def test_an_encrypted_entry_is_asked_for_again_with_its_key_only(database: Database, ob: outbox.Outbox) -> None:
    id = put_failed(database, ob)
    asked = ("again", str(id), "--actor", "ada", "--reason", "mended")
    given = {"OUTBOX_SECRET": SECRET_TEXT, "OUTBOX_ENV": "test"}

    status, text = refused(*asked, database=database, **given)
    assert (status != 0, "OUTBOX_DATA_KEYS" in text) == (True, True)
    succeeded(*asked, database=database, **given, OUTBOX_DATA_KEYS=BOTH)
    adapter = MemoryAdapter(lambda delivery: Delivered())
    run_once(database, outbox_with({**D2, **D1}), adapters={"crm": adapter})

    assert [delivery.payload for delivery in adapter.deliveries] == [{"card": SECRET}]
    assert SECRET not in stored(database)


def test_many_are_asked_for_again_although_one_has_no_key(database: Database, ob: outbox.Outbox) -> None:
    for each in (ob, outbox_with(D2), ob):
        put_failed(database, each)
    selected = ("again", "--state", "failed", "--yes", "--actor", "ada", "--reason", "mended")
    given = {"OUTBOX_SECRET": SECRET_TEXT, "OUTBOX_ENV": "test"}

    result = command(*selected, database=database, **given, OUTBOX_DATA_KEYS=D1_TEXT)

    assert "no data key 'd2'" in result.output
    assert len(database.entries) == 5


def test_an_operators_answer_of_an_encrypted_entry_is_encrypted(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, payload={"card": SECRET})
    change(database, id, state="uncertain", maybe_sent=True)
    asked = ("resolve", str(id), "--happened", "--result", json.dumps({"a": SECRET}), "--actor", "ada", "--reason", "r")

    _, text = refused(*asked, "--yes", database=database)
    assert "would be stored unencrypted" in text
    _, text = refused(*asked, "--propose", database=database, OUTBOX_DATA_KEYS=D1_TEXT)
    assert "would be stored unencrypted" in text
    succeeded(*asked, "--yes", database=database, OUTBOX_DATA_KEYS=D1_TEXT)
    assert SECRET not in stored(database)
    run_once(database, ob, adapters={"crm": MemoryAdapter(lambda delivery: Delivered())})

    assert SECRET not in stored(database)
    with database.begin() as session:
        assert ob.status(session, "order:0")[0].result == {"a": SECRET}


def test_a_search_in_encrypted_payloads_is_refused(database: Database, ob: outbox.Outbox) -> None:
    plain = put_one(database, outbox_with(None), "mail.send", payload={"card": SECRET})
    put_one(database, ob, payload={"card": SECRET})

    _, text = refused("list", "--payload", f"card={SECRET}", database=database)
    assert "payloads among these entries are encrypted" in text
    found = document("list", "--payload", f"card={SECRET}", "--operation", "mail.send", database=database)
    assert [entry["id"] for entry in found["entries"]] == [str(plain)]


def test_no_part_of_a_ciphertext_finds_an_entry(database: Database, ob: outbox.Outbox) -> None:
    id = put_failed(database, ob)
    envelope = json.loads(settlement_row(database, id).result)

    for part in ("obx1", envelope[-20:], SECRET):
        assert command("list", part, database=database).exit_code != 0


def test_doctor_counts_what_cannot_be_decrypted(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob)
    for keys in (None, D2):
        run_once(database, outbox_with(keys), adapters={"crm": MemoryAdapter(lambda delivery: Delivered())})
        found = json.loads(command("doctor", "--json", database=database).stdout)["findings"]
        assert [each["text"] for each in found if each["check"] == "encryption"] == ["1 entries cannot be decrypted"]


# --- rotation


def fill(database: Database, ob: outbox.Outbox) -> None:
    """A payload, a result, an answer, and a result that waits for its callback."""
    put_failed(database, ob)
    Client(database, ob, is_async=False).request(
        lambda session, claim: claim.respond(200, {"answer": SECRET}, headers={"X-A": SECRET})  # type: ignore[arg-type]
    )
    effects = Operations()

    @effects.on_settled("mail.send")
    def failing(session: Any, settlement: Any) -> None:
        raise RuntimeError

    put_one(database, ob, "mail.send", payload={"card": SECRET})
    adapter = MemoryAdapter(lambda delivery: Delivered({"answer": SECRET}))
    run_once(database, ob, include=[effects], adapters={"mail": adapter})


ALL = {"payloads": 2, "results": 1, "answers": 1, "waiting results": 1}


@pytest.mark.owner
def test_a_rotation_ends_with_nothing_under_the_old_key(database: Database, ob: outbox.Outbox) -> None:
    fill(database, ob)
    listed = document("keys", "list", database=database, OUTBOX_DATA_KEYS=D2_TEXT)["keys"]
    assert listed == [{"key": "d1", **ALL, "known": False}]

    for again in (5, 0):  # the second run has nothing to do
        result = command("keys", "reencrypt", "--json", database=database, OUTBOX_DATA_KEYS=BOTH)
        assert sum(json.loads(result.stdout)["again"].values()) == again, result.output

    assert document("keys", "list", database=database, OUTBOX_DATA_KEYS=D2_TEXT)["keys"] == [
        {"key": "d2", **ALL, "known": True}
    ]
    only_new = outbox_with(D2)
    with database.begin() as session:
        assert only_new.status(session, "order:0")[0].result == {"answer": SECRET}
    request = Client(database, only_new, is_async=False).request(lambda session, claim: None)
    assert (request.json(), request.headers["X-A"]) == ({"answer": SECRET}, SECRET)
    seen = list[Any]()
    effects = Operations()
    effects.on_settled("mail.send")(
        lambda session, settlement: seen.append((settlement.entry.payload, settlement.result))
    )
    change(
        database,
        next(row.id for row in database.queue),
        due_at=sa.select(TABLES.entry.c.created_at).limit(1).scalar_subquery(),
    )
    run_once(database, only_new, include=[effects], adapters={"mail": MemoryAdapter()})
    assert seen == [({"card": SECRET}, {"answer": SECRET})]


@pytest.mark.owner
def test_what_was_stored_before_encryption_is_encrypted_on_request(database: Database, ob: outbox.Outbox) -> None:
    fill(database, outbox_with(None))
    assert SECRET in stored(database)
    command("keys", "reencrypt", database=database, OUTBOX_DATA_KEYS=D1_TEXT)
    assert SECRET in stored(database)

    command("keys", "reencrypt", "--plain", database=database, OUTBOX_DATA_KEYS=D1_TEXT)

    assert SECRET not in stored(database)
    assert document("keys", "list", database=database)["keys"] == [{"key": "d1", **ALL, "known": False}]


@pytest.mark.owner
def test_a_lost_key_leaves_the_values_as_they_are(database: Database, ob: outbox.Outbox) -> None:
    fill(database, ob)
    before = stored(database)

    result = command("keys", "reencrypt", database=database, OUTBOX_DATA_KEYS=D2_TEXT)

    assert result.exit_code != 0
    assert "5 values cannot be decrypted: keep every key" in result.stderr
    assert stored(database) == before


@pytest.mark.owner
def test_a_rotation_goes_through_more_than_one_page(sqlite: Database, ob: outbox.Outbox, monkeypatch: Any) -> None:
    from dispatchers.maintenance import reencryption

    monkeypatch.setattr(reencryption, "PAGE_ROWS", 2)
    for _ in range(5):
        put_one(sqlite, ob)

    result = command("keys", "reencrypt", "--json", database=sqlite, OUTBOX_DATA_KEYS=BOTH)

    assert json.loads(result.stdout)["again"]["payloads"] == 5
    assert {bytes(row.payload)[6:8] for row in sqlite.entries} == {b"d2"}


@pytest.mark.owner
def test_a_rotation_reaches_the_bodies_in_partitions(postgresql: Database, ob: outbox.Outbox) -> None:
    migrations.partition(postgresql.engine)
    fill(postgresql, ob)
    command("keys", "reencrypt", database=postgresql, OUTBOX_DATA_KEYS=BOTH)

    with postgresql.owner() as connection:
        bodies = connection.execute(sa.text("SELECT body FROM outbox_body")).scalars().all()
    assert [bytes(body)[:8] for body in bodies] == [b"obx1:d2:"]
    request = Client(postgresql, outbox_with(D2), is_async=False).request(lambda session, claim: None)
    assert request.json() == {"answer": SECRET}


@pytest.mark.owner
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_no_newer_answer_is_replaced_by_an_older_one(postgresql: Database, is_partitioned: bool) -> None:
    from dispatchers.maintenance import reencryption

    if is_partitioned:
        migrations.partition(postgresql.engine)
    Client(postgresql, outbox_with(None), is_async=False).request(lambda session, claim: claim.respond(200, {"n": 1}))  # type: ignore[arg-type]
    with postgresql.owner() as connection:
        ((value,), _) = reencryption._PAGES["answers"](connection, TABLES, None)
        connection.execute(sa.update(TABLES.record).values(body=b'{"n": 2}'))  # with the same headers, on the same day
        assert not value.change(connection, outbox.Encryption(D1))

    assert Client(postgresql, outbox_with(D1), is_async=False).request(lambda session, claim: None).json() == {"n": 2}


def test_the_reason_of_a_waiting_entry_names_its_key(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    run_once(database, outbox_with(D2), adapters={"crm": MemoryAdapter(lambda delivery: Delivered())})

    assert "d1" in document("show", str(id), database=database)["reason"]
    assert queue_row(database, id).attempts == 0
