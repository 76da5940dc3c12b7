"""RabbitMqAdapter with a real RabbitMQ at localhost. Skipped where none listens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aiormq
import pytest
from aiormq.exceptions import AMQPError
from support.database import Database
from support.deliveries import ask
from support.entries import dispatcher, put_one, state

import outbox
from dispatchers import Deferred, Delivered, Outcome
from dispatchers.adapters import RabbitMqAdapter
from outbox import inboxes

URL = "amqp://guest:guest@127.0.0.1:5672/"
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    async def connect() -> None:
        await (await aiormq.connect(URL)).close()

    try:
        asyncio.run(connect())
    except (AMQPError, OSError):
        pytest.skip("no RabbitMQ at 127.0.0.1:5672 for guest: start one, e.g. with `rabbitmq-server -detached`")


class Queue:
    """A queue of one test's own, and an exchange of the same name to which it can be bound."""

    def __init__(self, channel: Any) -> None:
        self.name = f"outbox-test-{uuid4().hex[:8]}"
        self.channel = channel

    async def bind(self) -> None:
        await self.channel.queue_bind(self.name, self.name, "orders.#")

    async def messages(self, count: int) -> list[Any]:
        found = []
        async with asyncio.timeout(20):
            while len(found) < count:
                message = await self.channel.basic_get(self.name, no_ack=True)
                if message.delivery_tag is not None:
                    found.append(message)
        return found


@asynccontextmanager
async def queue(arguments: dict[str, Any], exchange: dict[str, Any] | None = None) -> AsyncIterator[Queue]:
    connection = await aiormq.connect(URL)
    made = Queue(await connection.channel())
    await made.channel.queue_declare(made.name, durable=True, arguments=arguments)
    await made.channel.exchange_declare(made.name, exchange_type="topic", **exchange or {})
    try:
        yield made
    finally:
        await made.channel.queue_delete(made.name)
        await made.channel.exchange_delete(made.name)
        await connection.close()


def test_an_entry_is_one_persistent_message_whose_id_the_inbox_finds(postgresql: Database, ob: outbox.Outbox) -> None:
    id = put_one(postgresql, ob, "orders.placed")

    async def run() -> Any:
        async with queue(QUORUM) as made:
            await made.bind()
            adapter = RabbitMqAdapter(urls=URL, exchange=made.name)
            working = dispatcher(postgresql.engine, ob, adapters={"orders": adapter})
            await working.run_once()
            await working.close()
            (message,) = await made.messages(1)
            return message

    message = asyncio.run(run())

    assert state(postgresql, id) == "delivered"
    (entry,) = postgresql.entries
    assert message.body == entry.payload
    properties = message.header.properties
    assert (properties.delivery_mode, properties.content_type) == (2, "application/json")
    identity = inboxes.from_rabbitmq(properties, scope="shop")
    assert identity["message_id"] == outbox.keys.encode_native(outbox.keys.Tag(bytes(entry.tag)))


def test_a_message_that_no_queue_takes_waits_until_one_is_bound() -> None:
    async def run() -> Any:
        async with queue(QUORUM) as made:
            adapter = RabbitMqAdapter(urls=URL, exchange=made.name)
            before = await ask(adapter)
            await made.bind()
            after = await ask(adapter, attempt=2)
            await adapter.aclose()
            return before, after, await made.messages(1)

    before, after, messages = asyncio.run(run())

    assert isinstance(before, Deferred)
    assert "no queue is bound" in before.reason
    assert isinstance(after, Delivered)
    assert messages[0].header.properties.message_id == "ck1_a"


def test_a_full_queue_defers_and_names_no_doubt() -> None:
    async def run() -> list[Outcome]:
        async with queue({**QUORUM, "x-max-length": 1, "x-overflow": "reject-publish"}) as made:
            adapter = RabbitMqAdapter(urls=URL, routing_key=made.name)
            outcomes = [await ask(adapter, key=f"ck1_{number}") for number in range(5)]
            await adapter.aclose()
            return outcomes

    first, *_, last = asyncio.run(run())

    assert isinstance(first, Delivered)
    assert isinstance(last, Deferred)
    assert last.cooldown


def test_a_forbidden_exchange_leaves_no_entry_in_doubt() -> None:
    """The server ends the channel. Without the first message alone, all messages in flight would be in doubt."""

    async def run() -> list[Outcome]:
        async with queue(QUORUM, {"internal": True}) as made:
            adapter = RabbitMqAdapter(urls=URL, exchange=made.name)
            outcomes = await asyncio.gather(*(ask(adapter, key=f"ck1_{number}") for number in range(20)))
            await adapter.aclose()
            return outcomes

    outcomes = asyncio.run(run())

    assert {type(outcome) for outcome in outcomes} == {Deferred}
    assert any("ChannelAccessRefused" in outcome.reason for outcome in outcomes if isinstance(outcome, Deferred))


def test_many_messages_at_once_are_each_confirmed() -> None:
    keys = [f"ck1_{number}" for number in range(200)]

    async def run() -> Any:
        async with queue(QUORUM) as made:
            adapter = RabbitMqAdapter(urls=URL, routing_key=made.name)
            outcomes = await asyncio.gather(*(ask(adapter, key=key) for key in keys))
            await adapter.aclose()
            return outcomes, await made.messages(len(keys))

    outcomes, messages = asyncio.run(run())

    assert {type(outcome) for outcome in outcomes} == {Delivered}
    assert sorted(message.header.properties.message_id for message in messages) == sorted(keys)
