"""An outbox, a broker, and an inbox in another database, with kills on both sides and in the broker.

`python3 dev.py kills --broker nats --messages 50000`. One process of each side works at a time, and is killed and started again;
so are the broker's servers. At the end every entry must be delivered, and every message applied exactly once.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from dispatchers import Adapter, Dispatcher
from dispatchers.testing.postgres import temporary_postgres
from outbox.inboxes import MessageIdentity
from outbox.keys import Tag, encode_native
from support.daemons import wait_for
from support.database import IMPORT_PATH, TABLES, Database
from support.entries import states
from support.python_processes import PythonProcess

SHOP = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
BILLING = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32, 64))}), env="test")
APPLIED = sa.Table(
    "applied",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
)
"""What the consumer does for a message. No constraint keeps a message from being applied twice: only the inbox does."""

Received = tuple[MessageIdentity, Mapping[str, int]]
LEASE, MARGIN = timedelta(seconds=5), timedelta(seconds=1)
MAX_SECONDS = 900
AT_ONCE = 5_000  # entries in a transaction


class Broker(Protocol):
    """One broker's part of the pair. `place` describes it to the processes of both sides, as JSON."""

    place: dict[str, Any]

    def kill_one(self) -> None:
        """Kill a server of the broker, and start it again."""
        ...

    @staticmethod
    def adapter(place: dict[str, Any]) -> Adapter: ...

    @staticmethod
    async def consume(place: dict[str, Any], apply: Callable[[Sequence[Received]], list[str]]) -> None:
        """Receive messages, have them applied, and acknowledge those whose ids `apply` returns; without an end."""
        ...

    def stored(self) -> int:
        """How many messages the broker has stored in all."""
        ...


def brokers() -> dict[str, type[Any]]:
    from support.pair_nats import NatsPair
    from support.pair_redis import RedisPair

    return {"nats": NatsPair, "redis": RedisPair}


# --- the processes


def dispatch(shop: str, broker: type[Broker], place: dict[str, Any]) -> None:
    adapters = {"orders": broker.adapter(place)}
    engine = sa.create_engine(shop)
    Dispatcher(engine, outbox=SHOP, adapters=adapters, lease=LEASE, margin=MARGIN, concurrency=500).run()


def consume(billing: str, broker: type[Broker], place: dict[str, Any]) -> None:
    engine = sa.create_engine(billing)

    def apply(messages: Sequence[Received]) -> list[str]:
        """In one transaction; returns the ids of those that may be acknowledged."""
        applied = []
        with Session(engine) as session, session.begin():
            for identity, order in messages:
                try:
                    with BILLING.inbox(session, consumer="billing", **identity) as message:
                        if not message.duplicate:
                            values = {"key": identity["message_id"], "number": order["number"]}
                            session.execute(sa.insert(APPLIED).values(values))
                except outbox.KeyInFlight:  # in the transaction of a process that was killed a moment ago
                    continue
                applied.append(identity["message_id"])
        return applied

    asyncio.run(broker.consume(place, apply))


class Side:
    """A process that works until it is killed; then another one takes its place."""

    def __init__(self, folder: Path, role: str, url: sa.URL, broker: str, place: dict[str, Any]) -> None:
        shown = url.render_as_string(hide_password=False)
        self._arguments = ("-m", "support.broker_pair", role, shown, broker, json.dumps(place))
        self._log = folder / f"{role}.log"
        self._start()

    def kill(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"it ended by itself: {self._log.read_text()[-3000:]}")
        self.stop()
        self._start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            environment = os.environ | {"PYTHONPATH": IMPORT_PATH}
            self.process = PythonProcess(*self._arguments, env=environment, stdout=log, stderr=log)


# --- the run


def enqueue(shop: Database, numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, AT_ONCE):
        with shop.begin() as session:
            for number in range(first, min(first + AT_ONCE, numbers.stop)):
                SHOP.enqueue(session, "orders.placed", {"number": number}, parent=f"order:{number}")


def applied(billing: Database) -> int:
    with billing.observer.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(APPLIED)) or 0


def run(shop: Database, billing: Database, name: str, broker: Broker, messages: int, kills: int, folder: Path) -> str:
    """Enqueue in portions; amid each portion kill, in turn, a dispatcher, a consumer and a server. Returns the finding.

    Raises AssertionError for a message that was lost, or applied twice.
    """
    for database, tables in ((shop, [TABLES.metadata]), (billing, [TABLES.metadata, APPLIED.metadata])):
        for metadata in tables:
            metadata.create_all(database.engine)
    began = time.monotonic()
    with ExitStack() as stack:
        dispatcher = Side(folder, "dispatch", shop.url, name, broker.place)
        stack.callback(dispatcher.stop)
        consumer = Side(folder, "consume", billing.url, name, broker.place)
        stack.callback(consumer.stop)
        victims = [dispatcher.kill, consumer.kill, broker.kill_one]
        bounds = [messages * part // kills for part in range(kills + 1)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            enqueue(shop, range(first, last))
            reached = first + (last - first) // 3
            wait_for(lambda reached=reached: applied(billing) >= reached, f"{reached} applied", MAX_SECONDS)
            victims[number % len(victims)]()
        wait_for(lambda: states(shop)["delivered"] == messages, "every entry delivered", MAX_SECONDS)
        wait_for(lambda: applied(billing) >= messages, "every message applied", MAX_SECONDS)
    seconds = time.monotonic() - began
    compare(shop, billing)
    twice = broker.stored() - messages
    return f"{name}: {messages} messages, {kills} kills, each applied once; the broker stored {twice} twice; {seconds:.0f} s"


def compare(shop: Database, billing: Database) -> None:
    with billing.observer.connect() as connection:
        found = Counter(connection.scalars(sa.select(APPLIED.c.key)))
    keys = {encode_native(Tag(bytes(entry.tag))) for entry in shop.entries}
    assert found == Counter(keys), (len(keys - found.keys()), len(found.keys() - keys), found.most_common(3))


@contextmanager
def two_databases(server: sa.URL) -> Iterator[tuple[Database, Database]]:
    names = [f"outbox_pair_{uuid4().hex}" for _ in range(2)]
    with sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
        for name in names:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        shop, billing = (Database(server.set(database=name)) for name in names)
        try:
            yield shop, billing
        finally:
            shop.dispose()
            billing.dispose()
            for name in names:
                connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def pair(server: sa.URL, name: str, messages: int, kills: int, folder: Path) -> str:
    """Run it with a broker of its own. Returns the finding; raises as `run` does."""
    with two_databases(server) as (shop, billing), brokers()[name].running(folder) as broker:
        return run(shop, billing, name, broker, messages, kills, folder)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py kills --broker", description=__doc__)
    parser.add_argument("--broker", choices=sorted(brokers()), required=True)
    parser.add_argument("--messages", type=int, default=3_000)
    parser.add_argument("--kills", type=int, default=12, help="in all; in turn a dispatcher, a consumer and a server")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="outbox-pair-") as folder, temporary_postgres() as server:
        print(pair(sa.make_url(server.url), options.broker, options.messages, options.kills, Path(folder)))
    return 0


if __name__ == "__main__":
    if sys.argv[1] in ("dispatch", "consume"):
        role, url, named, place = sys.argv[1:]
        {"dispatch": dispatch, "consume": consume}[role](url, brokers()[named], json.loads(place))
    else:
        sys.exit(main(sys.argv[1:]))
