"""An app that enqueues, and that runs its dispatcher inside its own lifespan: both on the server's event loop."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.orm import Session

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import HttpAdapter

engine = sa.create_engine(os.environ["SHOP_URL"])
outbox.configure(outbox.Keyring({"k1": bytes(range(32))}), env="test")
outbox.check(engine)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    adapter = HttpAdapter(base_url=os.environ["REMOTE"])
    serving = asyncio.create_task(Dispatcher(engine, adapters={"crm": adapter}).serve())
    yield
    await serving


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}")
def place_order(number: int) -> str:
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, "crm.upsert", {"url": "/contacts", "json": {}}, parent=f"order:{number}")
    return "ok"


@app.get("/loop")
async def loop() -> str:
    return type(asyncio.get_running_loop()).__module__
