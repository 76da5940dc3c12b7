"""The inbox with nats-py, on a NATS server with JetStream at localhost: the recipe of docs/inbox.md.

Skipped where none listens.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
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
        self.client = client
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

    async def back_up(self) -> tuple[dict[str, Any], list[bytes]]:
        """What `nats stream backup` does: the stream's configuration and state, and its data in chunks."""
        deliveries = await self.client.subscribe(inbox := self.client.new_inbox())
        about = await self._ask(f"STREAM.SNAPSHOT.{self.name}", {"deliver_subject": inbox, "no_consumers": True})
        chunks: list[bytes] = []
        while (delivery := await deliveries.next_msg(timeout=10)).data:
            chunks.append(delivery.data)
            await delivery.respond(b"")
        await deliveries.unsubscribe()
        return about, chunks

    async def restore(self, backup: tuple[dict[str, Any], list[bytes]]) -> None:
        """What `nats stream restore` does, in the place of the stream."""
        about, chunks = backup
        await self.js.delete_stream(self.name)
        parts = {"config": about["config"], "state": about["state"]}
        to = (await self._ask(f"STREAM.RESTORE.{self.name}", parts))["deliver_subject"]
        for chunk in [*chunks, b""]:
            await self.client.request(to, chunk, timeout=10)

    async def _ask(self, what: str, parts: dict[str, Any]) -> dict[str, Any]:
        reply = await self.client.request(f"$JS.API.{what}", json.dumps(parts).encode(), timeout=10)
        answer: dict[str, Any] = json.loads(reply.data)
        assert "error" not in answer, answer
        return answer

    async def messages(self, name: str) -> int:
        state = (await self.js.stream_info(name)).state
        return int(state.messages)


class Consumer:
    """The recipe: fetch, handle, commit, acknowledge. What fails is asked for again, and buried the last time."""

    def __init__(self, stream: Stream, billing: Billing, subscription: Any, config: ConsumerConfig) -> None:
        self.stream = stream
        self.config = config
        self.identify: Callable[[Any], inboxes.MessageIdentity] = identify
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
            await self.billing.handle_async(self.identify(message))
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
        config = ConsumerConfig(durable_name="billing", ack_wait=redelivery_seconds)
        subscription = await stream.js.pull_subscribe(f"{stream.name}.orders", "billing", config=config)
        yield Consumer(stream, billing, subscription, config)


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
    message = first_message(billing, **{"Nats-Msg-Id": "evt_7"})

    assert inboxes.nats.by_event_id(message, scope="shop") == {"scope": "shop", "message_id": "evt_7"}


def test_a_message_without_the_header_is_refused(billing: Billing) -> None:
    message = first_message(billing, Other="1")

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == "header 'Event-Id' None: is missing or empty: the producer must send it"


def test_two_headers_that_differ_in_case_alone_are_refused(billing: Billing) -> None:
    message = first_message(billing, **{"Event-Id": "evt_1", "event-id": "evt_2"})

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == "header 'Event-Id': stands 2 times in the message: which is its event id?"


# --- by its place in the stream


def test_by_sequence_a_redelivery_is_a_duplicate_and_another_message_is_not(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing, redelivery_seconds=0.5) as consumer:
            consumer.identify = inboxes.nats.by_sequence
            await consumer.stream.send()
            await consumer.stream.send()
            consumer.dies_before_it_acknowledges = True
            await consumer.until(lambda: len(billing.orders) == 2)
            consumer.dies_before_it_acknowledges = False
            await consumer.until(lambda: consumer.acknowledged == 2)

    asyncio.run(run())

    assert len(billing.orders) == 2
    assert set(billing.duplicates) == set(billing.orders)


def test_a_running_consumer_handles_what_comes_after_its_stream_was_made_again(billing: Billing) -> None:
    """It does not notice: its subscription works on, and the sequences begin again at 1."""

    async def run() -> None:
        async with consuming(billing) as consumer:
            consumer.identify = inboxes.nats.by_sequence
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 1)

            await consumer.stream.delete()
            await consumer.stream.create()
            await consumer.stream.js.add_consumer(consumer.stream.name, consumer.config)
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 2)

    asyncio.run(run())

    assert [id.split(":")[0] for id in billing.orders] == ["1", "1"]
    assert billing.duplicates == []


def test_a_running_consumer_handles_what_comes_after_its_stream_was_restored(billing: Billing) -> None:
    """The stream keeps the time of its creation, and counts on from the last message of the backup."""

    async def run() -> None:
        async with consuming(billing) as consumer:
            consumer.identify = inboxes.nats.by_sequence
            await consumer.stream.send()
            backup = await consumer.stream.back_up()
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 2)

            await consumer.stream.restore(backup)
            await consumer.stream.js.add_consumer(consumer.stream.name, consumer.config)
            await consumer.stream.send()
            await consumer.until(lambda: consumer.acknowledged == 4)

    asyncio.run(run())

    assert sorted(id.split(":")[0] for id in billing.orders) == ["1", "2", "2"]
    assert [id.split(":")[0] for id in billing.duplicates] == ["1"]


def test_a_message_whose_time_has_no_zone_is_refused(billing: Billing) -> None:
    message = first_message(billing)
    naive = SimpleNamespace(
        headers=None,
        metadata=SimpleNamespace(
            stream="orders",
            sequence=message.metadata.sequence,
            timestamp=message.metadata.timestamp.replace(tzinfo=None),
        ),
    )

    with pytest.raises(outbox.InvalidValue, match="must be an aware datetime"):
        inboxes.nats.by_sequence(naive)


def first_message(billing: Billing, **headers: str) -> Any:
    """A message as it comes."""

    async def run() -> Any:
        async with consuming(billing) as consumer:
            await consumer.stream.send(**headers)
            (message,) = await consumer.subscription.fetch(1, timeout=10)
        return message

    return asyncio.run(run())
