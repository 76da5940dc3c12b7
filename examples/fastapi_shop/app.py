"""The web process: `uvicorn examples.fastapi_shop.app:app`."""

import uuid
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session, sessionmaker

import outbox
from examples.fastapi_shop.orders import Order, connect
from outbox.http import ClaimedRequest
from outbox.http.fastapi import Idempotency, IdempotencyMiddleware

CUSTOMERS = {"ada-token": "ada", "bob-token": "bob"}  # a real shop asks its session store

app = FastAPI(title="A shop")
app.add_middleware(IdempotencyMiddleware)
engine = connect()


class Cart(BaseModel):
    """amount: in the currency's smallest unit."""

    email: str
    amount: int = Field(gt=0)
    currency: str = "eur"
    card: str = "pm_card_visa"


def customer_of(credentials: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> str:
    customer = CUSTOMERS.get(credentials.credentials)
    if customer is None:
        raise HTTPException(401, "who are you?")
    return customer


Customer = Annotated[str, Depends(customer_of)]


idempotency = Idempotency(sessionmaker(engine), scope=customer_of)
ClaimedOrder = Annotated[ClaimedRequest[Session], Depends(idempotency.claim)]


@app.post("/orders", status_code=201)
def place_order(cart: Cart, customer: Customer, request: ClaimedOrder, response: Response) -> dict[str, str]:
    order = Order(
        number=str(uuid.uuid4()),
        customer=customer,
        request_key=request.claim.parent.key,
        email=cart.email,
        amount=cart.amount,
        currency=cart.currency,
    )
    request.session.add(order)
    outbox.enqueue(request.session, "stripe.payment_intents.create", charge_of(order, cart.card))
    response.headers["Location"] = f"/orders/{order.number}"
    return {"order": order.number}


def charge_of(order: Order, card: str) -> dict[str, Any]:
    return {
        "amount": order.amount,
        "currency": order.currency,
        "payment_method": card,
        "confirm": True,
        "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
        "metadata": {"order": order.number},
    }


@app.get("/orders/{number}")
def show_order(number: str, customer: Customer) -> dict[str, Any]:
    """What the shop knows of the order, and how far its effects are."""
    with Session(engine) as session:
        order = session.get(Order, number)
        if order is None or order.customer != customer:
            raise HTTPException(404, "you have no such order")
        effects = {entry.operation: entry.state for entry in outbox.status(session, order.parent)}
        return {"order": order.number, "state": order.state, "effects": effects}
