"""Orders under an Idempotency-Key, on Starlette, with an AsyncSession.

    export DATABASE_URL=sqlite+aiosqlite:///shop.db
    uvicorn --factory examples.starlette_shop.app:create_app
    curl -i localhost:8000/orders -H 'Authorization: Bearer ada-token' -H 'Idempotency-Key: order-1' --json '{"amount": 2000}'

The last line twice: one order, one charge to be sent, and the second answer says `Idempotent-Replayed: true`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import outbox
from outbox import migrations
from outbox.http.starlette import Idempotency, IdempotencyMiddleware, reject

CUSTOMERS = {"Bearer ada-token": "ada", "Bearer bob-token": "bob"}  # a real shop asks its session store
LIMIT = 100_000  # cents: what the shop sells in one order


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "starlette_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


def customer_of(request: Request) -> str:
    """Who is calling. What is raised here comes before any claim, and stores nothing."""
    customer = CUSTOMERS.get(request.headers.get("authorization", ""))
    if customer is None:
        raise HTTPException(401, "who are you?")
    return customer


async def place_order(request: Request) -> Response:
    idempotency: Idempotency[AsyncSession] = request.app.state.idempotency
    async with idempotency.claim(request) as claimed:  # a retry does not get in
        amount = (await request.json())["amount"]
        if amount > LIMIT:
            # An error that every retry is to get as well. A plain HTTPException would store nothing and free the key.
            return await reject(claimed, 422, {"error": f"at most {LIMIT} in one order"})
        order = Order(customer=customer_of(request), amount=amount)
        claimed.session.add(order)
        await claimed.session.flush()
        outbox.enqueue(claimed.session, "stripe.payment_intents.create", {"amount": amount, "currency": "eur"})
        return JSONResponse({"order": order.id}, 201)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    engine = create_async_engine(os.environ["DATABASE_URL"])
    await prepare(engine)
    app.state.idempotency = Idempotency(async_sessionmaker(engine), scope=customer_of)
    yield
    await engine.dispose()


async def prepare(engine: AsyncEngine) -> None:
    if engine.dialect.name == "sqlite":
        outbox.prepare_sqlite(engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


def create_app() -> Starlette:
    # A real shop sets OUTBOX_SECRET and OUTBOX_ENV instead; `outbox keys generate` makes the secret.
    outbox.configure(outbox.Keyring({"k1": bytes(range(32))}), env="example")
    migrations.upgrade(os.environ["DATABASE_URL"])
    routes = [Route("/orders", place_order, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware)], lifespan=lifespan)
