"""Orders under an Idempotency-Key, on Flask.

    export DATABASE_URL=sqlite:///shop.db
    flask --app examples.flask_shop.app run
    curl -i localhost:5000/orders -H 'Authorization: Bearer ada-token' -H 'Idempotency-Key: order-1' --json '{"amount": 2000}'

The last line twice: one order, one charge to be sent, and the second answer says `Idempotent-Replayed: true`.
"""

import os

from flask import Flask, Response, abort, request
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import outbox
from outbox import migrations
from outbox.http import ClaimedRequest
from outbox.http.flask import Idempotency, as_response

CUSTOMERS = {"Bearer ada-token": "ada", "Bearer bob-token": "bob"}  # a real shop asks its session store
LIMIT = 100_000  # cents: what the shop sells in one order


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "flask_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


def connect(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        outbox.prepare_sqlite(engine)
    migrations.upgrade(engine)
    Base.metadata.create_all(engine)
    return engine


def customer() -> str:
    """Who is calling. What aborts here comes before any claim, and stores nothing."""
    return CUSTOMERS.get(request.headers.get("Authorization", "")) or abort(401)


def create_app() -> Flask:
    app = Flask(__name__)
    # A real shop sets OUTBOX_SECRET and OUTBOX_ENV instead; `outbox keys generate` makes the secret.
    outbox.configure(outbox.Keyring({"k1": bytes(range(32))}), env="example")
    idempotency = Idempotency(sessionmaker(connect(os.environ["DATABASE_URL"])), scope=customer)

    @app.post("/orders")
    @idempotency.claim
    def place_order(claimed: ClaimedRequest[Session]) -> tuple[dict[str, int], int] | Response:
        amount = request.get_json()["amount"]
        if amount > LIMIT:
            # An error that every retry is to get as well. A plain `abort` would store nothing and free the key.
            return as_response(claimed.claim.reject(422, {"error": f"at most {LIMIT} in one order"}))
        order = Order(customer=customer(), amount=amount)
        claimed.session.add(order)
        claimed.session.flush()
        outbox.enqueue(claimed.session, "stripe.payment_intents.create", {"amount": amount, "currency": "eur"})
        return {"order": order.id}, 201

    return app
