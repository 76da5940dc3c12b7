"""Kafka: produces each entry as one record, with librdkafka's idempotent producer.

    orders = KafkaAdapter(bootstrap_servers="kafka-1:9092,kafka-2:9092")
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.placed", {"number": "C-1"}, parent="order:C-1", ordering_key="customer:ada")

The record goes to the topic `orders.placed`. Its value is the payload's JSON and its key is the entry's ordering key. The child
key is the header `event_id`, where `outbox.inboxes.from_kafka` finds it.
"""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from threading import Thread
from typing import Any, Final

from confluent_kafka import KafkaException

from dispatchers.adapters.brokers.kafka_answers import PERHAPS_TOO_LARGE_TOGETHER, not_accepted
from dispatchers.adapters.brokers.kafka_producer import Record, RunningProducer
from dispatchers.adapters.places import EVENT_ID, OPERATION, Places, PlacesAdapter, Unsendable
from dispatchers.delivery import Deferred, Delivery, Outcome, Rejected
from dispatchers.threads import on_own_thread
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

TIMEOUT_MIN: Final = timedelta(seconds=5)
SCAN_SECONDS: Final = 1.0  # librdkafka expires records once a second
OWN_SETTINGS: Final = frozenset(
    {
        *("bootstrap.servers", "metadata.broker.list", "enable.idempotence", "acks", "request.required.acks"),
        *("message.timeout.ms", "delivery.timeout.ms", "transactional.id", "enable.gapless.guarantee"),
        *("error_cb", "on_delivery", "dr_cb", "dr_msg_cb", "delivery.report.only.error"),
    }
)
"""What the adapter sets itself, because its outcomes depend on it."""


class KafkaAdapter(PlacesAdapter):
    """Produces records with `acks=all`. It needs `confluent-kafka`.

    bootstrap_servers: the brokers to begin with, as host:port, separated by commas.
    topic: the topic of each operation: a template with `{operation}`, or a mapping from operations to topics. An entry's
        `options={"topic": ...}` replaces it.
    at_least_once: whether to produce again after an unknown outcome. Kafka recognises only librdkafka's own repetitions, within
        one send: a second send is a second record, so `window` is None. Set it if every consumer has an inbox.
    timeout: how long one send may take, at least 5 seconds. Half of it is librdkafka's `message.timeout.ms`: no record is sent
        later. A quarter is for reaching the brokers.
    client_options: settings of librdkafka: `security.protocol`, `sasl.password`, `compression.type`. They are never shown.

    Before it produces, the adapter asks the brokers for the topic, unless they have just answered. So an entry for brokers that
    are unreachable is not in doubt. Records are partitioned as Kafka's Java client does it (`murmur2_random`).
    """

    window = None

    def __init__(
        self,
        *,
        bootstrap_servers: str,
        topic: str | Mapping[str, str] = OPERATION,
        at_least_once: bool = False,
        timeout: timedelta = timedelta(seconds=30),
        retry: RetryPolicy = DEFAULT_RETRY,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(bootstrap_servers, str) or not bootstrap_servers:
            raise ConfigurationError(
                f"bootstrap_servers={bootstrap_servers!r} must be host:port, or several with commas"
            )
        if timeout < TIMEOUT_MIN:
            raise ConfigurationError(
                f"timeout={timeout!r} must be at least {TIMEOUT_MIN}: librdkafka counts in seconds"
            )
        if own := sorted(OWN_SETTINGS & (client_options or {}).keys()):
            raise ConfigurationError(f"client_options must not contain {own}: the adapter sets them itself")
        self.at_least_once = at_least_once
        self.timeout = timeout
        self.retry = retry
        self._bootstrap_servers = bootstrap_servers
        self._places = Places("topic", topic)
        self._check_seconds = timeout.total_seconds() / 4
        self._message_seconds = timeout.total_seconds() / 2
        self._settings = {
            "log_level": 2,  # its outcomes report what is wrong; librdkafka writes to stderr
            "partitioner": "murmur2_random",
            "retry.backoff.ms": 1000,  # a refusal that comes earlier cannot be the answer to a repetition
            **(client_options or {}),
            "bootstrap.servers": bootstrap_servers,
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": int(self._message_seconds * 1000),
        }
        self._producers: dict[bool, RunningProducer] = {}  # False: the usual one; True: it sends each record alone
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checks: dict[str, asyncio.Task[Outcome | None]] = {}
        self._try_settings()

    def __repr__(self) -> str:
        return f"KafkaAdapter({self._bootstrap_servers!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            record = self._record(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        latest = delivery.deadline - self._message_seconds - SCAN_SECONDS
        outcome = await self._produced(record, latest)
        if outcome in PERHAPS_TOO_LARGE_TOGETHER:
            outcome = await self._produced(record, latest, alone=True)
        return outcome

    async def _produced(self, record: Record, latest: float, *, alone: bool = False) -> Outcome:
        producer = self._running(alone)
        if not producer.is_proven(record.topic):
            refusal = await self._checked(producer, record.topic, latest)
            if refusal is not None:
                return refusal
        if asyncio.get_running_loop().time() > latest:
            return Deferred("nothing was sent: too little of its time was left")
        try:
            reported = producer.produce(record)
        except KafkaException as error:
            producer.is_broken |= _is_fatal(error)
            return not_accepted(error.args[0] if error.args else error)
        except (BufferError, RuntimeError) as error:  # librdkafka's queue is full; the producer has been closed
            return not_accepted(error)
        return await reported

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            await on_own_thread("outbox-kafka-close", producer.close)
        if self._checks and self._loop is asyncio.get_running_loop():
            await asyncio.wait(self._checks.values())

    def _record(self, delivery: Delivery) -> Record:
        headers = {EVENT_ID: delivery.key, "content-type": "application/json", **delivery.headers}
        return Record(
            self._places.of(delivery),
            delivery.ordering_key,
            delivery.payload_json,
            [(name, value.encode()) for name, value in headers.items()],
        )

    def _running(self, alone: bool) -> RunningProducer:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # tasks end with their event loop, and each `asyncio.run` creates a new one
            self._loop, self._checks = loop, {}
        producer = self._producers.get(alone)
        if producer is not None and producer.is_broken:
            Thread(target=producer.close, name="outbox-kafka-close", daemon=True).start()
            producer = None
        if producer is None:
            settings = {**self._settings, "batch.num.messages": 1} if alone else self._settings
            producer = self._producers[alone] = RunningProducer(settings)
        return producer

    async def _checked(self, producer: RunningProducer, topic: str, latest: float) -> Outcome | None:
        """Why nothing can be sent to the topic now, or None. All sends that need the answer wait for one check."""
        loop = asyncio.get_running_loop()
        check = self._checks.get(topic)
        if check is None or check.done():
            work = on_own_thread("outbox-kafka-check", producer.check, topic, self._check_seconds)
            check = self._checks[topic] = loop.create_task(work)
        await asyncio.wait([check], timeout=latest - loop.time())
        return check.result() if check.done() else Deferred("nothing was sent: the brokers did not answer in time")

    def _try_settings(self) -> None:
        """Raises `ConfigurationError` for a setting that librdkafka does not take. Its text quotes no value."""
        try:
            RunningProducer(self._settings).close()
        except KafkaException as error:
            text = str(error.args[0])
            for value in self._settings.values():
                text = text.replace(f'"{value}"', "that value")
            raise ConfigurationError(f"librdkafka refuses these client_options: {text}") from None


def _is_fatal(error: KafkaException) -> bool:
    return bool(error.args and getattr(error.args[0], "fatal", bool)())
