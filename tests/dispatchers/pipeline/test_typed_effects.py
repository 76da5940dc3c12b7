"""Typed effects in a dispatcher: functions get objects, results are typed, and what cannot be read waits and is never sent."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support import doctor
from support.cli_runner import document, succeeded
from support.database import Database
from support.entries import age, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers import (
    Absent,
    Deferred,
    Delivered,
    Delivery,
    Dispatcher,
    Finding,
    Found,
    Operations,
    Rejected,
    Settlement,
    Unknown,
)
from dispatchers.adapters import MemoryAdapter
from dispatchers.testing import drain
from outbox import Effect
from outbox.errors import ConfigurationError

pytestmark = pytest.mark.on_mariadb

DAY = timedelta(days=1)


@dataclass
class Receipt:
    to: str
    amount: Decimal = Decimal(0)


@dataclass
class NewReceipt:
    """A receipt of a later release."""

    email: str
    cc: str | None = None


class Charge(msgspec.Struct):
    id: str
    fee: Decimal


receipt = Effect("receipts.send", Receipt)
charge = Effect("receipts.send", Receipt, result=Charge)
receipt_2 = Effect(
    "receipts.send", NewReceipt, version=2, upcasters={1: lambda data: {"email": data["to"], "cc": data["amount"]}}
)


def handling(effect: Effect[Any, Any], answer: Callable[[Delivery[Any]], Any], **settings: Any) -> Operations:
    effects = Operations()
    effects.handles(effect, **settings)(answer)
    return effects


class Sent:
    """A function that keeps what it got."""

    def __init__(self, *answers: Any) -> None:
        self.got: list[Any] = []
        self._answers = list(answers)

    def __call__(self, delivery: Delivery[Any]) -> Any:
        self.got.append(delivery.payload)
        return self._answers.pop(0) if self._answers else Delivered()


def enqueue(database: Database, ob: outbox.Outbox, effect: Effect[Any, Any], payload: Any, **settings: Any) -> UUID:
    with database.begin() as session:
        return effect.enqueue(session, payload, **{"parent": "order:1", "outbox": ob} | settings).id


# --- what the functions get


@pytest.mark.parametrize("is_async", [False, True])
def test_the_function_gets_the_object_and_the_key(database: Database, ob: outbox.Outbox, is_async: bool) -> None:
    got: list[Delivery[Receipt]] = []

    def send(delivery: Delivery[Receipt]) -> Delivered:
        got.append(delivery)
        return Delivered({"id": delivery.payload.to})

    async def send_async(delivery: Delivery[Receipt]) -> Delivered:
        return send(delivery)

    id = enqueue(database, ob, receipt, Receipt("ada", Decimal("1.10")), options={"account": "acct_1"})

    assert run_once(database, ob, include=[handling(receipt, send_async if is_async else send)]) == 1
    (delivery,) = got
    assert delivery.payload == Receipt("ada", Decimal("1.10"))
    assert (delivery.payload_json, dict(delivery.options)) == (b'{"to":"ada","amount":"1.10"}', {"account": "acct_1"})
    assert delivery.key == ob.child_key("order:1", "receipts.send")
    assert settlement_row(database, id).result == '{"id": "ada"}'


def test_an_effect_serves_its_name_and_none_below(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, "receipts.send.later", payload={"to": "ada"})

    assert run_once(database, ob, include=[handling(receipt, Sent())]) == 0
    assert "did you mean 'receipts.send'?" in document("show", str(id), database=database)["reason"]


def test_a_plain_entry_is_read_as_the_effects_type(database: Database, ob: outbox.Outbox) -> None:
    sent = Sent()
    put_one(database, ob, "receipts.send", payload={"amount": 5, "to": "ada"})

    run_once(database, ob, include=[handling(receipt, sent)])

    assert sent.got == [Receipt("ada", Decimal(5))]


def test_a_typed_entry_goes_to_any_adapter_as_json(database: Database, ob: outbox.Outbox) -> None:
    adapter = MemoryAdapter()
    enqueue(database, ob, receipt, Receipt("ada"))

    assert run_once(database, ob, adapters={"receipts": adapter}) == 1
    assert adapter.deliveries[0].payload == {"to": "ada", "amount": "0"}


def test_the_status_lookup_gets_the_object_too(database: Database, ob: outbox.Outbox) -> None:
    looked_up: list[Any] = []

    def find(delivery: Delivery[Receipt]) -> Finding:
        looked_up.append(delivery.payload)
        return Found(Charge("ch_1", Decimal("0.30")))

    id = enqueue(database, ob, charge, Receipt("ada"))
    effects = handling(charge, Sent(Unknown("no answer")), find=find)

    run_once(database, ob, include=[effects])
    age(database, timedelta(hours=1))
    assert run_once(database, ob, include=[effects]) == 1
    assert looked_up == [Receipt("ada")]
    assert settlement_row(database, id).result == '{"id": "ch_1", "fee": "0.30"}'


def test_exceptions_after_which_nothing_was_sent_are_declared_as_usual(database: Database, ob: outbox.Outbox) -> None:
    def send(delivery: Delivery[Receipt]) -> Delivered:
        raise ConnectionRefusedError

    id = enqueue(database, ob, receipt, Receipt("ada"))
    run_once(database, ob, include=[handling(receipt, send, deferred_on=(ConnectionRefusedError,))])

    assert queue_row(database, id).attempts == 0


@pytest.mark.parametrize(
    ("register", "error", "says"),
    [
        (
            lambda effects: effects.handles("receipts.send"),
            ConfigurationError,
            "handles takes an outbox.Effect, not 'r",
        ),
        (
            lambda effects: effects.handles(receipt, windw=DAY),
            TypeError,
            "got an unexpected keyword argument 'windw'",
        ),
        (lambda effects: effects.operation("a.b", windw=DAY), TypeError, "got an unexpected keyword argument 'windw'"),
        (
            lambda effects: effects.handles(receipt)(None),
            ConfigurationError,
            "registers a function, async or sync, not None",
        ),
        (
            lambda effects: (effects.operation("receipts.send")(Sent()), effects.handles(receipt)),
            ConfigurationError,
            "operation 'receipts.send' is registered twice",
        ),
    ],
)
def test_a_wrong_registration_is_refused(register: Callable[[Operations], Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        register(Operations())


def test_an_encrypted_payload_is_read_as_the_effects_type(database: Database, ob: outbox.Outbox) -> None:
    sealing = outbox.Outbox(
        ob.configuration.keyring, env="test", encryption=outbox.Encryption({"d1": bytes(range(32))})
    )
    sent = Sent()
    enqueue(database, sealing, receipt_2, NewReceipt("ada", "bob"))

    assert b"ada" not in bytes(database.entries[0].payload)
    assert run_once(database, sealing, include=[handling(receipt_2, sent)]) == 1
    assert sent.got == [NewReceipt("ada", "bob")]


# --- results and callbacks


@pytest.mark.parametrize("is_async", [False, True])
def test_the_callback_gets_the_typed_payload_and_result(database: Database, ob: outbox.Outbox, is_async: bool) -> None:
    got: list[Settlement[Receipt, Charge]] = []
    effects = handling(charge, Sent(Delivered(Charge("ch_1", Decimal("0.30")))))
    if is_async:

        @effects.on_settled(charge)
        async def charged_async(session: AsyncSession, settlement: Settlement[Receipt, Charge]) -> None:
            got.append(settlement)
    else:

        @effects.on_settled(charge)
        def charged(session: Session, settlement: Settlement[Receipt, Charge]) -> None:
            got.append(settlement)

    enqueue(database, ob, charge, Receipt("ada"))
    engine = database.dispatchers_async_engine() if is_async else database

    assert run_once(engine, ob, include=[effects]) == 1
    (settlement,) = got
    assert settlement.entry.payload == Receipt("ada")
    assert settlement.result == Charge("ch_1", Decimal("0.30"))
    assert settlement.stored_result == {"id": "ch_1", "fee": "0.30"}


def test_a_failed_effect_has_no_typed_result(database: Database, ob: outbox.Outbox) -> None:
    got: list[Any] = []
    effects = handling(charge, Sent(Rejected("no", result={"code": "declined"})))
    effects.on_settled(charge)(lambda session, settlement: got.append((settlement.result, settlement.stored_result)))
    enqueue(database, ob, charge, Receipt("ada"))

    run_once(database, ob, include=[effects])

    assert got == [(None, {"code": "declined"})]


@pytest.mark.parametrize("result", [Charge("ch_1", "secret"), {"id": "secret"}, Receipt("secret")])  # type: ignore[arg-type]
def test_a_result_of_another_type_is_logged_and_the_entry_delivered(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    got: list[Any] = []
    effects = handling(charge, Sent(Delivered(result)))
    effects.on_settled(charge)(lambda session, settlement: got.append(settlement.result))
    id = enqueue(database, ob, charge, Receipt("ada"))

    assert run_once(database, ob, include=[effects]) == 1
    assert settlement_row(database, id).state == "delivered"
    assert settlement_row(database, id).result == f'{{"unstorable": "{type(result).__name__}"}}'
    assert got == [None]
    assert f"entry {id} is delivered, but its result is not stored: receipts.send: result" in caplog.text
    assert "secret" not in caplog.text


def test_a_payload_that_a_callback_cannot_read_is_not_sent_again(database: Database, ob: outbox.Outbox) -> None:
    """The older process sent it, and has stored the outcome; the newer callback waits for a release that reads the payload."""
    sent = Sent(Delivered({"id": "ch_1"}))
    sending = handling(receipt, sent)
    sending.on_settled(Effect("receipts.send", NewReceipt))(lambda session, settlement: settlement.entry.payload)
    id = enqueue(database, ob, receipt, Receipt("ada"))

    run_once(database, ob, include=[sending])

    assert "its callback raised InvalidPayload" in document("show", str(id), database=database)["reason"]
    mended = handling(receipt, sent)
    mended.on_settled(receipt)(lambda session, settlement: settlement.entry.payload)
    age(database, timedelta(hours=1))
    assert run_once(database, ob, include=[mended]) == 1
    assert len(sent.got) == 1


# --- two deploys


def test_what_cannot_be_read_waits_until_a_process_reads_it(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The app is deployed first: the dispatcher does not know the new version."""
    caplog.set_level(logging.WARNING)
    old, new = Sent(), Sent()
    id = enqueue(database, ob, receipt_2, NewReceipt("ada", "bob"))
    why = "receipts.send: payload: version 2 is stored, and this process reads versions up to 1"

    assert run_once(database, ob, include=[handling(receipt, old)]) == 0

    row = queue_row(database, id)
    assert (row.state, row.attempts, row.deliveries, row.lease_token) == ("pending", 0, 0, None)
    assert document("show", str(id), database=database)["reason"] == why
    assert f"entry {id} (receipts.send) waits: {why}" in caplog.text
    age(database, timedelta(minutes=1))
    assert run_once(database, ob, include=[handling(receipt_2, new)]) == 1
    assert (old.got, new.got) == ([], [NewReceipt("ada", "bob")])
    assert "payload version" in succeeded("show", str(id), database=database)


