"""One idempotent producer of librdkafka, and the thread that serves its callbacks."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from dispatchers.adapters.brokers.kafka_answers import delivered, not_accepted, not_delivered, unreachable
from dispatchers.delivery import Deferred, Outcome

POLL_SECONDS: Final = 0.05  # how long closing may wait for the thread
DOWN_SHARE: Final = 4  # a check that finds all brokers down ends after this part of its time
RETRY_JITTER: Final = 0.2  # of librdkafka: a repetition leaves that part of its backoff earlier or later
FRESH_SECONDS: Final = 1.0  # how long an answer proves that the brokers of a topic are there


class Record(NamedTuple):
    """What is produced. The repr shows no content."""

    topic: str
    key: str | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]

    def __repr__(self) -> str:
        return f"Record(topic={self.topic!r})"


Report = tuple["asyncio.Future[Outcome]", Outcome]


class RunningProducer:
    """Produces records, and reports the outcome of each to its event loop. One thread serves the reports, many at a time.

    settings: of librdkafka. Raises KafkaException for a setting that it does not know.
    is_broken: a fatal error has ended it: it takes no more records.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.is_broken = False
        self._disturbed_at = -math.inf
        backoff = min(float(settings.get("retry.backoff.ms", 100)), float(settings.get("retry.backoff.max.ms", 1000)))
        self._repeats_after = (1 - RETRY_JITTER) * backoff / 1000
        self._is_down = False
        self._last_error: KafkaError | None = None
        self._answered_at: dict[str, float] = {}
        self._reports: list[Report] = []
        self._stopping = Event()
        self._checks = 0
        self._checks_changed = Condition()
        self._producer = Producer({**settings, "error_cb": self._note_error})
        self._thread = Thread(target=self._serve, name="outbox-kafka", daemon=True)
        self._thread.start()

    def produce(self, record: Record) -> "asyncio.Future[Outcome]":
        """The outcome of this record. Raises KafkaException or BufferError if librdkafka does not take it; nothing is sent."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        began = monotonic()

        def note_report(error: KafkaError | None, message: Message) -> None:
            self._reports.append((outcome, self._outcome_of(error, message, record.topic, began)))

        self._producer.produce(
            record.topic, record.value, key=record.key, headers=list(record.headers), on_delivery=note_report
        )
        return outcome

    def is_proven(self, topic: str) -> bool:
        """Whether the brokers have just answered for this topic, and no connection has failed since."""
        return monotonic() - self._answered_at.get(topic, -math.inf) < FRESH_SECONDS

    def check(self, topic: str, seconds: float) -> Outcome | None:
        """Ask the brokers for the topic, for at most `seconds`. None if each of its partitions has a leader. Blocks.

        A record for a broker that cannot be reached would wait in librdkafka's queue, and would end as unknown.
        """
        with self._checks_changed:
            self._checks += 1
        try:
            found = self._topic(topic, seconds)
        except KafkaException as error:
            return unreachable(self._last_error or error.args[0])
        finally:
            with self._checks_changed:
                self._checks -= 1
                self._checks_changed.notify_all()
        if found.error is not None:
            return not_accepted(found.error)
        if not found.partitions or any(partition.leader < 0 for partition in found.partitions.values()):
            return Deferred("nothing was sent: a partition of the topic has no leader")
        self._note_answer(topic)
        return None

    def close(self) -> None:
        """Drop the records that wait, and end. A record in flight is unknown. Blocks until a running check has ended."""
        self._stopping.set()
        self._thread.join()
        with self._checks_changed:  # librdkafka may not be closed while another thread uses it
            self._checks_changed.wait_for(lambda: not self._checks)
        self._producer.purge()
        self._poll(0)
        self._producer.close()

    def _topic(self, topic: str, seconds: float) -> Any:
        """What the brokers know of the topic. librdkafka itself would wait for the whole time if all brokers are down."""
        began = monotonic()
        while True:
            try:
                return self._producer.list_topics(topic, timeout=seconds / DOWN_SHARE).topics[topic]
            except KafkaException:
                if self._is_down or monotonic() >= began + seconds:
                    raise

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._poll(POLL_SECONDS)

    def _poll(self, seconds: float) -> None:
        try:
            self._producer.poll(seconds)
        except KafkaException:  # a fatal error comes so, and not to `_note_error`; the next calls serve the reports
            self._disturbed_at = monotonic()
            self.is_broken = True
        self._hand_over()

    def _hand_over(self) -> None:
        reports, self._reports = self._reports, []
        for loop, group in groupby(reports, key=lambda report: report[0].get_loop()):
            with suppress(RuntimeError):  # the loop is closed, and its sends have ended
                loop.call_soon_threadsafe(_resolve, list(group))

    def _outcome_of(self, error: KafkaError | None, message: Message, topic: str, began: float) -> Outcome:
        if error is None:
            self._note_answer(topic)
            return delivered(topic, message.partition(), message.offset())
        self._answered_at.clear()
        self.is_broken |= error.fatal()
        may_be_repeated = self._disturbed_at >= began or monotonic() - began >= self._repeats_after
        return not_delivered(error, may_be_repeated=may_be_repeated)

    def _note_answer(self, topic: str) -> None:
        self._is_down, self._last_error = False, None
        self._answered_at[topic] = monotonic()

    def _note_error(self, error: KafkaError) -> None:
        """librdkafka's `error_cb`: a connection failed, or all of them. Comes before the reports that follow."""
        self._disturbed_at = monotonic()
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._is_down = True
        else:
            self._last_error = error
        self._answered_at.clear()


def _resolve(reports: Sequence[Report]) -> None:
    for waiting, outcome in reports:
        if not waiting.done():
            waiting.set_result(outcome)
