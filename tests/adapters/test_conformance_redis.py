"""RedisAdapter in the conformance suite: with and without replicas that must confirm."""

from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Connection
from redis.crc import key_slot
from redis.exceptions import AskError, RedisError
from support.fake_broker import CLOSE, HANG, NO_LISTENER
from support.fake_redis import REPLICA, FakeRedis

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import RedisAdapter
from dispatchers.testing.conformance import AdapterSuite, Scenario

PASSWORD = "open-sesame-5eb63bbb"
BUCKET = key_slot(b"orders.orders.placed")


def refused(text: str) -> dict[str, bytes]:
    return {"XADD": f"-{text}\r\n".encode()}


class RedisSuite(AdapterSuite):
    operation = "orders.placed"
    payload: Any = {"to": "ada@example.com"}  # noqa: RUF012
    secrets = (PASSWORD,)
    private = ("ada@example.com",)
    client_exceptions = (RedisError, OSError)
    replicas: int
    scenarios = (
        Scenario("appended", {}, Delivered),
        Scenario("an answer that is no id", {"XADD": b":1\r\n"}, Unknown),
        Scenario("an answer that is no RESP", {"XADD": b"?ada@example.com\r\n"}, Unknown),
        Scenario("the key is no stream", refused("WRONGTYPE ada@example.com"), Deferred),
        Scenario("out of memory", refused("OOM ada@example.com"), Deferred),
        Scenario("no permission", refused("NOPERM ada@example.com"), Deferred),
        Scenario("a replica now", refused("READONLY ada@example.com"), Deferred),
        Scenario("loading", refused("LOADING ada@example.com"), Deferred),
        Scenario("too few replicas to write", refused("NOREPLICAS ada@example.com"), Deferred),
        Scenario("the stream is being moved", refused("ASK 1 127.0.0.1:1"), Deferred),
        Scenario("the stream is elsewhere, where no server listens", refused(f"MOVED {BUCKET} 127.0.0.1:1"), Deferred),
        Scenario("the stream is always elsewhere", refused(f"MOVED {BUCKET} 127.0.0.1:PORT"), Deferred, requests=2),
        Scenario("another error", refused("ERR ada@example.com"), Unknown),
        Scenario("an error without a code", refused("ada@example.com"), Unknown),
        Scenario("closed after the message", {"XADD": CLOSE}, Unknown),
        Scenario("hangs after the message", {"XADD": HANG}, Unknown, hangs=True),
        Scenario("connection refused", {NO_LISTENER: ""}, Deferred, requests=0),
        Scenario("hangs before the message", {"HELLO": HANG}, Deferred, requests=0, hangs=True),
        Scenario("closed before the message", {"HELLO": CLOSE}, Deferred, requests=0),
        Scenario("wrong password", {"AUTH": b"-WRONGPASS ada@example.com\r\n"}, Deferred, requests=0),
        Scenario("not allowed to connect", {"HELLO": b"-NOPERM ada@example.com\r\n"}, Deferred, requests=0),
        Scenario("a replica", {"HELLO": REPLICA}, Deferred, requests=0),
        Scenario("loading before the message", {"PING": b"-LOADING ada@example.com\r\n"}, Deferred, requests=0),
    )
    never = {  # noqa: RUF012
        KeyConflict: "Redis does not compare messages",
        InProgress: "Redis knows no keys",
        Rejected: "it rejects only options of an entry, and no message",
    }

    def remote(self) -> FakeRedis:
        return FakeRedis()

    def adapter(self, remote: FakeRedis, timeout: timedelta) -> Adapter:
        url = f"redis://shop:{PASSWORD}@127.0.0.1:{remote.port}"
        return RedisAdapter(urls=url, stream="orders.{operation}", replicas=self.replicas, timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*arguments: object, **named: object) -> None:
            raise error

        monkeypatch.setattr(Connection, "connect", fail)
        return RedisAdapter(urls="redis://127.0.0.1:1")

    def exception(self, cls: type[Exception], text: str) -> Exception:
        if issubclass(cls, AskError):
            return cls("1 127.0.0.1:1")
        return super().exception(cls, text)


class TestRedis(RedisSuite):
    replicas = 0
    scenarios = RedisSuite.scenarios
    never = RedisSuite.never


class TestRedisWithReplicas(RedisSuite):
    replicas = 1
    scenarios = (
        *RedisSuite.scenarios,
        Scenario("no replica confirms", {"WAIT": b":0\r\n"}, Unknown),
        Scenario("not allowed to wait", {"WAIT": b"-NOPERM ada@example.com\r\n"}, Unknown),
        Scenario("closed before the replica confirms", {"WAIT": CLOSE}, Unknown),
        Scenario("hangs before the replica confirms", {"WAIT": HANG}, Unknown, hangs=True),
    )
    never = RedisSuite.never