def test_a_newer_dispatcher_reads_what_the_older_app_enqueues(database: Database, ob: outbox.Outbox) -> None:
    sent = Sent()
    enqueue(database, ob, receipt, Receipt("ada", Decimal(5)))

    assert run_once(database, ob, include=[handling(receipt_2, sent)]) == 1
    assert sent.got == [NewReceipt("ada", "5")]


def test_a_new_field_is_not_lost_in_an_older_dispatcher(database: Database, ob: outbox.Outbox) -> None:
    @dataclass
    class WithCopy(Receipt):
        cc: str = ""

    sent = Sent()
    id = enqueue(database, ob, Effect("receipts.send", WithCopy), WithCopy("ada", cc="bob"))

    assert run_once(database, ob, include=[handling(receipt, sent)]) == 0
    assert (sent.got, state(database, id)) == ([], "pending")
    assert "payload.cc: is not a field of this type" in document("show", str(id), database=database)["reason"]


@pytest.mark.parametrize("serving", ["operation", "adapter"])
def test_a_version_waits_where_nothing_handles_the_effect(database: Database, ob: outbox.Outbox, serving: str) -> None:
    plain, adapter = Operations(), MemoryAdapter()
    plain.operation("receipts")(Sent())
    served: Any = {"include": [plain]} if serving == "operation" else {"adapters": {"receipts": adapter}}
    id = enqueue(database, ob, receipt_2, NewReceipt("ada"))

    assert run_once(database, ob, **served) == 0
    assert "was not registered with `handles`" in document("show", str(id), database=database)["reason"]


