"""Sends of NatsAdapter that wait for the stream's configuration, with an imitation of the server."""

import asyncio
import threading

import pytest
from support.deliveries import ask
from support.fake_broker import HANG
from support.fake_nats import STREAM, FakeNats

from dispatchers import Deferred, Delivered, Outcome
from dispatchers.adapters import NatsAdapter
from dispatchers.adapters.brokers import nats_connection


class Freezing(FakeNats):
    """After `freeze` its present connections get no answer about the stream. asked: one such request came."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.published = threading.Event()
        self._known: set[asyncio.StreamWriter] = set()
        self._frozen: set[asyncio.StreamWriter] = set()

    def freeze(self) -> None:
        self._frozen |= self._known

    async def _command(self, line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._known.add(writer)
        if writer in self._frozen and b"STREAM.INFO" in line:
            await reader.readexactly(int(line.split()[-1]) + 2)
            self.asked.set()
            return
        await super()._command(line, reader, writer)

    async def _take(self, subject: str, reply: str, writer: asyncio.StreamWriter) -> None:
        self.published.set()
        await super()._take(subject, reply, writer)


def test_a_send_that_checks_the_stream_outlives_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another send has missed its deadline on the same connection, and the next one opens a new connection."""
    monkeypatch.setattr(nats_connection, "CHECK_SECONDS", 0)

    async def run(server: Freezing) -> list[Outcome]:
        adapter = NatsAdapter(urls=f"nats://127.0.0.1:{server.port}", stream=STREAM)
        server.behave({"publish": HANG})
        unanswered = asyncio.create_task(ask(adapter, key="ck1_unanswered"))
        assert await asyncio.to_thread(server.published.wait, 20)
        server.freeze()
        checking = asyncio.create_task(ask(adapter, key="ck1_checking"))
        assert await asyncio.to_thread(server.asked.wait, 20)
        unanswered.cancel()
        await asyncio.wait([unanswered])
        server.behave({})
        following = await ask(adapter, key="ck1_following")
        checked = await checking
        await adapter.aclose()
        return [following, checked]

    with Freezing() as server:
        following, checked = asyncio.run(run(server))

    assert isinstance(following, Delivered)
    assert isinstance(checked, Deferred)
