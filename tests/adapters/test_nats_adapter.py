"""NatsAdapter with a real cluster of three NATS servers. Skipped where there is no nats-server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import ServiceUnavailableError
from support.database import Database
from support.deliveries import ask, delivery, sent_together
from support.entries import dispatcher, put_one, settlement_row
from support.fake_nats import READS_NOTHING, STREAM, FakeNats
from support.nats_cluster import PASSWORD, Cluster, running_cluster

import outbox
from dispatchers import Deferred, Delivered, Outcome, Rejected, Unknown
from dispatchers.adapters import NatsAdapter
from dispatchers.adapters.brokers import nats_connection
from outbox import inboxes

MINUTES = timedelta(minutes=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("nats")) as cluster:
        yield cluster


class Stream:
    """A stream of one test's own. Its subjects begin with its name."""

    def __init__(self, cluster: Cluster, client: Any) -> None:
        self.cluster = cluster
        self.name = f"t{uuid4().hex[:8]}"
        self.js = client.jetstream(timeout=10)

    async def create(self, **config: Any) -> None:
        """Waits for a node that the test before has killed or frozen: without it there is no place for three replicas."""
        asked = StreamConfig(name=self.name, subjects=[f"{self.name}.>"], num_replicas=3, **config)
        while True:
            with suppress(Error):
                await self.js.add_stream(asked)
                return
            await asyncio.sleep(0.05)

    def adapter(self, **settings: Any) -> NatsAdapter:
        place = {"urls": self.cluster.urls, "stream": self.name, "subject": f"{self.name}.{{operation}}"}
        return NatsAdapter(**place | settings)

    async def messages(self, at_least: int = 0) -> list[Any]:
        """What the stream has stored. A node that was the leader until it hung answers with fewer than are stored."""
        async with asyncio.timeout(40), self.cluster.client() as client:
            js = client.jetstream(timeout=1)
            while True:
                with suppress(Error):
                    count = (await js.stream_info(self.name)).state.messages
                    if count >= at_least:
                        return [await js.get_msg(self.name, number + 1) for number in range(count)]
                await asyncio.sleep(0.05)

    async def first_message(self, durable: str) -> Any:
        """Asks again while the nodes are electing the leader of the new consumer: meanwhile the server answers 503."""
        subscription = await self.js.pull_subscribe(f"{self.name}.>", durable)
        while True:
            with suppress(ServiceUnavailableError):
                (message,) = await subscription.fetch(1, timeout=10)
                return message
            await asyncio.sleep(0.05)


def with_stream(cluster: Cluster, work: Any, **config: Any) -> Any:
    """What `work(stream)` returns."""

    async def run() -> Any:
        async with cluster.client() as client:
            stream = Stream(cluster, client)
            await stream.create(**config)
            return await work(stream)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_an_entry_is_one_message_whose_id_the_inbox_finds(
    cluster: Cluster, postgresql: Database, ob: outbox.Outbox
) -> None:
    id = put_one(postgresql, ob, "orders.placed")

    async def work(stream: Stream) -> Any:
        working = dispatcher(postgresql.engine, ob, adapters={"orders": stream.adapter()})
        await working.run_once()
        await working.close()
        return stream.name, await stream.first_message("billing")

    name, message = with_stream(cluster, work)

    assert json.loads(settlement_row(postgresql, id).result) == {"stream": name, "seq": 1}
    (entry,) = postgresql.entries
    assert message.subject == f"{name}.orders.placed"
    assert message.data == entry.payload
    identity = inboxes.from_nats(message, scope="shop")
    assert identity["message_id"] == outbox.keys.encode_native(outbox.keys.Tag(bytes(entry.tag)))


def test_the_stream_keeps_one_message_of_two_attempts(cluster: Cluster) -> None:
    async def work(stream: Stream) -> Any:
        adapter = stream.adapter()
        outcomes = [await ask(adapter), await ask(adapter, attempt=2), await ask(adapter, key="ck1_b")]
        await adapter.aclose()
        return outcomes, await stream.messages()

    (first, again, other), messages = with_stream(cluster, work)

    assert (first.replayed, again.replayed, other.replayed) == (False, True, False)
    assert first.result == again.result
    assert [message.headers["Nats-Msg-Id"] for message in messages] == ["ck1_a", "ck1_b"]