def test_others_of_the_operation_are_sent_meanwhile(database: Database, ob: outbox.Outbox) -> None:
    sent = Sent()
    for number in range(30):
        put_one(database, ob, "receipts.send", payload={"to": 5})
        enqueue(database, ob, receipt, Receipt(str(number)), parent=f"order:x{number}")

    assert run_once(database, ob, include=[handling(receipt, sent)]) == 30
    assert {each.to for each in sent.got} == set(map(str, range(30)))


def test_a_group_waits_for_its_unread_entry(database: Database, ob: outbox.Outbox) -> None:
    sent = Sent()
    put_one(database, ob, "receipts.send", payload={"to": 5}, ordering_key="customer:1")
    enqueue(database, ob, receipt, Receipt("b"), parent="order:2", ordering_key="customer:1")

    assert run_once(database, ob, include=[handling(receipt, sent)]) == 0
    age(database, timedelta(minutes=1))
    reading = handling(Effect("receipts.send", dict), sent)  # type: ignore[type-arg]
    assert run_once(database, ob, include=[reading]) == 2
    assert sent.got == [{"to": 5}, {"to": "b", "amount": "0"}]


def test_an_entry_in_doubt_waits_but_not_beyond_the_window(database: Database, ob: outbox.Outbox) -> None:
    id = enqueue(database, ob, receipt, Receipt("ada"))
    run_once(database, ob, include=[handling(receipt, Sent(Unknown("no answer")), window=DAY)])
    age(database, timedelta(hours=1))
    new = Effect("receipts.send", NewReceipt)

    assert run_once(database, ob, include=[handling(new, Sent(), window=DAY)]) == 0
    assert queue_row(database, id).state == "retry"
    assert "payload.email: is required" in document("show", str(id), database=database)["reason"]
    age(database, DAY)
    run_once(database, ob, include=[handling(new, Sent(), window=DAY)])
    assert queue_row(database, id).state == "uncertain"


