"""The web app whose requests are measured, twice: `create_plain` without a claim, `create_claimed` with one."""

import gc
import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from sqlalchemy import ForeignKey, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import outbox
from outbox.http import ClaimedRequest
from outbox.http.fastapi import Idempotency, IdempotencyMiddleware

CHARGE = {"amount": 2000, "currency": "eur", "customer": "cus_1", "description": "an order of three lines"}


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "bench_customer"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Purchase(Base):
    __tablename__ = "bench_purchase"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey(Customer.id))
    lines: Mapped[list["Line"]] = relationship()


class Line(Base):
    __tablename__ = "bench_line"

    id: Mapped[int] = mapped_column(primary_key=True)
    purchase_id: Mapped[int] = mapped_column(ForeignKey(Purchase.id))
    item: Mapped[str]
    amount: Mapped[int]


class CartLine(BaseModel):
    item: str
    amount: int


class Cart(BaseModel):
    customer: int
    lines: list[CartLine]


AUTHORIZATION = "Bearer sk_test_1"
CALLERS = {AUTHORIZATION: "acct_1"}
BODY = b'{"customer": 1, "lines": [{"item": "pen", "amount": 5}, {"item": "ink", "amount": 7}, {"item": "pad", "amount": 8}]}'


def place_order(session: Session, cart: Cart) -> int:
    """One read and four rows."""
    customer = session.get_one(Customer, cart.customer)
    order = Purchase(customer_id=customer.id)
    order.lines = [Line(item=line.item, amount=line.amount) for line in cart.lines]
    session.add(order)
    session.flush()
    return order.id


async def caller(request: Request) -> str:
    """Both apps ask who calls: with a claim or without, not everybody may place an order."""
    return CALLERS[request.headers["authorization"]]


def create_plain() -> FastAPI:
    app, sessions = _configure()

    async def open_session(of: Annotated[str, Depends(caller)]) -> AsyncIterator[AsyncSession]:
        async with sessions() as session, session.begin():
            yield session

    @app.post("/orders", status_code=201)
    async def order(cart: Cart, session: Annotated[AsyncSession, Depends(open_session)]) -> dict[str, int]:
        number = await session.run_sync(place_order, cart)
        outbox.enqueue(session, "noop.charge", CHARGE, parent=f"order:{number}")
        return {"order": number}

    return app


def create_claimed() -> FastAPI:
    app, sessions = _configure()
    app.add_middleware(IdempotencyMiddleware)
    idempotency = Idempotency(sessions, scope=caller)

    @app.post("/orders", status_code=201)
    async def order(
        cart: Cart, request: Annotated[ClaimedRequest[AsyncSession], Depends(idempotency.claim)]
    ) -> dict[str, int]:
        number = await request.session.run_sync(place_order, cart)
        outbox.enqueue(request.session, "noop.charge", CHARGE)
        return {"order": number}

    return app


def _configure() -> tuple[FastAPI, async_sessionmaker[AsyncSession]]:
    outbox.configure(outbox.Keyring({"k1": bytes(range(32))}), env="bench")
    clients = int(os.environ["BENCH_CLIENTS"])
    name = {"application_name": os.environ["BENCH_NAME"]}
    engine = create_async_engine(
        make_url(os.environ["BENCH_URL"]), pool_size=clients, max_overflow=0, connect_args=name
    )
    gc.freeze()  # what is loaded by now is not walked at each collection, whichever side caused it
    return FastAPI(), async_sessionmaker(engine)
