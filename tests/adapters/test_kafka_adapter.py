"""KafkaAdapter: the records that it writes, and what it does around librdkafka. See `test_conformance_kafka.py` too."""

import asyncio
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Message
from support.deliveries import delivery
from support.faulty_kafka import DELIVER, MSG_SIZE_TOO_LARGE, REFUSE, FaultyKafka, faulty_kafka

from dispatchers import Deferred, Delivered, Delivery, Outcome, Rejected, Unknown
from dispatchers.adapters import KafkaAdapter
from dispatchers.adapters.brokers import kafka_producer
from dispatchers.testing.attempts import sent
from outbox import inboxes

OUT_OF_ORDER_SEQUENCE_NUMBER = 45
REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND = 7, 20
TOPIC_AUTHORIZATION_FAILED = 29


@pytest.fixture
def kafka() -> Iterator[FaultyKafka]:
    with faulty_kafka() as faulty:
        yield faulty


def run(adapter: KafkaAdapter, work: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        try:
            return await work
        finally:
            await adapter.aclose()

    return asyncio.run(main())


def send(adapter: KafkaAdapter, *deliveries: Delivery) -> list[Outcome]:
    """One after the other."""

    async def main() -> list[Outcome]:
        return [await sent(adapter, each) for each in deliveries]

    outcomes: list[Outcome] = run(adapter, main())
    return outcomes


def event_id(message: Message) -> str:
    return inboxes.from_kafka(message, scope="shop", header="event_id")["message_id"]


def test_a_record_has_the_child_key_where_an_inbox_finds_it(kafka: FaultyKafka) -> None:
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic)

    (outcome,) = send(adapter, delivery("ck1_a", headers={"traceparent": "00-1"}, ordering_key="customer:ada"))

    (record,) = kafka.records
    place = {"topic": kafka.topic, "partition": record.partition(), "offset": record.offset()}
    assert outcome == Delivered(place)
    assert event_id(record) == "ck1_a"
    assert (record.key(), record.value()) == (b"customer:ada", b'{"amount": 2000}')
    assert ("traceparent", b"00-1") in record.headers()


def test_an_option_names_the_topic_of_an_entry(kafka: FaultyKafka) -> None:
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic="not-used")

    outcomes = send(adapter, delivery(options={"topic": kafka.topic}), delivery(options={"partition": 1}))

    assert [type(outcome) for outcome in outcomes] == [Delivered, Rejected]
    assert len(kafka.records) == 1


def test_sends_at_once_ask_for_the_topic_once(kafka: FaultyKafka) -> None:
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic)

    async def at_once() -> tuple[int, int]:
        await sent(adapter, delivery())
        asked = len(kafka.topics_asked)
        await asyncio.gather(*(sent(adapter, delivery(f"ck1_{number}")) for number in range(50)))
        return asked, len(kafka.topics_asked)

    before, after = run(adapter, at_once())

    assert before == after
    assert len(kafka.records) == 51


def test_an_entry_is_not_in_doubt_if_the_brokers_went_away_before_it(
    kafka: FaultyKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_producer, "FRESH_SECONDS", 0.0)  # else the first answer may still count
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic, timeout=timedelta(seconds=5))

    async def around_the_end() -> list[Outcome]:
        first = await sent(adapter, delivery("ck1_a"))
        kafka.behave(REFUSE)
        return [first, await sent(adapter, delivery("ck1_b"))]

    outcomes = run(adapter, around_the_end())

    assert [type(outcome) for outcome in outcomes] == [Delivered, Deferred]
    assert outcomes[1].reason.startswith("nothing was sent")


def test_records_that_are_too_large_together_are_sent_alone(kafka: FaultyKafka) -> None:
    kafka.max_bytes = 1_000
    never = {"retry.backoff.ms": 60_000, "retry.backoff.max.ms": 60_000}  # a loaded machine answers late
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic, client_options=never)

    async def at_once() -> list[Outcome]:
        await sent(adapter, delivery())
        small = [delivery(f"ck1_{number}") for number in range(50)]
        large = delivery("ck1_large", headers={"tracestate": "x" * 1_000})
        return list(await asyncio.gather(*(sent(adapter, each) for each in (large, *small))))

    large, *small = run(adapter, at_once())

    assert large == Rejected("MSG_SIZE_TOO_LARGE")
    assert {type(outcome) for outcome in small} == {Delivered}
    assert len({event_id(record) for record in kafka.records}) == len(kafka.records) == 51


def test_a_fatal_error_ends_one_producer_and_not_the_adapter(kafka: FaultyKafka) -> None:
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic)
    kafka.behave((OUT_OF_ORDER_SEQUENCE_NUMBER, DELIVER))

    outcomes = send(adapter, delivery("ck1_a"), delivery("ck1_b"))

    assert [type(outcome) for outcome in outcomes] == [Unknown, Delivered]
    assert [event_id(record) for record in kafka.records] == ["ck1_b"]


@pytest.mark.parametrize("first", [REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND])
@pytest.mark.parametrize("then", [MSG_SIZE_TOO_LARGE, TOPIC_AUTHORIZATION_FAILED])
def test_a_repetition_that_is_refused_leaves_the_record_in_doubt(kafka: FaultyKafka, first: int, then: int) -> None:
    """With the first answer the broker has appended the record, and librdkafka repeats the request."""
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic)
    kafka.behave((first, then))

    (outcome,) = send(adapter, delivery())

    assert isinstance(outcome, Unknown)


def test_what_cannot_be_sent_in_time_is_not_sent(kafka: FaultyKafka) -> None:
    """librdkafka would send it after the deadline, when the dispatcher has given the entry up."""
    adapter = KafkaAdapter(bootstrap_servers=kafka.servers, topic=kafka.topic, timeout=timedelta(seconds=10))

    async def with_little_time() -> Outcome:
        deadline = asyncio.get_running_loop().time() + 5.9
        return await adapter.send(delivery()._replace(deadline=deadline))

    outcome = run(adapter, with_little_time())

    assert isinstance(outcome, Deferred)
    assert kafka.records == []