def test_an_unread_entry_can_be_cancelled(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, "receipts.send", payload={"to": 5})
    effects = handling(receipt, Sent())
    run_once(database, ob, include=[effects])

    succeeded("cancel", str(id), "--reason", "a slip", database=database)
    age(database, timedelta(minutes=1))
    assert run_once(database, ob, include=[effects]) == 1
    assert settlement_row(database, id).state == "cancelled"


def test_operators_see_how_many_wait_and_why(database: Database, ob: outbox.Outbox) -> None:
    for number in range(3):
        put_one(database, ob, "receipts.send", payload={"to": 5})
        enqueue(database, ob, receipt, Receipt("b"), parent=f"order:x{number}", due=timedelta(seconds=30))
    run_once(database, ob, include=[handling(receipt, Sent())])
    age(database, timedelta(minutes=2))

    shown = succeeded("status", database=database)
    (finding,) = [each for each in doctor.examined(database)["findings"] if each["check"] == "served"]

    why = "receipts.send: payload.to: must be a valid string; it does not fit the Receipt of this process"
    assert f"3 of receipts.send cannot be read by any dispatcher: {why}" in " ".join(shown.split())
    assert finding["text"] == f"3 entries of receipts.send wait: {why}"
    assert finding["remedy"].startswith("deploy a dispatcher whose type or upcaster reads it")


def test_drain_says_why_nothing_is_sent(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob, "receipts.send", payload={"to": 5})

    async def send_all() -> None:
        working = Dispatcher(database.dispatchers_engine, include=[handling(receipt, Sent())], outbox=ob)
        try:
            await drain(working, ahead=True)
        finally:
            await working.close()

    with pytest.raises(AssertionError, match=r"one of them waits because: receipts\.send: payload\.to: must be"):
        asyncio.run(send_all())


def test_deferred_and_absent_pass_unchanged(database: Database, ob: outbox.Outbox) -> None:
    id = enqueue(database, ob, charge, Receipt("ada"))
    run_once(database, ob, include=[handling(charge, Sent(Deferred("later")), find=lambda delivery: Absent())])

    assert document("show", str(id), database=database)["reason"] == "later"