def test_a_message_that_cannot_be_written_fails_no_other_of_its_batch(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Client.publish

    async def failing(self: Client, subject: str, payload: bytes, *rest: Any, **named: Any) -> None:
        if payload == b"1":
            raise ValueError("this payload")
        await publish(self, subject, payload, *rest, **named)

    async def work(stream: Stream) -> Any:
        adapter = stream.adapter()
        batch = [*(delivery(f"ck1_{n}", n) for n in range(3)), delivery("ck1_3", options={"subject": "a\ud800"})]
        monkeypatch.setattr(Client, "publish", failing)
        outcomes = await sent_together(adapter, batch)
        monkeypatch.undo()
        await adapter.aclose()
        return outcomes, await stream.messages()

    outcomes, messages = with_stream(cluster, work)

    assert [type(outcome) for outcome in outcomes] == [Delivered, Unknown, Delivered, Deferred]
    assert [message.data for message in messages] == [b"0", b"2"]


def test_no_message_is_lost_or_doubled_when_the_leader_dies(cluster: Cluster) -> None:
    keys = [f"ck1_{number}" for number in range(300)]

    async def work(stream: Stream) -> Any:
        adapter = stream.adapter(timeout=timedelta(seconds=2))
        killed = await cluster.leader(stream.name)
        kinds = list[type]()
        some = asyncio.Semaphore(20)

        async def send(key: str) -> Outcome:
            async with some:
                outcome = await _in_time(adapter, key)
            kinds.append(type(outcome))
            if len(kinds) == 100:
                killed.kill()
            return outcome

        left = keys
        async with asyncio.timeout(50):
            while left:
                outcomes = await asyncio.gather(*map(send, left))
                left = [key for key, outcome in zip(left, outcomes, strict=True) if not isinstance(outcome, Delivered)]
                await asyncio.sleep(0.05)  # without a leader there are only immediate answers
        await adapter.aclose()
        killed.start()
        return set(kinds), await stream.messages(at_least=len(keys))

    kinds, messages = with_stream(cluster, work)

    assert kinds & {Unknown, Deferred}, "the leader's death was not noticed"
    assert sorted(message.headers["Nats-Msg-Id"] for message in messages) == sorted(keys)


async def _in_time(adapter: NatsAdapter, key: str) -> Outcome:
    try:
        async with asyncio.timeout(adapter.timeout.total_seconds()):
            return await ask(adapter, key=key)
    except TimeoutError:  # so does the dispatcher
        return Unknown("no answer")


def test_a_stream_that_forgets_earlier_is_sent_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed while the connection is open, too."""
    monkeypatch.setattr(nats_connection, "CHECK_SECONDS", 0)

    async def work(stream: Stream) -> Any:
        adapter = stream.adapter(window=MINUTES)
        before = await ask(adapter)
        await stream.js.update_stream(
            StreamConfig(name=stream.name, subjects=[f"{stream.name}.>"], num_replicas=3, duplicate_window=60)
        )
        shortened = await ask(adapter, key="ck1_b")
        again = stream.adapter(window=timedelta(seconds=60))
        fitting = await ask(again, key="ck1_c")
        await adapter.aclose()
        await again.aclose()
        return before, shortened, fitting, await stream.messages()

    before, shortened, fitting, messages = with_stream(cluster, work, duplicate_window=120)

    assert isinstance(before, Delivered)
    assert isinstance(shortened, Deferred)
    assert shortened.cooldown
    assert "it remembers ids for 0:01:00, and the adapter declares 0:02:00" in shortened.reason
    assert isinstance(fitting, Delivered)
    assert len(messages) == 2


def test_a_queue_that_deletes_ids_is_refused_unless_no_window_is_declared(cluster: Cluster) -> None:
    async def work(stream: Stream) -> Any:
        adapters = stream.adapter(), stream.adapter(window=None)
        outcomes = [await ask(adapter) for adapter in adapters]
        for adapter in adapters:
            await adapter.aclose()
        return outcomes

    refused, without = with_stream(cluster, work, retention=RetentionPolicy.WORK_QUEUE)

    assert isinstance(refused, Deferred)
    assert "workqueue" in refused.reason
    assert isinstance(without, Delivered)


def test_a_full_stream_defers_and_takes_more_when_it_has_room(cluster: Cluster) -> None:
    async def work(stream: Stream) -> Any:
        adapter = stream.adapter()
        outcomes = [await ask(adapter), await ask(adapter, key="ck1_b")]
        await stream.js.purge_stream(stream.name)
        outcomes.append(await ask(adapter, key="ck1_b", attempt=2))
        await adapter.aclose()
        return outcomes

    first, full, after = with_stream(cluster, work, max_msgs=1, discard=DiscardPolicy.NEW)

    assert isinstance(first, Delivered)
    assert isinstance(full, Deferred)
    assert full.cooldown
    assert isinstance(after, Delivered)
    assert not after.replayed


def test_refusals_by_size_subject_and_permission_leave_the_connection(cluster: Cluster) -> None:
    """A message that is too large for the server would make it close the connection of all sends in flight."""

    async def work(stream: Stream) -> Any:
        adapter = stream.adapter(urls=cluster.servers, client_options={"user": "shop", "password": PASSWORD})
        outcomes = await asyncio.gather(
            ask(adapter, payload="x" * 262_138),
            ask(adapter, payload="x" * 100_000, key="ck1_large"),
            ask(adapter, key="ck1_b", options={"subject": "elsewhere.orders"}),
            ask(adapter, key="ck1_c", options={"subject": f"{stream.name}.forbidden"}),
            ask(adapter, key="ck1_d", options={"subject": "no spaces"}),
            ask(adapter, key="ck1_e", options={"queue": "orders"}),
        )
        await adapter.aclose()
        return outcomes

    outcomes = with_stream(cluster, work)

    assert [type(outcome) for outcome in outcomes] == [Rejected, Delivered, Deferred, Deferred, Rejected, Rejected]
    assert "permissions" in outcomes[3].reason


def test_a_server_that_hangs_is_left_for_another_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    connect = nats_connection.NatsConnection.open

    async def noted(self: nats_connection.NatsConnection, server: str, *given: Any) -> None:
        await connect(self, server, *given)
        opened.append(server)

    monkeypatch.setattr(nats_connection.NatsConnection, "open", noted)

    async def work(stream: Stream) -> Any:
        adapter = stream.adapter(timeout=timedelta(seconds=1))
        first = await ask(adapter)
        hanging = cluster.nodes[cluster.urls.index(opened[-1])]
        hanging.freeze()
        try:
            async with asyncio.timeout(30):
                outcomes = [first, await _in_time(adapter, "ck1_b")]
                while not isinstance(outcomes[-1], Delivered):
                    outcomes.append(await _in_time(adapter, "ck1_b"))
        finally:
            hanging.thaw()
        await adapter.aclose()
        return outcomes, await stream.messages(at_least=2)

    outcomes, messages = with_stream(cluster, work)

    assert isinstance(outcomes[1], Unknown)
    assert len(messages) == 2


def test_sends_to_a_server_that_reads_nothing_end_when_cancelled() -> None:
    """With a limit of nats-py for what waits to be written, it would wait for the server and ignore the cancellation."""

    async def run(server: FakeNats) -> int:
        server.behave({"publish": READS_NOTHING})
        adapter = NatsAdapter(urls=f"nats://127.0.0.1:{server.port}", stream=STREAM)
        sends = [asyncio.create_task(ask(adapter, key=f"ck1_{number}", payload="x" * 900_000)) for number in range(12)]
        await asyncio.to_thread(server.reads_no_more.wait, 20)
        for send in sends:
            send.cancel()
        ended, _ = await asyncio.wait(sends, timeout=20)
        await asyncio.wait_for(adapter.aclose(), 20)
        return len(ended)

    with FakeNats() as server:
        assert asyncio.run(run(server)) == 12
