# ruff: noqa: F821, B018
"""What mypy and basedpyright infer from typed effects. Not run: the test reads the comments, and what both report.

`# type: T` is what `reveal_type` shows; `# error` is a line that both refuse. All other lines must be accepted.
"""

from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec
import pydantic
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

import outbox
from dispatchers import Delivered, Delivery, Found, Operations, Outcome, Rejected, Settlement
from outbox.testing import assert_enqueued


class Receipt(pydantic.BaseModel):
    to: str


class Charge(msgspec.Struct):
    id: str


@dataclass
class Card:
    number: str


class Transfer(TypedDict):
    iban: str


effects = Operations()
receipt = outbox.Effect("receipts.send", Receipt)
charge = outbox.Effect("bank.charge", Card, result=Charge, version=2, upcasters={1: lambda data: data})
transfer = outbox.Effect("bank.transfer", Transfer)
counts = outbox.Effect("counts.send", dict[str, int])
either: outbox.Effect[Card | Transfer, Charge] = outbox.Effect("bank.pay", Card | Transfer, result=Charge)

reveal_type(receipt)  # type: Effect[Receipt, Any]
reveal_type(charge)  # type: Effect[Card, Charge]
reveal_type(transfer)  # type: Effect[Transfer, Any]
reveal_type(counts)  # type: Effect[dict[str, int], Any]
reveal_type(either)  # type: Effect[Card | Transfer, Charge]


def app(session: Session, async_session: AsyncSession) -> None:
    reveal_type(receipt.enqueue(session, Receipt(to="a"), parent="order:1"))  # type: Entry
    receipt.enqueue(async_session, Receipt(to="a"), ordering_key="customer:1", if_exists="ignore")
    transfer.enqueue(session, {"iban": "x"})
    counts.enqueue(session, {"a": 1})
    either.enqueue(session, Card("1"))
    reveal_type(receipt.enqueue_many(session, [Receipt(to="a")], parent=lambda each: each.to))  # type: list[Entry]
    outbox.enqueue_many(session, "mail.send", [Receipt(to="a")], discriminator=lambda each: each.to)
    assert_enqueued(session, receipt, Receipt(to="a"))

    receipt.enqueue(session, Card("1"))  # error
    receipt.enqueue(session, {"to": "a"})  # error
    receipt.enqueue(session, Receipt(to="a"), paren="order:1")  # error
    receipt.enqueue(session, Receipt(to="a"), due="tomorrow")  # error
    reciept.enqueue(session, Receipt(to="a"))  # error
    transfer.enqueue(session, {"ibna": "x"})  # error
    counts.enqueue(session, {"a": "1"})  # error
    receipt.enqueue_many(session, [Card("1")])  # error
    receipt.enqueue_many(session, [Receipt(to="a")], parent=lambda each: each.too)  # error


@effects.handles(receipt)
async def send(delivery: Delivery[Receipt]) -> Delivered:
    reveal_type(delivery.payload)  # type: Receipt
    reveal_type(delivery.key)  # type: str
    delivery.payload.too  # error
    return Delivered({"id": 1})


@effects.handles(charge, pinned="v2")
def take(delivery: Delivery[Card]) -> Delivered[Charge] | Rejected:
    return Delivered(Charge("1"))


@effects.handles(charge)
def plain(delivery: Delivery) -> Outcome:
    reveal_type(delivery.payload)  # type: Any
    return Delivered(5)


def wrong_payload(delivery: Delivery[Receipt]) -> Delivered[Charge]:
    return Delivered(Charge("1"))


def wrong_result(delivery: Delivery[Card]) -> Delivered[Card]:
    return Delivered(Card("1"))


def wrong_value(delivery: Delivery[Card]) -> Delivered[Charge]:
    return Delivered(Card("1"))  # error


effects.handles(charge)(wrong_payload)  # error
effects.handles(charge)(wrong_result)  # error
effects.handles(charge, windw=5)  # error
effects.handles("bank.charge")  # error


async def direct() -> None:
    reveal_type(await send(Delivery[Receipt]))  # error


@effects.on_settled(charge)
def charged(session: Session, settlement: Settlement[Card, Charge]) -> None:
    reveal_type(settlement.entry.payload)  # type: Card
    reveal_type(settlement.result)  # type: Charge | None


@effects.on_settled(charge)
async def charged_async(session: AsyncSession, settlement: Settlement[Card, Charge]) -> None:
    pass


@effects.on_settled("bank.other")
def settled(session: Session, settlement: Settlement) -> None:
    reveal_type(settlement.entry.payload)  # type: Any


def wrong_settlement(session: Session, settlement: Settlement[Receipt, Charge]) -> None:
    pass


effects.on_settled(charge)(wrong_settlement)  # error
effects.on_uncertain(charge)(wrong_settlement)  # error

found: Found[Charge] = Found(Charge("1"))
answer: Awaitable[Found[Charge]]
