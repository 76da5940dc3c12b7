"""RedisAdapter with real Redis servers: one, two, and a cluster of three. Skipped where there is no redis-server."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Connection
from support.daemons import wait_for
from support.database import Database
from support.deliveries import ask, batch_sent, delivery, sent_together
from support.entries import dispatcher, put_one, settlement_row, state
from support.redis_servers import Server, running_cluster, running_servers, until_whole

import outbox
from dispatchers import Deferred, Delivered, Outcome, Unknown
from dispatchers.adapters import RedisAdapter
from outbox import inboxes

URL = "redis://127.0.0.1:6379"
SOON = timedelta(seconds=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_servers(tmp_path_factory.mktemp("redis"), 1) as (server,):
        yield server


@pytest.fixture
def stream() -> str:
    return f"orders-{uuid4().hex[:8]}"


def send(adapter: RedisAdapter, *keys: str, **fields: Any) -> list[Outcome]:
    """In one batch."""
    return batch_sent(adapter, *(delivery(key, **fields) for key in keys))


def keys_of(messages: list[dict[str, str]]) -> list[str]:
    return [inboxes.from_redis(fields, scope="shop")["message_id"] for fields in messages]


async def drained(database: Database, ob: outbox.Outbox, adapter: RedisAdapter) -> None:
    working = dispatcher(database.engine, ob, adapters={"orders": adapter})
    await working.run_once()
    await working.close()


def test_an_entry_is_one_message_whose_id_the_inbox_finds(
    server: Server, stream: str, postgresql: Database, ob: outbox.Outbox
) -> None:
    id = put_one(postgresql, ob, "orders.placed")

    asyncio.run(drained(postgresql, ob, RedisAdapter(urls=server.url, stream=stream)))

    assert state(postgresql, id) == "delivered"
    (entry,) = postgresql.entries
    (message,) = server.messages(stream)
    assert message["payload"].encode() == entry.payload
    assert keys_of([message]) == [outbox.keys.encode_native(outbox.keys.Tag(bytes(entry.tag)))]
    assert f'"stream": "{stream}"' in settlement_row(postgresql, id).result


def test_all_messages_of_a_batch_share_a_write(server: Server, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"ck1_{number}" for number in range(400)]
    writes = []
    write = Connection.send_packed_command

    async def counted(connection: Connection, command: Any, **named: Any) -> None:
        writes.append(b"".join(command).count(b"XADD"))
        await write(connection, command, **named)

    monkeypatch.setattr(Connection, "send_packed_command", counted)

    outcomes = send(RedisAdapter(urls=server.url, stream=stream), *keys)

    assert {type(outcome) for outcome in outcomes} == {Delivered}
    assert keys_of(server.messages(stream)) == keys
    assert [count for count in writes if count] == [400]


def test_a_batch_waits_for_the_one_before_on_the_same_connection(server: Server, stream: str) -> None:
    async def main() -> list[Outcome]:
        adapter = RedisAdapter(urls=server.url, stream=stream, client_options={"client_name": stream})
        outcomes = [await ask(adapter, key="ck1_0")]
        for number in range(1, 4):
            server.freeze()
            sends = []
            for key in (f"ck1_{number}", f"ck1_{number}b"):
                sends.append(asyncio.create_task(ask(adapter, key=key)))
                for _ in range(20):  # turns of the event loop, in which its batch begins
                    await asyncio.sleep(0)
            server.thaw()
            outcomes += await asyncio.gather(*sends)
        connections.append(server.ask("CLIENT", "LIST").count(f"name={stream} "))
        await adapter.aclose()
        return outcomes

    connections: list[int] = []

    assert [type(outcome) for outcome in asyncio.run(main())] == [Delivered] * 7
    assert connections == [1]
    assert keys_of(server.messages(stream)) == ["ck1_0", "ck1_1", "ck1_1b", "ck1_2", "ck1_2b", "ck1_3", "ck1_3b"]


def test_a_message_that_is_refused_fails_alone_in_its_batch(server: Server, stream: str) -> None:
    server.ask("SET", f"{stream}.paid", "no stream")

    async def main() -> list[Outcome]:
        adapter = RedisAdapter(urls=server.url, stream=f"{stream}.{{operation}}")
        operations = ("placed", "paid", "shipped")
        outcomes = await sent_together(adapter, [delivery(operation=operation) for operation in operations])
        await adapter.aclose()
        return outcomes

    adapter = RedisAdapter(urls=server.url, stream={name: f"{stream}.{name}" for name in ("placed", "paid", "shipped")})
    outcomes = asyncio.run(main())

    assert adapter.serves("paid")
    assert [type(outcome) for outcome in outcomes] == [Delivered, Deferred, Delivered]
    assert len(server.messages(f"{stream}.shipped")) == 1


def test_redis_deduplicates_nothing(server: Server, stream: str) -> None:
    """What `window=None` declares: the second send is a second message."""
    adapter = RedisAdapter(urls=server.url, stream=stream)

    outcomes = send(adapter, "ck1_a") + send(adapter, "ck1_a", attempt=2)

    assert adapter.window is None
    assert [type(outcome) for outcome in outcomes] == [Delivered, Delivered]
    assert keys_of(server.messages(stream)) == ["ck1_a", "ck1_a"]


def test_a_full_memory_defers_until_there_is_room(server: Server, stream: str) -> None:
    adapter = RedisAdapter(urls=server.url, stream=stream)
    server.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        (full,) = send(adapter, "ck1_a")
    finally:
        server.ask("CONFIG", "SET", "maxmemory", 0)

    assert full == Deferred("OOM", cooldown=True)
    assert server.messages(stream) == []
    assert [type(outcome) for outcome in send(adapter, "ck1_a", attempt=2)] == [Delivered]


def test_a_user_without_permission_leaves_no_entry_in_doubt(server: Server, stream: str) -> None:
    server.ask("ACL", "SETUSER", "shop", "on", ">secret", "~orders*", "+ping", "+hello", "+select")
    adapter = RedisAdapter(urls=server.url.replace("//", "//shop:secret@"), stream=stream)

    (forbidden,) = send(adapter, "ck1_a")
    server.ask("ACL", "SETUSER", "shop", "+xadd")
    (permitted,) = send(adapter, "ck1_a", attempt=2)
    server.ask("ACL", "SETUSER", "shop", "off")
    (disabled,) = send(adapter, "ck1_b")

    assert forbidden == Deferred("NOPERM", cooldown=True)
    assert isinstance(permitted, Delivered)
    assert disabled == Deferred("nothing was sent: WRONGPASS", cooldown=True)


def test_a_stream_keeps_about_as_many_messages_as_it_should(server: Server, stream: str) -> None:
    send(RedisAdapter(urls=server.url, stream=stream, maxlen=100), *(f"ck1_{number}" for number in range(500)))

    kept = keys_of(server.messages(stream))

    assert 100 <= len(kept) <= 200  # whole nodes of 100 are deleted
    assert kept[-1] == "ck1_499"


def test_a_server_that_hangs_leaves_doubt_and_then_delays(server: Server, stream: str) -> None:
    async def main() -> list[Outcome]:
        adapter = RedisAdapter(urls=server.url, stream=stream, timeout=SOON)
        outcomes = [await ask(adapter)]
        server.freeze()
        try:
            outcomes += await sent_together(adapter, [delivery("ck1_b"), delivery("ck1_c")])
            outcomes.append(await ask(adapter, key="ck1_d"))
        finally:
            server.thaw()
        outcomes.append(await ask(adapter, key="ck1_d", attempt=2))
        await adapter.aclose()
        return outcomes

    before, *doubtful, waiting, after = asyncio.run(main())

    assert isinstance(before, Delivered)
    assert [type(outcome) for outcome in doubtful] == [Unknown, Unknown]
    assert isinstance(waiting, Deferred)
    assert isinstance(after, Delivered)
    assert sorted(keys_of(server.messages(stream))) == ["ck1_a", "ck1_b", "ck1_c", "ck1_d"]


def test_a_message_that_was_confirmed_survives_a_kill(server: Server, stream: str) -> None:
    """The server writes with `appendfsync always`."""

    async def main() -> list[Outcome]:
        adapter = RedisAdapter(urls=server.url, stream=stream)
        outcomes = [await ask(adapter)]
        server.kill()
        outcomes.append(await ask(adapter, key="ck1_b"))
        server.start()
        outcomes.append(await ask(adapter, key="ck1_b", attempt=2))
        await adapter.aclose()
        return outcomes

    before, dead, after = asyncio.run(main())

    assert isinstance(before, Delivered)
    assert isinstance(dead, Deferred | Unknown)
    assert isinstance(after, Delivered)
    assert keys_of(server.messages(stream)) == ["ck1_a", "ck1_b"]


# --- replicas


def test_a_message_is_delivered_when_the_replica_has_it(tmp_path: Path) -> None:
    with running_servers(tmp_path, 2) as (primary, replica):
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        wait_for(lambda: primary.ask("ROLE")[2], "a replica")

        (before,) = send(RedisAdapter(urls=[replica.url, primary.url], stream="orders", replicas=1), "ck1_a")
        replica.freeze()
        (unconfirmed,) = send(RedisAdapter(urls=primary.url, stream="orders", replicas=1, timeout=SOON), "ck1_b")
        replica.thaw()
        primary.kill()
        replica.ask("REPLICAOF", "NO", "ONE")
        (after,) = send(RedisAdapter(urls=[primary.url, replica.url], stream="orders"), "ck1_c")

        assert isinstance(before, Delivered)
        assert unconfirmed == Unknown("the primary has it, but of 1 replicas have confirmed: 0", cooldown=True)
        assert isinstance(after, Delivered)
        assert {"ck1_a", "ck1_c"} <= set(keys_of(replica.messages("orders")))


def test_a_primary_that_became_a_replica_is_left_for_the_new_one(tmp_path: Path) -> None:
    async def main(old: Server, new: Server) -> list[Outcome]:
        adapter = RedisAdapter(urls=[old.url, new.url], stream="orders")
        new.ask("REPLICAOF", "127.0.0.1", old.port)
        outcomes = [await ask(adapter)]
        wait_for(lambda: new.messages("orders"), "the message at the replica")
        new.ask("REPLICAOF", "NO", "ONE")
        old.ask("REPLICAOF", "127.0.0.1", new.port)
        outcomes += [await ask(adapter, key="ck1_b"), await ask(adapter, key="ck1_b", attempt=2)]
        await adapter.aclose()
        return outcomes

    with running_servers(tmp_path, 2) as (old, new):
        before, refused, after = asyncio.run(main(old, new))

        assert isinstance(before, Delivered)
        assert refused == Deferred("READONLY", cooldown=True)
        assert isinstance(after, Delivered)
        assert keys_of(new.messages("orders")) == ["ck1_a", "ck1_b"]


# --- a cluster


def test_each_stream_of_a_cluster_is_found_at_its_node(tmp_path: Path) -> None:
    streams = [f"orders.{number}" for number in range(20)]

    async def main(servers: list[Server]) -> list[list[Outcome]]:
        adapter = RedisAdapter(urls=[server.url for server in servers], stream={name: name for name in streams})

        async def one_each() -> list[Outcome]:
            return await sent_together(adapter, [delivery(operation=name, key=name) for name in streams])

        rounds = [await one_each(), await one_each()]
        servers[2].kill()
        rounds.append(await one_each())
        servers[2].start()
        for server in servers:
            until_whole(server)
        rounds.append(await one_each())
        await adapter.aclose()
        return rounds

    with running_cluster(tmp_path) as servers:
        rounds = asyncio.run(main(servers))

        stored = [name for server in servers for name in server.ask("KEYS", "*") for _ in server.messages(name)]

    assert sorted(set(stored)) == sorted(streams)
    assert [{type(outcome) for outcome in each} for each in rounds[:2]] == [{Delivered}, {Delivered}]
    assert {type(outcome) for outcome in rounds[2]} <= {Delivered, Deferred, Unknown}
    delivered = sum(isinstance(outcome, Delivered) for each in rounds for outcome in each)
    assert len(stored) == delivered
