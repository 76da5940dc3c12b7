"""Typed effects and `enqueue_many` on a database: what is stored, and what is refused before anything is kept."""

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.database import Database, statements_of

import outbox
from outbox import Effect
from outbox.errors import DuplicateEntry, InvalidPayload, InvalidValue, NotSerializable, ParentRequired
from outbox.testing import assert_enqueued, assert_not_enqueued

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]


@dataclass
class Receipt:
    to: str
    amount: int = 0


class Line(msgspec.Struct):
    number: int


receipt = Effect("receipts.send", Receipt)
receipt_2 = Effect("receipts.send", Receipt, version=2)


def entries(database: Database) -> list[dict[str, Any]]:
    columns = ("operation", "parent", "discriminator", "destination", "ordering_key", "options")
    return [
        {name: getattr(row, name) for name in columns} | {"payload": json.loads(row.payload)}
        for row in sorted(database.entries, key=lambda row: (row.parent, row.discriminator))
    ]


def test_a_typed_payload_is_stored_as_a_plain_one_is(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        typed = receipt.enqueue(session, Receipt("ada", 5), parent="order:1", outbox=ob)
        plain = ob.enqueue(session, "receipts.send", {"to": "ada", "amount": 5}, parent="order:2")

    first, second = sorted(database.entries, key=lambda row: row.parent)
    assert (
        (bytes(first.payload), first.options)
        == (bytes(second.payload), second.options)
        == (bytes(second.payload), "{}")
    )
    assert typed.child_key == ob.child_key("order:1", "receipts.send") != plain.child_key


def test_the_version_is_stored_with_the_options_and_changes_no_key(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        entry = receipt_2.enqueue(session, Receipt("ada"), parent="order:1", options={"account": "acct_1"}, outbox=ob)

    (stored,) = entries(database)
    assert json.loads(stored["options"]) == {"account": "acct_1", "effect_version": 2}
    assert stored["destination"] == "receipts:acct_1"
    assert entry.child_key == ob.child_key("order:1", "receipts.send")


def test_an_app_cannot_give_the_version_itself(sqlite: Database, ob: outbox.Outbox) -> None:
    with sqlite.session() as session, pytest.raises(InvalidValue, match="option 'effect_version': is unknown"):
        receipt.enqueue(session, Receipt("ada"), parent="order:1", options={"effect_version": 3}, outbox=ob)
    with pytest.raises(InvalidValue, match="option 'effect_version': is reserved"):
        outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", options={"effect_version"})


def test_a_typed_enqueue_does_no_work_in_the_database(database: Database, ob: outbox.Outbox) -> None:
    with statements_of(database.engine) as plain, database.begin() as session:
        ob.enqueue(session, "receipts.send", {"to": "ada", "amount": 0}, parent="order:1")
    with statements_of(database.engine) as typed, database.begin() as session:
        receipt.enqueue(session, Receipt("ada"), parent="order:2", outbox=ob)

    assert typed == plain[-len(typed) :]  # a new connection is asked for its settings first


def test_an_async_session_enqueues_without_an_await(database: Database, ob: outbox.Outbox) -> None:
    async def commit() -> None:
        async with AsyncSession(database.async_engine()) as session, session.begin():
            receipt.enqueue(session, Receipt("ada"), parent="order:1", outbox=ob)
            receipt.enqueue_many(session, [Receipt("b"), Receipt("c")], parent=lambda each: each.to, outbox=ob)
            await assert_enqueued(session, receipt, Receipt("b"), parent="b", outbox=ob)

    asyncio.run(commit())

    assert [each["payload"]["to"] for each in entries(database)] == ["b", "c", "ada"]


def test_a_refused_payload_leaves_the_session_as_it_was(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        with pytest.raises(InvalidPayload, match=r"^receipts.send: payload.amount: must be a valid int; "):
            receipt.enqueue(session, Receipt("ada", "5"), parent="order:1", outbox=ob)  # type: ignore[arg-type]
        receipt.enqueue(session, Receipt("ada", 5), parent="order:1", outbox=ob)

    assert len(database.entries) == 1


def test_a_typed_payload_has_the_limits_of_a_plain_one(sqlite: Database) -> None:
    small = outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", max_payload_bytes=30)
    with sqlite.session() as session, pytest.raises(NotSerializable, match="the payload has 32 bytes of JSON"):
        receipt.enqueue(session, Receipt("a" * 12), parent="order:1", outbox=small)


class Refusing:
    def check(self, operation: str, payload: Any) -> None:
        raise InvalidValue("operation", operation, f"gets {type(payload).__name__}")


def test_a_declared_service_checks_the_json_data(sqlite: Database) -> None:
    declared = outbox.Outbox(outbox.Keyring({"k1": bytes(32)}), env="test", services={"receipts": Refusing()})
    with sqlite.session() as session, pytest.raises(InvalidValue, match="gets dict"):
        receipt.enqueue(session, Receipt("a"), parent="order:1", outbox=declared)


# --- many


def test_many_take_a_value_for_all_or_a_function_of_each(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        kept = ob.enqueue_many(
            session,
            "mail.send",
            [{"to": "b", "vip": True}, {"to": "a", "vip": False}],
            parent="order:1",
            discriminator=lambda mail: mail["to"],
            destination=lambda mail: "mail:vip" if mail["vip"] else None,
            ordering_key=lambda mail: f"customer:{mail['to']}",
            options={"account": "acct_1"},
            due=timedelta(hours=1),
        )

    assert [entry.child_key for entry in kept] == [ob.child_key("order:1", "mail.send", each) for each in "ba"]
    found = entries(database)
    assert [each["discriminator"] for each in found] == ["a", "b"]
    assert [each["destination"] for each in found] == ["mail:acct_1", "mail:vip"]
    assert [each["ordering_key"] for each in found] == ["customer:a", "customer:b"]


def test_many_are_written_with_one_statement_as_single_ones_are(database: Database, ob: outbox.Outbox) -> None:
    lines = Effect("lines.send", Line)
    with statements_of(database.engine) as single, database.begin() as session:
        for number in range(5):
            lines.enqueue(session, Line(number), parent=f"line:{number}", outbox=ob)
    with statements_of(database.engine) as many, database.begin() as session:
        lines.enqueue_many(session, map(Line, range(5, 10)), parent=lambda line: f"line:{line.number}", outbox=ob)

    assert many == single[-len(many) :]  # a new connection is asked for its settings first
    assert len(database.entries) == 10


def test_many_inside_a_claim_have_its_parent(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session, ob.idempotent(session, "key-0001", scope="ada", content=b"") as claim:
        receipt.enqueue_many(session, [Receipt("a"), Receipt("b")], discriminator=lambda each: each.to, outbox=ob)
        claim.respond(201)

    assert [each["parent"] for each in entries(database)] == ["key-0001"] * 2


REFUSED: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (
        [Receipt("a"), Receipt(5)],
        {},
        InvalidPayload,
        r"^payloads\[1\]: receipts.send: payload.to: must be a valid string",
    ),  # type: ignore[arg-type]
    (
        [Receipt("a"), Receipt("a")],
        {},
        DuplicateEntry,
        r"^payloads\[1\]: .* was enqueued before, by payloads\[0\]: give",
    ),
    ([Receipt("a"), Receipt("x")], {}, DuplicateEntry, r"^payloads\[1\]: .* was enqueued before: give another"),
    ([Receipt("a"), Receipt("")], {}, InvalidValue, r"^payloads\[1\]: parent ''"),
    ([Receipt("a")], {"parent": None}, ParentRequired, r"^payloads\[0\]: enqueue needs parent="),
    ([Receipt("a")], {"due": lambda each: timedelta(-1)}, InvalidValue, r"^payloads\[0\]: due"),
    ([Receipt("a")], {"if_exists": "maybe"}, InvalidValue, "if_exists 'maybe'"),
    ({"a": Receipt("a")}, {}, InvalidValue, "payloads <class 'dict'>: must be a list of payloads"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("payloads", "settings", "error", "says"), REFUSED, ids=lambda each: str(each)[:30])
def test_many_are_kept_all_or_none(
    sqlite: Database, ob: outbox.Outbox, payloads: Any, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    given: dict[str, Any] = {"parent": lambda each: each.to, "outbox": ob} | settings
    with sqlite.begin() as session:
        receipt.enqueue(session, Receipt("x"), parent="x", outbox=ob)
        with pytest.raises(error, match=says):
            receipt.enqueue_many(session, payloads, **given)

    assert [each["parent"] for each in entries(sqlite)] == ["x"]


def test_many_that_may_exist_keep_the_first(database: Database, ob: outbox.Outbox) -> None:
    with database.begin() as session:
        first, second, other = ob.enqueue_many(
            session, "mail.send", ["a", "a", "b"], parent=lambda mail: mail, if_exists="ignore"
        )
    with database.begin() as session:
        ob.enqueue_many(session, "mail.send", ["c", "b"], parent=lambda mail: mail, if_exists="ignore")

    assert first is second
    assert first != other
    assert [each["parent"] for each in entries(database)] == ["a", "b", "c"]


# --- the tools for tests


def test_assertions_take_effects_and_objects(sqlite: Database, ob: outbox.Outbox) -> None:
    with Session(sqlite.engine) as session:
        assert_not_enqueued(session, receipt, outbox=ob)
        receipt.enqueue(session, Receipt("ada", 5), parent="order:1", outbox=ob)

        assert_enqueued(session, receipt, Receipt("ada", 5), outbox=ob)
        assert_enqueued(session, receipt, {"amount": 5}, parent="order:1", outbox=ob)
        assert_not_enqueued(session, receipt, Receipt("ada"), outbox=ob)
        with pytest.raises(AssertionError, match=r"^1 entries are 'receipts\.send', not 2"):
            assert_enqueued(session, receipt, count=2, outbox=ob)
        with pytest.raises(InvalidPayload):
            assert_enqueued(session, receipt, Line(1), outbox=ob)
