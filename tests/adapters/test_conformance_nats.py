"""NatsAdapter in the conformance suite."""

from datetime import timedelta
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from support.fake_broker import CLOSE, HANG, NO_LISTENER
from support.fake_nats import NO_RESPONDERS, STORED, STREAM, FakeNats

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.adapters import NatsAdapter
from dispatchers.testing.conformance import AdapterSuite, Scenario

PASSWORD = "open-sesame-5eb63bbb"


def stored(answer: Any) -> dict[str, Any]:
    return {"publish": answer}


def refused(code: int, text: str = "ada@example.com") -> dict[str, Any]:
    return stored({"error": {"code": 400, "err_code": code, "description": text}, "stream": STREAM, "seq": 0})


def of_stream(**config: Any) -> dict[str, Any]:
    return {"config": config}


class TestNats(AdapterSuite):
    operation = "orders.placed"
    payload: Any = {"to": "ada@example.com"}  # noqa: RUF012
    secrets = (PASSWORD,)
    private = ("ada@example.com",)
    client_exceptions = (nats.errors.Error, OSError)
    scenarios = (
        Scenario("stored", {}, Delivered),
        Scenario("stored before", stored({**STORED, "duplicate": True}), Delivered),
        Scenario("an older server still replicates it", stored({"stream": STREAM, "duplicate": True}), InProgress),
        Scenario("a newer server still replicates it", refused(10158), InProgress),
        Scenario("too large for the stream", refused(10054), Rejected),
        Scenario("too large for the server", {"info": {"max_payload": 100}}, Rejected, requests=0),
        Scenario("a full stream", refused(10077, "maximum messages exceeded"), Deferred),
        Scenario("a disk that failed", refused(10077, "no space left"), Unknown),
        Scenario("no leader", refused(0, "raft: not leader"), Unknown),
        Scenario("the subject of another stream", refused(10060), Deferred),
        Scenario("the answer of another stream", stored({"stream": "OTHER", "seq": 1}), Unknown),
        Scenario("a forbidden subject", stored("forbidden"), Deferred),
        Scenario("no stream has the subject", stored(NO_RESPONDERS), Deferred),
        Scenario("no PubAck", stored(b"hello?"), Unknown),
        Scenario("a PubAck of something else", stored({"stream": STREAM}), Unknown),
        Scenario("closed after the message", stored(CLOSE), Unknown),
        Scenario("hangs after the message", stored(HANG), Unknown, hangs=True),
        Scenario("connection refused", {NO_LISTENER: ""}, Deferred, requests=0),
        Scenario("hangs before the message", {"greeting": HANG}, Deferred, requests=0, hangs=True),
        Scenario("login refused", {"greeting": CLOSE}, Deferred, requests=0),
        Scenario("no such stream", {"no stream": ""}, Deferred, requests=0),
        Scenario("a shorter window", of_stream(duplicate_window=119_999_000_000), Deferred, requests=0),
        Scenario("a queue that forgets ids", of_stream(retention="workqueue"), Deferred, requests=0),
        Scenario("a mirror", of_stream(mirror={"name": "OTHER"}), Deferred, requests=0),
        Scenario("a stream without answers", of_stream(no_ack=True), Deferred, requests=0),
    )
    never = {KeyConflict: "JetStream does not compare messages"}  # noqa: RUF012

    def remote(self) -> FakeNats:
        return FakeNats()

    def adapter(self, remote: FakeNats, timeout: timedelta) -> Adapter:
        return NatsAdapter(urls=f"nats://shop:{PASSWORD}@127.0.0.1:{remote.port}", stream=STREAM, timeout=timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*arguments: object, **named: object) -> None:
            raise error

        monkeypatch.setattr(Client, "connect", fail)
        return NatsAdapter(urls="nats://127.0.0.1:1", stream=STREAM)
