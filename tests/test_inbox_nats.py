"""The inbox with nats-py, on a NATS server with JetStream at localhost: the recipe of docs/inbox.md.

Skipped where none listens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import uuid4

import nats
import pytest
from consuming import Billing, Poison
from nats.errors import NoServersError
from nats.errors import TimeoutError as NoMessage
from nats.js.api import ConsumerConfig, StreamConfig
from support import Database

import outbox
from outbox import inboxes

URL = "nats://127.0.0.1:4222"
DELIVERIES_MAX = 3
SECONDS = 0.2  # how long one step waits for a message


class Stream:
    """A stream and the one that poison goes to, of one test's own. The event's id has a header of its own."""

    def __init__(self, client: Any) -> None:
        self.name = f"outbox-test-{uuid4().hex[:8]}"
        self.dead = f"{self.name}-dead"
        self.js = client.jetstream()

    async def create(self) -> None:
        for name in (self.name, self.dead):
            await self.js.add_stream(StreamConfig(name=name, subjects=[f"{name}.orders"]))

    async def delete(self) -> None:
        for name in (self.name, self.dead):
            await self.js.delete_stream(name)

    async def send(self, **headers: str) -> Any:
        return await self.js.publish(f"{self.name}.orders", b"{}", headers=headers or {"Event-Id": "evt_1"})

    async def bury(self, message: Any) -> None:
        await self.js.publish(f"{self.dead}.orders", message.data, headers=message.headers)

    async def redrive(self) -> None:
        buried = await self.js.get_last_msg(self.dead, f"{self.dead}.orders")
        await self.js.publish(f"{self.name}.orders", buried.data, headers=buried.headers)

    async def messages(self, name: str) -> int:
        state = (await self.js.stream_info(name)).state
        return int(state.messages)


class Consumer:
    """The recipe: fetch, handle, commit, acknowledge. What fails is asked for again, and buried the last time."""

    def __init__(self, stream: Stream, billing: Billing, subscription: Any) -> None:
        self.stream = stream
        self.billing = billing
        self.subscription = subscription
        self.refused = self.failed = self.acknowledged = 0
        self.dies_before_it_acknowledges = False

    async def step(self) -> None:
        try:
            (message,) = await self.subscription.fetch(1, timeout=SECONDS)
        except NoMessage:
            return
        try:
            await self.billing.handle_async(identify(message))
        except outbox.KeyInFlight as error:
            self.refused += 1
            await message.nak(delay=error.retry_after.total_seconds())
            return
        except Poison:
            self.failed += 1
            if message.metadata.num_delivered < DELIVERIES_MAX:
                await message.nak()
                return
            await self.stream.bury(message)
            await message.term()
            return
        if self.dies_before_it_acknowledges:
            return
        await message.ack_sync()
        self.acknowledged += 1

    async def until(self, done: Callable[[], object]) -> None:
        for _ in range(100):
            if done():
                return
            await self.step()
        raise AssertionError("not done after 100 steps")


def identify(message: Any) -> inboxes.MessageIdentity:
    return inboxes.nats.by_event_id(message, scope="shop", header="Event-Id")


@asynccontextmanager
async def connected() -> AsyncIterator[Stream]:
    client = await nats.connect(URL, allow_reconnect=False, connect_timeout=5)
    stream = Stream(client)
    await stream.create()
    try:
        yield stream
    finally:
        await stream.delete()
        await client.close()


@asynccontextmanager
async def consuming(billing: Billing, redelivery_seconds: float = 30) -> AsyncIterator[Consumer]:
    async with connected() as stream:
        config = ConsumerConfig(ack_wait=redelivery_seconds)
        subscription = await stream.js.pull_subscribe(f"{stream.name}.orders", "billing", config=config)
        yield Consumer(stream, billing, subscription)


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    async def connect() -> None:
        # without a callback, a refused connection is logged as an error
        async def quiet(error: Exception) -> None: ...

        client = await nats.connect(
            URL, allow_reconnect=False, max_reconnect_attempts=1, connect_timeout=5, error_cb=quiet
        )
        await client.jetstream().account_info()
        await client.close()

    try:
        asyncio.run(connect())
    except (NoServersError, OSError):
        pytest.skip("no NATS server with JetStream at 127.0.0.1:4222: start one, e.g. with `nats-server -js`")


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


def test_a_message_is_handled_and_acknowledged(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 1)

    asyncio.run(run())

    assert billing.orders == ["evt_1"]


def test_what_was_committed_and_not_acknowledged_comes_again_and_is_a_duplicate(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing, redelivery_seconds=0.5) as consumer:
            await consumer.stream.send()
            consumer.dies_before_it_acknowledges = True
            await consumer.until(lambda: billing.orders)
            consumer.dies_before_it_acknowledges = False
            await consumer.until(lambda: consumer.acknowledged == 1)

    asyncio.run(run())

    assert billing.orders == ["evt_1"]
    assert set(billing.duplicates) == {"evt_1"}


def test_an_event_that_is_published_twice_is_handled_once(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            await consumer.stream.send()
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 2)

    asyncio.run(run())

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_handed_back_and_comes_again(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            await consumer.stream.send()
            with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
                await consumer.until(lambda: consumer.refused == 1)
            await consumer.until(lambda: consumer.acknowledged == 1)

    asyncio.run(run())

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_poison_message_ends_in_the_dead_letter_stream_and_is_handled_once_when_redriven(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            billing.poison = {"evt_1"}
            await consumer.stream.send()
            await consumer.until(lambda: consumer.failed == DELIVERIES_MAX)
            assert await consumer.stream.messages(consumer.stream.dead) == 1
            assert billing.nothing_is_stored

            billing.poison.clear()
            await consumer.stream.redrive()
            await consumer.stream.redrive()  # by an operator who presses twice
            await consumer.until(lambda: consumer.acknowledged == 2)

    asyncio.run(run())

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_redrive_under_the_streams_own_message_id_is_dropped_by_the_stream(billing: Billing) -> None:
    """Why the recipe gives the event's id a header of its own."""

    async def run() -> Any:
        async with connected() as stream:
            await stream.send(**{"Nats-Msg-Id": "evt_1"})
            return await stream.send(**{"Nats-Msg-Id": "evt_1"})

    assert asyncio.run(run()).duplicate


