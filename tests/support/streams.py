"""A stream of NATS JetStream for one test, on a server at localhost."""

import json
from typing import Any
from uuid import uuid4

from nats.js.api import StreamConfig

from support.consumer import ORDER

URL = "nats://127.0.0.1:4222"


class Stream:
    """A stream and the one that poison goes to, of one test's own. The event's id has a header of its own."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.name = f"outbox-test-{uuid4().hex[:8]}"
        self.dead = f"dead-{self.name}"
        self.subject = f"{self.name}.orders"
        self.dead_subject = f"dead.{self.subject}"
        self.js = client.jetstream()

    async def create(self) -> None:
        for name, subject in ((self.name, self.subject), (self.dead, self.dead_subject)):
            await self.js.add_stream(StreamConfig(name=name, subjects=[subject]))

    async def delete(self) -> None:
        for name in (self.name, self.dead):
            await self.js.delete_stream(name)

    async def send(self, **headers: str) -> Any:
        return await self.js.publish(self.subject, json.dumps(ORDER).encode(), headers=headers or {"Event-Id": "evt_1"})

    async def redrive(self) -> None:
        parked = await self.js.get_last_msg(self.dead, self.dead_subject)
        await self.js.publish(self.subject, parked.data, headers=parked.headers)

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
