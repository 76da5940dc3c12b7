"""A Kafka broker for tests: the mock cluster inside librdkafka, and a relay in front of it that can treat requests badly.

The mock cluster speaks Kafka's protocol over loopback. It is no Kafka: it neither replicates nor recognises repetitions.
"""

import asyncio
import math
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition

PRODUCE, METADATA = 0, 3  # API keys
MSG_SIZE_TOO_LARGE = 10
HOST = b"127.0.0.1"
DUPLICATE_SEQUENCE_NUMBER = 46

DELIVER = "deliver"
REFUSE = "refuse connections"
DEAF = "read and answer nothing"
SWALLOW = "append, and answer nothing"
CUT = "append, and close the connection"


class Cluster:
    """The mock cluster: one broker, for all tests of a process."""

    def __init__(self) -> None:
        settings = {"bootstrap.servers": "replaced by the mock cluster's", "test.mock.num.brokers": 1, "log_level": 0}
        self._producer = Producer(settings)
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.port = broker.port
        self._consumer = Consumer(
            {
                **{"bootstrap.servers": f"127.0.0.1:{self.port}", "group.id": "tests", "log_level": 0},
                **{"fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 10},
            }
        )

    def read(self, topic: str) -> list[Message]:
        """All records of a topic."""
        partitions = self._consumer.list_topics(topic, timeout=10).topics[topic].partitions
        places = [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions]
        end = sum(self._consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        if not end:
            return []
        self._consumer.assign(places)
        read: list[Message] = []
        while len(read) < end:
            read += self._consumer.consume(end - len(read), 0.5)
        self._consumer.unassign()
        return read


@cache
def cluster() -> Cluster:
    return Cluster()


class FaultyKafka:
    """A topic of its own, reached through a relay. It treats the n-th produce request as the n-th of its `answers` says, and
    each later one as the last.

    topics_asked: the requests for the topic's metadata. max_bytes: of a produce request; a larger one is refused.
    """

    max_bytes = math.inf

    def __init__(self) -> None:
        self.topic = f"orders-{uuid4().hex[:8]}"
        self.port = 0
        self.answers: tuple[str | int, ...] = (DELIVER,)
        self.topics_asked: list[bytes] = []
        self._produced = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="kafka-relay", daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def records(self) -> list[Message]:
        return cluster().read(self.topic)

    @property
    def requests(self) -> list[bytes]:
        """What is equal in each attempt at one entry."""
        return [repr((each.key(), each.value(), each.headers())).encode() for each in self.records]

    def behave(self, answers: str | int | tuple[str | int, ...]) -> None:
        self.answers = answers if isinstance(answers, tuple) else (answers,)
        self._call(self._change)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._call(self._stopping.set)
        self._thread.join(60)

    def _change(self) -> None:
        self._produced = 0
        if self.answers == (REFUSE,):
            self._stopping.set()
        for writer in self._writers:
            writer.transport.abort()

    def _call(self, change: Callable[[], None]) -> None:
        done = threading.Event()
        with suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(lambda: (change(), done.set()))
            assert done.wait(60)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", cluster().port)
        self._writers |= {writer, far_writer}
        answers = asyncio.Event()
        answers.set()
        try:
            with suppress(ConnectionError, asyncio.CancelledError):
                await asyncio.gather(
                    self._up(reader, writer, far_writer, answers), self._down(far_reader, writer, answers)
                )
        finally:
            for each in (writer, far_writer):
                each.transport.abort()
                self._writers.discard(each)

    async def _up(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_writer: asyncio.StreamWriter,
        answers: asyncio.Event,
    ) -> None:
        async for frame in frames(reader):
            if self.answers == (DEAF,):
                continue
            api_key = struct.unpack_from(">h", frame)[0]
            if api_key == METADATA and self.topic.encode() in frame:
                self.topics_asked.append(frame)
            if api_key != PRODUCE:
                far_writer.write(framed(frame))
                continue
            answer = self.answers[min(self._produced, len(self.answers) - 1)]
            self._produced += 1
            if len(frame) > self.max_bytes:
                answer = MSG_SIZE_TOO_LARGE
            if isinstance(answer, int):
                writer.write(framed(refusal(frame, answer)))
                continue
            if answer != DELIVER:
                answers.clear()
            if self._produced == 1 or answer == DELIVER:  # the mock cluster would append a repetition once more
                far_writer.write(framed(frame))
            if answer == CUT:
                await asyncio.to_thread(self._until_appended)
                writer.transport.abort()

    async def _down(
        self, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: asyncio.Event
    ) -> None:
        """The broker's answers, with the relay's port in place of the broker's. Without `answers` they are lost."""
        theirs, own = (HOST + struct.pack(">i", port) for port in (cluster().port, self.port))
        async for frame in frames(far_reader):
            if answers.is_set():
                writer.write(framed(frame.replace(theirs, own)))

    def _until_appended(self) -> None:
        while not self.records:
            pass


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    with suppress(asyncio.IncompleteReadError):
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            yield await reader.readexactly(size)


def framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def refusal(request: bytes, code: int) -> bytes:
    """The answer with this error code to a produce request of version 9 or 10 for one partition."""
    _, version, correlation, client_chars = struct.unpack_from(">hhih", request)
    assert version in (9, 10), version
    at = 10 + client_chars + 1 + 1 + 2 + 4  # the tags, no transactional id, acks, timeout
    topics, name_chars = request[at], request[at + 1]  # each is one more than the number
    name = request[at + 1 : at + 1 + name_chars]
    partitions = request[at + 1 + name_chars]
    assert (topics, partitions) == (2, 2), "one topic, one partition"
    index = request[at + 2 + name_chars : at + 6 + name_chars]
    partition = index + struct.pack(">hqqq", code, -1, -1, -1) + b"\x01\x00\x00"
    return struct.pack(">i", correlation) + b"\x00\x02" + name + b"\x02" + partition + b"\x00" + bytes(4) + b"\x00"


@contextmanager
def faulty_kafka() -> Iterator[FaultyKafka]:
    faulty = FaultyKafka()
    try:
        yield faulty
    finally:
        faulty.stop()