def test_by_default_the_event_id_is_the_one_that_the_stream_deduplicates_by(billing: Billing) -> None:
    message = first_message(billing, **{"Nats-Msg-Id": "evt_7"})[0]

    assert inboxes.nats.by_event_id(message, scope="shop") == {"scope": "shop", "message_id": "evt_7"}


def test_a_message_without_the_header_is_refused(billing: Billing) -> None:
    message = first_message(billing, Other="1")[0]

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == "header 'Event-Id' None: is missing or empty: the producer must send it"


def test_by_sequence_a_stream_that_was_made_again_has_other_messages(billing: Billing) -> None:
    message, name, created = first_message(billing)
    identity = inboxes.nats.by_sequence(message, created=created)
    made_again = inboxes.nats.by_sequence(message, created=created.replace(microsecond=created.microsecond ^ 1))

    assert identity["scope"].startswith(f"nats:{name}:")
    assert identity["message_id"] == made_again["message_id"] == "1"
    assert identity["scope"] != made_again["scope"]


def test_when_a_stream_was_made_is_said_with_its_time_zone(billing: Billing) -> None:
    message = first_message(billing)[0]

    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.nats.by_sequence(message, created=datetime(2026, 1, 1))

    assert str(caught.value) == (
        "created datetime.datetime(2026, 1, 1, 0, 0): must be an aware datetime: (await js.stream_info(name)).created"
    )


def first_message(billing: Billing, **headers: str) -> tuple[Any, str, datetime]:
    """A message as it comes, the name of its stream, and when that was made."""

    async def run() -> tuple[Any, str, datetime]:
        async with consuming(billing) as consumer:
            await consumer.stream.send(**headers)
            (message,) = await consumer.subscription.fetch(1, timeout=10)
            created = (await consumer.stream.js.stream_info(consumer.stream.name)).created
        return message, consumer.stream.name, created

    return asyncio.run(run())
