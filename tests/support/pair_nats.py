"""NATS JetStream between an outbox and an inbox: a cluster of three, whose nodes are killed in turn."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import nats
from nats.errors import Error
from nats.js.api import ConsumerConfig, StreamConfig

from dispatchers import Adapter
from dispatchers.adapters import NatsAdapter
from outbox import inboxes
from support.broker_pair import Received
from support.nats_cluster import Cluster, running_cluster

STREAM, SUBJECTS = "ORDERS", "orders.>"
WINDOW = timedelta(hours=1)
BATCH = 200
ACK_SECONDS = 5


class NatsPair:
    """`support.broker_pair.Broker` for NATS."""

    def __init__(self, cluster: Cluster) -> None:
        self.place: dict[str, Any] = {"servers": cluster.urls}
        self._cluster = cluster
        self._victims = cycle(cluster.nodes)

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator["NatsPair"]:
        with running_cluster(folder) as cluster:
            pair = cls(cluster)
            asyncio.run(pair._create())
            yield pair

    async def _create(self) -> None:
        async with self._cluster.client() as client:
            js = client.jetstream(timeout=10)
            config = StreamConfig(
                name=STREAM, subjects=[SUBJECTS], num_replicas=3, duplicate_window=WINDOW.total_seconds()
            )
            await js.add_stream(config)
            consumer = ConsumerConfig(durable_name="billing", ack_wait=ACK_SECONDS, max_ack_pending=10 * BATCH)
            await js.add_consumer(STREAM, consumer)

    def kill_one(self) -> None:
        node = next(self._victims)
        node.kill()
        node.start()
        asyncio.run(self._cluster.until_whole(STREAM))

    @staticmethod
    def adapter(place: dict[str, Any]) -> Adapter:
        return NatsAdapter(urls=place["servers"], stream=STREAM, window=WINDOW, timeout=timedelta(seconds=2))

    @staticmethod
    async def consume(place: dict[str, Any], apply: Callable[[Sequence[Received]], list[str]]) -> None:
        client = await nats.connect(place["servers"], reconnect_time_wait=0.1, max_reconnect_attempts=-1)
        js = client.jetstream()
        subscription = await js.pull_subscribe_bind("billing", STREAM)
        while True:
            messages: list[Any] = []
            with suppress(Error, TimeoutError):  # none within a second, or no leader
                messages = await subscription.fetch(BATCH, timeout=1)
            received = {
                message.headers["Nats-Msg-Id"]: (
                    inboxes.from_nats(message, scope="shop"),
                    json.loads(message.data),
                )
                for message in messages
            }
            applied = await asyncio.to_thread(apply, list(received.values())) if received else []
            for message in messages:
                if message.headers["Nats-Msg-Id"] in applied:
                    with suppress(Error):  # it comes again, as a duplicate
                        await message.ack()

    def stored(self) -> int:
        async def count() -> int:
            async with self._cluster.client() as client:
                while True:
                    with suppress(Error):
                        return (await client.jetstream(timeout=1).stream_info(STREAM)).state.messages

        return asyncio.run(asyncio.wait_for(count(), 60))
