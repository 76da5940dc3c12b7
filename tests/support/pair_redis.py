"""Redis Streams between an outbox and an inbox: a server that appends each write to its file, and is killed."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from dispatchers import Adapter
from dispatchers.adapters import RedisAdapter
from outbox import inboxes
from support.broker_pair import Received
from support.redis_servers import Server, running_servers

STREAM, GROUP = "orders.placed", "billing"
BATCH = 200
IDLE_MILLISECONDS = 1_000


class RedisPair:
    """`support.broker_pair.Broker` for Redis."""

    def __init__(self, server: Server) -> None:
        self.place: dict[str, Any] = {"url": server.url}
        self._server = server
        server.ask("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator["RedisPair"]:
        with running_servers(folder, 1) as (server,):
            yield cls(server)

    def kill_one(self) -> None:
        self._server.kill()
        self._server.start()

    @staticmethod
    def adapter(place: dict[str, Any]) -> Adapter:
        return RedisAdapter(urls=place["url"], at_least_once=True, timeout=timedelta(seconds=2))

    @staticmethod
    async def consume(place: dict[str, Any], apply: Callable[[Sequence[Received]], list[str]]) -> None:
        client = Redis.from_url(place["url"])
        while True:
            try:
                _, left, _ = await client.xautoclaim(STREAM, GROUP, "one", IDLE_MILLISECONDS, count=BATCH)
                new = await client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=BATCH, block=100)
            except RedisError:  # it starts
                await asyncio.sleep(0.1)
                continue
            messages = [*left, *(new[0][1] if new else ())]
            received = {
                id: (inboxes.from_redis(fields, scope="shop"), json.loads(fields[b"payload"]))
                for id, fields in messages
            }
            applied = await asyncio.to_thread(apply, list(received.values())) if received else []
            done = [id for id, (identity, _) in received.items() if identity["message_id"] in applied]
            if done:
                with suppress(RedisError):  # they come again, as duplicates
                    await client.xack(STREAM, GROUP, *done)

    def stored(self) -> int:
        return int(self._server.ask("XLEN", STREAM))
