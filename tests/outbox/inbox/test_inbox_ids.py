"""The id that `outbox.inboxes` reads from a message. The messages here have the attributes that the client libraries give them;
`test_inbox_recipes.py` has messages of the brokers themselves, and `tests/adapters/` those of the adapters."""

from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, Uuid

import outbox
from outbox import inboxes


def kafka(headers: Any = None, partition: int | None = 0, offset: int | None = 7, leader_epoch: int | None = 3) -> Any:
    given = {"headers": headers, "partition": partition, "offset": offset, "leader_epoch": leader_epoch}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in given.items()})


def nats(timestamp: datetime | None = None, **headers: str) -> Any:
    sequence = SimpleNamespace(stream=7)
    place = SimpleNamespace(stream="orders", sequence=sequence, timestamp=timestamp)
    return SimpleNamespace(headers=headers or None, metadata=place)


def eventbridge(detail: Any) -> dict[str, Any]:
    return {"id": "6a7e8feb-b491", "detail": detail}


def sqs(value: str) -> dict[str, Any]:
    return {"MessageId": "5c9a", "MessageAttributes": {"event_id": {"DataType": "String", "StringValue": value}}}


@pytest.mark.parametrize(
    ("identify", "message"),
    [
        (inboxes.from_eventbridge, eventbridge({"metadata": {"event_id": "evt_1"}, "data": {"event_id": "other"}})),
        (inboxes.from_kafka, kafka([("event_id", b"evt_1"), ("other", b"evt_2")])),
        (inboxes.from_nats, nats(**{"Nats-Msg-Id": "evt_1", "Event-Id": "evt_2"})),
        (inboxes.from_rabbitmq, SimpleNamespace(message_id="evt_1")),
        (inboxes.from_redis, {b"event_id": b"evt_1"}),
        (inboxes.from_redis, {"event_id": "evt_1"}),
        (partial(inboxes.from_redis, field="id"), {b"event_id": b"evt_2", b"id": b"evt_1"}),
        (inboxes.from_sqs, sqs("evt_1")),
    ],
)
def test_the_id_is_the_producer_s_and_the_scope_the_caller_s(identify: Any, message: Any) -> None:
    assert identify(message, scope="shop") == {"scope": "shop", "message_id": "evt_1"}


@pytest.mark.parametrize(
    ("identify", "message", "text"),
    [
        *(
            (inboxes.from_eventbridge, eventbridge(detail), "detail.metadata.event_id None: is missing or empty")
            for detail in (None, [], {}, {"metadata": "evt_1"}, {"metadata": {}})
        ),
        (
            inboxes.from_eventbridge,
            eventbridge({"metadata": {"event_id": 7}}),
            "detail.metadata.event_id 7: is missing",
        ),
        (inboxes.from_kafka, kafka([]), "header 'event_id' None: is missing or empty: the producer must send it"),
        (inboxes.from_kafka, kafka([("event_id", b"")]), "header 'event_id' '': is missing or empty"),
        (inboxes.from_kafka, kafka([("event_id", b"\xff")]), r"header 'event_id' b'\xff': is not UTF-8"),
        (
            inboxes.from_kafka,
            kafka([("event_id", b"1"), ("event_id", b"2")]),
            "header 'event_id': occurs 2 times in the message: an event id must occur once",
        ),
        (inboxes.from_nats, nats(Other="1"), "header 'Nats-Msg-Id' None: is missing or empty: the producer must"),
        (
            partial(inboxes.from_nats, header="Event-Id"),
            nats(**{"Event-Id": "evt_1", "event-id": "evt_2"}),
            "header 'Event-Id': occurs 2 times in the message: an event id must occur once",
        ),
        (inboxes.from_rabbitmq, SimpleNamespace(message_id=None), "property message_id None: is missing or empty:"),
        (inboxes.from_redis, {}, "field 'event_id' None: is missing or empty: the producer must send it"),
        (inboxes.from_redis, {b"event_id": b""}, "field 'event_id' '': is missing or empty: the producer must send it"),
        (inboxes.from_redis, {b"event_id": b"\xff"}, r"field 'event_id' b'\xff': is not UTF-8"),
        (
            inboxes.from_sqs,
            {"MessageId": "5c9a"},
            "message attribute 'event_id' None: is missing or empty: the producer must send it, and receive_message must"
            " name it in MessageAttributeNames",
        ),
    ],
)
def test_a_message_without_exactly_one_readable_id_is_refused(identify: Any, message: Any, text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message, scope="shop")

    assert str(caught.value).startswith(text)


