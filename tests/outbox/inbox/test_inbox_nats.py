"""The inbox with nats-py, on a NATS server with JetStream at localhost: executes the recipe of docs/inbox-recipes.md.

Skipped where none listens.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from nats.errors import NoServersError
from nats.errors import TimeoutError as NoMessage
from nats.js.api import ConsumerConfig
from support.consumer import Billing, Crash, through_a_relay
from support.database import Database
from support.entries import until_true
from support.recipes import recipe_of
from support.streams import URL, Stream, connected

import outbox
from outbox import inboxes

SECONDS = 0.1  # how long the recipe waits before it tries again


class Consumer:
    """A process that runs the recipe. identify: another function than the recipe's, for the ids of places."""

    def __init__(
        self,
        stream: Stream,
        billing: Billing,
        config: ConsumerConfig,
        identify: Callable[[Any], inboxes.MessageIdentity] | None,
    ) -> None:
        self.stream = stream
        self.config = config
        self.recipe = recipe_of("NATS JetStream, with nats-py", billing.handle)
        self.recipe.PAUSE_SECONDS = SECONDS
        if identify is not None:
            self.recipe.inboxes = SimpleNamespace(from_nats=lambda message, **named: identify(message))

    async def subscribe(self) -> None:
        self.subscription = await self.stream.js.pull_subscribe(self.stream.subject, "billing", config=self.config)

    async def step(self) -> None:
        await self.recipe.step(self.stream.js, self.subscription)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not done():
                await self.step()

    async def until_acknowledged(self, count: int) -> None:
        async with asyncio.timeout(20):
            while (await self.about()).ack_floor.stream_seq < count:
                await self.step()

    async def about(self) -> Any:
        """What the server counts: delivered.consumer_seq is the number of deliveries."""
        await self.stream.client.flush()
        return await self.stream.js.consumer_info(self.stream.name, "billing")


def identify(message: Any) -> inboxes.MessageIdentity:
    return inboxes.from_nats(message, scope="shop", header="Event-Id")


@asynccontextmanager
async def consuming(
    billing: Billing,
    redelivery_seconds: float = 30,
    identify: Callable[[Any], inboxes.MessageIdentity] | None = None,
) -> AsyncIterator[Consumer]:
    async with connected() as stream:
        config = ConsumerConfig(durable_name="billing", ack_wait=redelivery_seconds)
        consumer = Consumer(stream, billing, config, identify)
        await consumer.subscribe()
        yield consumer


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
            await consumer.until_acknowledged(1)

    asyncio.run(run())

    assert billing.orders == ["evt_1"]


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_consumer_left_is_handled_once(billing: Billing, died: str) -> None:
    async def run() -> None:
        async with consuming(billing, redelivery_seconds=0.5) as consumer:
            await consumer.stream.send()
            billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
            with pytest.raises(Crash):
                await consumer.until(lambda: False)
            await consumer.until_acknowledged(1)

    asyncio.run(run())

    assert billing.attempts == 2
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])


