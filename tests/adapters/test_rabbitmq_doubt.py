"""Which messages RabbitMqAdapter leaves in doubt when a channel ends, with an imitation of the server."""

import asyncio
from datetime import timedelta

from support.daemons import wait_for
from support.deliveries import ask
from support.fake_broker import HANG
from support.fake_rabbitmq import BLOCK, FORBIDDEN, FakeRabbitMq

from dispatchers import Deferred, Delivered, Outcome, Unknown
from dispatchers.adapters import RabbitMqAdapter


def test_a_message_that_waited_to_be_written_is_not_in_doubt() -> None:
    """aiormq writes a few messages at a time. The server refuses the first one, and many of the others still wait."""

    async def run(server: FakeRabbitMq) -> tuple[Outcome, list[Outcome]]:
        adapter = RabbitMqAdapter(urls=f"amqp://127.0.0.1:{server.port}", exchange="shop")
        first = await ask(adapter, key="ck1_first")
        server.behave({"publish": FORBIDDEN})
        outcomes = await asyncio.gather(*(ask(adapter, key=f"ck1_{number:04}") for number in range(5_000)))
        await adapter.aclose()
        return first, list(outcomes)

    with FakeRabbitMq() as server:
        first, outcomes = asyncio.run(run(server))
    deferred = [f"ck1_{number:04}" for number, outcome in enumerate(outcomes) if isinstance(outcome, Deferred)]
    received = b"".join(server.requests)

    assert isinstance(first, Delivered)
    assert deferred
    assert [key for key in deferred if key.encode() in received] == []


def test_each_message_in_flight_on_a_refused_channel_is_in_doubt() -> None:
    """The server has taken the first one and not confirmed it yet. The last of them to end is no exception."""

    async def run(server: FakeRabbitMq) -> list[Outcome]:
        adapter = RabbitMqAdapter(urls=f"amqp://127.0.0.1:{server.port}", exchange="shop")
        await ask(adapter, key="ck1_first")
        server.behave({"publish": HANG})
        sends = [asyncio.create_task(ask(adapter, key="ck1_taken"))]
        await asyncio.to_thread(wait_for, lambda: len(server.requests) == 2, "the server has the second message")
        server.behave({"publish": FORBIDDEN})
        outcomes = await asyncio.gather(*sends, ask(adapter, key="ck1_refused"))
        await adapter.aclose()
        return list(outcomes)

    with FakeRabbitMq() as server:
        outcomes = asyncio.run(run(server))

    assert [type(outcome) for outcome in outcomes] == [Unknown, Unknown]


def test_what_a_blocked_connection_cannot_write_is_not_in_doubt() -> None:
    async def run(server: FakeRabbitMq) -> list[Outcome]:
        adapter = RabbitMqAdapter(urls=f"amqp://127.0.0.1:{server.port}", timeout=timedelta(seconds=4))
        outcomes = [await ask(adapter, key="ck1_first"), await ask(adapter, key="ck1_blocked")]
        await adapter.aclose()
        return outcomes

    with FakeRabbitMq() as server:
        server.behave({"publish": BLOCK})
        first, blocked = asyncio.run(run(server))

    assert isinstance(first, Delivered)
    assert blocked == Deferred("the server takes no messages now (connection.blocked)", cooldown=True)