# --- the place of a message


def test_the_same_offset_of_another_partition_or_leader_is_another_message() -> None:
    places = [kafka(), kafka(partition=1), kafka(leader_epoch=4), kafka(leader_epoch=None)]

    ids = [inboxes.from_kafka_offset(place, cluster="c", topic_id="t")["message_id"] for place in places]

    assert ids == ["0:7:3", "1:7:3", "0:7:4", "0:7"]


def test_names_of_clusters_and_topics_differ_wherever_their_boundary_is() -> None:
    first, second = ({"cluster": "a:b", "topic_id": "c"}, {"cluster": "a", "topic_id": "b:c"})

    assert inboxes.from_kafka_offset(kafka(), **first) != inboxes.from_kafka_offset(kafka(), **second)


def test_the_same_sequence_at_another_time_is_another_message() -> None:
    times = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))

    first, second = (inboxes.from_nats_sequence(nats(time)) for time in times)

    assert first == {"scope": "nats:orders", "message_id": "7:1767225600000000"}
    assert second != first


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"source": None}, "attribute 'source' None: is missing or empty: the producer must set it"),
        ({"id": None}, "attribute 'id' None: is missing or empty: the producer must set it"),
        (
            {"sender": ""},
            "sender '': must be a str that is not empty: who sent the event, as authenticated, or one name for all senders"
            " that trust each other",
        ),
    ],
)
def test_a_cloudevent_without_an_id_a_source_or_a_sender_is_refused(changed: dict[str, Any], text: str) -> None:
    given = {"id": "evt_1", "source": "/shop", "sender": "shop"} | changed

    with pytest.raises(outbox.InvalidValue) as caught:
        inboxes.from_cloudevents(given, sender=given["sender"])

    assert str(caught.value) == text


BY_OFFSET = partial(inboxes.from_kafka_offset, cluster="c", topic_id="t")
NO_NAME = "must be a str that is not empty: take it from AdminClient.describe_cluster(), describe_topics()"
NO_PLACE = "is not a position in a log: pass messages of a consumer"


@pytest.mark.parametrize(
    ("identify", "message", "text"),
    [
        (partial(BY_OFFSET, cluster=""), kafka(), f"cluster '': {NO_NAME}"),
        (partial(BY_OFFSET, cluster=None), kafka(), f"cluster None: {NO_NAME}"),
        (partial(BY_OFFSET, topic_id=""), kafka(), f"topic_id '': {NO_NAME}"),
        (partial(BY_OFFSET, topic_id=None), kafka(), f"topic_id None: {NO_NAME}"),
        (
            partial(BY_OFFSET, topic_id=str(Uuid(0, 0))),
            kafka(),
            "topic_id 'AAAAAAAAAAAAAAAAAAAAAA': is not an id: the broker reports none, so use from_kafka",
        ),
        (BY_OFFSET, kafka(offset=None), f"offset None: {NO_PLACE}"),
        (BY_OFFSET, kafka(partition=None), f"offset 7: {NO_PLACE}"),
        (BY_OFFSET, kafka(offset=OFFSET_INVALID), f"offset {OFFSET_INVALID}: {NO_PLACE}"),
        (BY_OFFSET, kafka(partition=-1), f"offset 7: {NO_PLACE}"),
        (
            inboxes.from_nats_sequence,
            nats(datetime(2026, 1, 1)),
            "metadata.timestamp datetime.datetime(2026, 1, 1, 0, 0): must be an aware datetime",
        ),
        (
            partial(inboxes.from_sqs_message_id, queue=""),
            {"MessageId": "1"},
            "queue '': must be a str that is not empty: the ARN of the queue",
        ),
        (
            partial(inboxes.from_sqs_message_id, queue="arn"),
            {},
            "MessageId None: is missing or empty: pass a message as receive_message returns it",
        ),
    ],
)
def test_a_message_without_a_place_of_its_own_is_refused(identify: Any, message: Any, text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        identify(message)

    assert str(caught.value) == text
