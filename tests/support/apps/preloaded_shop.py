"""A shop that connects when it is loaded, before its server forks: it checks the outbox and reads the database.

Its server is gunicorn, uWSGI or Celery. Each request and each task places an order, and says which process and which connection
did it.
"""

import os

import sqlalchemy as sa
from celery import Celery
from flask import Flask
from sqlalchemy.orm import Session

import outbox
from support.database import CHARGE, PAYLOAD, Order

engine = sa.create_engine(os.environ["SHOP_URL"])
outbox.configure(outbox.Keyring({"k1": bytes(range(32))}), env="test")
outbox.check(engine)
with engine.connect() as connection:  # the app's own: it stays in the pool
    connection.execute(sa.text("SELECT 1"))

app = Flask(__name__)
worker = Celery(broker="filesystem://", set_as_current=False)
folder = os.environ.get("BROKER", ".")
worker.conf.broker_transport_options = {"data_folder_in": folder, "data_folder_out": folder, "control_folder": folder}


def place(number: int) -> str:
    with Session(engine) as session, session.begin():
        with outbox.idempotent(session, f"order-{number}", scope="shop", content=number) as claim:
            session.add(Order(customer=f"{os.getpid()} {number}", amount=1))
            outbox.enqueue(session, CHARGE, PAYLOAD)
            claim.respond(201)
        backend = session.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
    return f"{os.getpid()} {backend}"


@app.post("/orders/<int:number>")
def place_order(number: int) -> str:
    return place(number)


@worker.task
def place_in_task(number: int) -> None:
    with open(os.environ["PLACED"], "a") as placed:
        placed.write(place(number) + "\n")
