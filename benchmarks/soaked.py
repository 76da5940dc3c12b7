"""What runs in a soak: the app, by uvicorn, and the dispatcher, by `outbox run`.

Each order enqueues a contact. The callback of a contact that was delivered enqueues a mail, in an ordering group.
"""

import os
from datetime import timedelta
from typing import Annotated

from fastapi import Depends, FastAPI
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

import outbox
from benchmarks.shop import Cart, caller, place_order
from dispatchers import Dispatcher, Limits, Operations, Settlement
from dispatchers.adapters import HttpAdapter
from outbox.http import ClaimedRequest
from outbox.http.fastapi import Idempotency, IdempotencyMiddleware

GROUPS = 50
RING = outbox.Keyring({"k1": bytes(range(32))})
effects = Operations()


def create_soaked() -> FastAPI:
    outbox.configure(RING, env="bench")
    engine = create_async_engine(os.environ["BENCH_URL"], pool_size=int(os.environ["BENCH_CLIENTS"]), max_overflow=0)
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware)
    idempotency = Idempotency(async_sessionmaker(engine), scope=caller)

    @app.post("/orders", status_code=201)
    async def order(
        cart: Cart, request: Annotated[ClaimedRequest[AsyncSession], Depends(idempotency.claim)]
    ) -> dict[str, int]:
        number = await request.session.run_sync(place_order, cart)
        outbox.enqueue(request.session, "crm.create", {"url": "/contacts", "json": {"order": number}})
        return {"order": number}

    return app


@effects.on_settled("crm.create")
def contact_settled(session: Session, settlement: Settlement) -> None:
    if settlement.state == "delivered":
        number = settlement.entry.payload["json"]["order"]
        mail = {"url": "/mails", "json": {"order": number}}
        outbox.enqueue(session, "mail.send", mail, ordering_key=f"customer:{number % GROUPS}")


def make_dispatcher() -> Dispatcher:
    outbox.configure(RING, env="bench")
    service = HttpAdapter(base_url=os.environ["BENCH_SERVICE"], window=timedelta(hours=6), timeout=timedelta(seconds=5))
    unbroken = Limits(breaker=None)  # the service fails all the time, by intention
    return Dispatcher(
        create_engine(os.environ["BENCH_URL"]),
        include=[effects],
        adapters={"crm": service, "mail": service},
        limits={"crm": unbroken, "mail": unbroken},
    )