def test_an_event_that_is_published_twice_is_handled_once(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            await consumer.stream.send()
            await consumer.stream.send()
            await consumer.until_acknowledged(2)

    asyncio.run(run())

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_kept_at_no_cost(billing: Billing) -> None:
    async def run() -> Any:
        async with consuming(billing) as consumer:
            await consumer.stream.send()
            with billing.elsewhere({"scope": "shop", "message_id": "evt_1"}):
                working = asyncio.create_task(consumer.step())
                await until_true(lambda: billing.attempts > 3)
            await working
            return await consumer.about()

    about = asyncio.run(run())

    assert (about.delivered.consumer_seq, about.ack_floor.stream_seq) == (1, 1)
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_outage_of_the_database_counts_as_no_delivery(postgresql: Database, ob: outbox.Outbox) -> None:
    """It is longer than the server waits for an acknowledgement, and another process asks for messages meanwhile."""

    async def run() -> Any:
        async with consuming(billing, redelivery_seconds=1) as consumer:
            await consumer.stream.send()
            between.refuse()
            working = asyncio.create_task(consumer.step())
            await until_true(lambda: billing.attempts > 0)
            with pytest.raises(NoMessage):
                await consumer.subscription.fetch(1, timeout=2.5)
            assert billing.attempts > consumer.recipe.MAX_DELIVERIES
            between.accept()
            await working
            return await consumer.about()

    with through_a_relay(postgresql, ob) as (billing, between):
        about = asyncio.run(run())
        assert billing.orders == ["evt_1"]

    assert (about.delivered.consumer_seq, about.ack_floor.stream_seq) == (1, 1)
    assert billing.duplicates == []


def test_the_event_loop_runs_while_a_message_is_handled(billing: Billing) -> None:
    noticed = threading.Event()

    def handle(*arguments: Any) -> None:
        billing.handle(*arguments)
        assert noticed.wait(10)

    async def run() -> Any:
        async with consuming(billing) as consumer:
            consumer.recipe.handle = handle
            await consumer.stream.send()
            working = asyncio.create_task(consumer.step())
            await until_true(lambda: billing.orders == ["evt_1"])
            noticed.set()
            await working
            return await consumer.about()

    assert asyncio.run(run()).ack_floor.stream_seq == 1


def test_a_message_that_fails_comes_again_and_its_work_is_done_once(billing: Billing) -> None:
    async def run() -> Any:
        async with consuming(billing) as consumer:
            billing.poison = {"evt_1"}
            await consumer.stream.send()
            await consumer.until(lambda: billing.attempts == consumer.recipe.MAX_DELIVERIES - 1)
            assert billing.nothing_is_stored
            billing.poison.clear()
            await consumer.until_acknowledged(1)
            return await consumer.stream.messages(consumer.stream.dead)

    assert asyncio.run(run()) == 0
    assert billing.orders == ["evt_1"]


def test_a_poison_message_is_parked_and_handled_once_when_redriven(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing) as consumer:
            billing.poison = {"evt_1"}
            await consumer.stream.send()
            await consumer.until_acknowledged(1)
            assert billing.attempts == consumer.recipe.MAX_DELIVERIES
            assert await consumer.stream.messages(consumer.stream.dead) == 1
            assert billing.nothing_is_stored

            billing.poison.clear()
            await consumer.stream.redrive()
            await consumer.stream.redrive()  # by an operator who presses twice
            await consumer.until_acknowledged(3)

    asyncio.run(run())

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_redrive_under_the_streams_own_message_id_is_dropped_by_it(billing: Billing) -> None:
    """Why the recipe gives the event's id a header of its own."""

    async def run() -> Any:
        async with connected() as stream:
            await stream.send(**{"Nats-Msg-Id": "evt_1"})
            return await stream.send(**{"Nats-Msg-Id": "evt_1"})

    assert asyncio.run(run()).duplicate


def test_by_default_the_event_id_is_the_one_the_stream_deduplicates_by(billing: Billing) -> None:
    message = first_message(billing, **{"Nats-Msg-Id": "evt_7"})

    assert inboxes.from_nats(message, scope="shop") == {"scope": "shop", "message_id": "evt_7"}


def test_a_message_without_the_header_is_refused(billing: Billing) -> None:
    message = first_message(billing, Other="1")

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == "header 'Event-Id' None: is missing or empty: the producer must send it"


def test_two_headers_that_differ_in_case_alone_are_refused(billing: Billing) -> None:
    message = first_message(billing, **{"Event-Id": "evt_1", "event-id": "evt_2"})

    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == "header 'Event-Id': occurs 2 times in the message: an event id must occur once"


# --- by its place in the stream


def test_by_sequence_a_redelivery_is_a_duplicate_and_another_is_not(billing: Billing) -> None:
    async def run() -> None:
        async with consuming(billing, redelivery_seconds=0.5, identify=inboxes.from_nats_sequence) as consumer:
            await consumer.stream.send()
            await consumer.stream.send()
            billing.dies_after_its_commit = True
            with pytest.raises(Crash):
                await consumer.step()
            await consumer.until_acknowledged(2)

    asyncio.run(run())

    assert [id.split(":")[0] for id in billing.orders] == ["1", "2"]
    assert [id.split(":")[0] for id in billing.duplicates] == ["1"]


def test_a_running_consumer_continues_after_its_stream_was_made_again(billing: Billing) -> None:
    """It does not notice: its subscription works on, and the sequences begin again at 1."""

    async def run() -> None:
        async with consuming(billing, identify=inboxes.from_nats_sequence) as consumer:
            await consumer.stream.send()
            await consumer.until_acknowledged(1)

            await consumer.stream.delete()
            await consumer.stream.create()
            await consumer.stream.js.add_consumer(consumer.stream.name, consumer.config)
            await consumer.stream.send()
            await consumer.until_acknowledged(1)

    asyncio.run(run())

    assert [id.split(":")[0] for id in billing.orders] == ["1", "1"]
    assert billing.duplicates == []


def test_a_running_consumer_continues_after_its_stream_was_restored(billing: Billing) -> None:
    """The stream keeps the time of its creation, and counts on from the last message of the backup."""

    async def run() -> None:
        async with consuming(billing, identify=inboxes.from_nats_sequence) as consumer:
            await consumer.stream.send()
            backup = await consumer.stream.back_up()
            await consumer.stream.send()
            await consumer.until_acknowledged(2)

            await consumer.stream.restore(backup)
            await consumer.stream.js.add_consumer(consumer.stream.name, consumer.config)
            await consumer.stream.send()
            await consumer.until_acknowledged(2)

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
        inboxes.from_nats_sequence(naive)


def first_message(billing: Billing, **headers: str) -> Any:
    """A message as it comes."""

    async def run() -> Any:
        async with consuming(billing) as consumer:
            await consumer.stream.send(**headers)
            (message,) = await consumer.subscription.fetch(1, timeout=10)
        return message

    return asyncio.run(run())
