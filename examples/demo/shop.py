"""The shop: one transaction for the order, the record of the request and the charge that is to follow.

python -m examples.demo.shop        listens on a free port, printed as the first line
"""

import json
import math
import os
import socket
import uuid
from datetime import UTC, datetime
from typing import Any

import uvicorn
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import outbox
from examples.demo.orders import Order, connect


def place_order(engine: Engine, customer: str, key: str, body: bytes) -> tuple[outbox.Response, bool]:
    """Answer a checkout, or replay its answer. Committed when this returns."""
    with Session(engine) as session, session.begin():
        with outbox.idempotent(session, key, scope=customer, source="http", content=body) as claim:
            if claim.replayed:
                return claim.require_response(), True
            cart = json.loads(body)
            order = Order(
                id=str(uuid.uuid4()),
                customer=customer,
                email=cart["email"],
                amount=cart["amount"],
                currency=cart["currency"],
                created_at=datetime.now(UTC).replace(tzinfo=None),
            )
            session.add(order)
            outbox.enqueue(
                session,
                "stripe.payment_intents.create",
                {
                    "amount": order.amount,
                    "currency": order.currency,
                    "customer": customer,
                    "confirm": True,
                    "payment_method": cart["payment_method"],
                    "metadata": {"order_id": order.id},
                },
            )
            claim.respond(201, {"order_id": order.id}, headers={"Location": f"/orders/{order.id}"})
        return claim.require_response(), False


async def checkout(request: Request) -> Response:
    customer = request.headers["x-customer"]  # a real shop takes it from the session cookie or the token
    key = request.headers.get("idempotency-key", "")
    body = await request.body()
    try:
        answer, replayed = await run_in_threadpool(place_order, request.app.state.engine, customer, key, body)
    except outbox.KeyInFlight as error:
        wait = math.ceil(error.retry_after.total_seconds())
        return JSONResponse({"error": "in flight"}, error.status, headers={"Retry-After": str(wait)})
    except outbox.RequestError as error:
        return JSONResponse({"error": str(error)}, error.status)
    headers = {**answer.headers, **({"Idempotent-Replayed": "true"} if replayed else {})}
    return Response(answer.body, answer.status, headers)


async def progress(request: Request) -> Response:
    """How things are in the outbox: for the live view and the killer."""
    return JSONResponse(await run_in_threadpool(look, request.app.state.engine))


def look(engine: Engine) -> dict[str, Any]:
    """entries: [destination, state, how many]. leases: [entry, lease token, destination] of what is being sent."""
    states = "SELECT entry.destination, place.state, count(*) AS entries FROM outbox_entry AS entry"
    states += " JOIN (SELECT id, state FROM outbox_queue UNION ALL SELECT id, state FROM outbox_settlement) AS place"
    states += " ON place.id = entry.id GROUP BY entry.destination, place.state"
    leases = "SELECT id, lease_token, destination FROM outbox_queue WHERE state = 'sending'"
    with engine.connect() as connection:
        return {
            "entries": [list(row) for row in connection.execute(text(states))],
            "leases": [[str(value) for value in row] for row in connection.execute(text(leases))],
        }


def make_app() -> Starlette:
    app = Starlette(routes=[Route("/checkout", checkout, methods=["POST"]), Route("/progress", progress)])
    app.state.engine = connect(os.environ["DATABASE_URL"])
    return app


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(make_app(), log_level="warning", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
