"""HttpAdapter against servers that do what they should not, over real sockets, and under the dispatcher."""

import asyncio
import gzip
import json
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import age, dispatcher, put_one, queue_row, settlement_row
from support.loopback import Answer as Server
from support.loopback import answering, closed_port, listening, reset, say, say_without_end, whole_request
from test_http_adapter import KEY, delivery

from dispatchers import Deferred, Delivered, Outcome, Rejected, Unknown
from dispatchers.adapters import HttpAdapter
from outbox import Outbox

UNPARSED = Delivered({"status": 200, "unparsed": True})
MEGABYTE = 1024 * 1024


def send_to(server: Server, scheme: str = "http", seconds: float = 60, **settings: Any) -> Outcome:
    async def scenario() -> Outcome:
        async with listening(server) as url:
            base_url, timeout = url.replace("http", scheme, 1), timedelta(seconds=seconds)
            crm = HttpAdapter(base_url=base_url, timeout=timeout, **settings)
            try:
                return await crm.send(delivery())
            finally:
                await crm.aclose()

    return asyncio.run(scenario())


# --- nothing was sent


def test_a_refused_connection_was_surely_not_sent() -> None:
    crm = HttpAdapter(base_url=closed_port())

    assert asyncio.run(crm.send(delivery())) == Deferred("nothing was sent: connect: refused")


def test_an_unresolvable_host_was_surely_not_sent() -> None:
    crm = HttpAdapter(base_url="http://crm.invalid")

    assert asyncio.run(crm.send(delivery())) == Deferred("nothing was sent: dns: host not found")


def test_a_failed_tls_handshake_was_surely_not_sent() -> None:
    async def in_clear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"not TLS")

    assert send_to(in_clear, scheme="https") == Deferred("nothing was sent: tls: handshake failed")


def test_a_tls_handshake_that_hangs_was_surely_not_sent() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    assert send_to(mute, scheme="https", seconds=0.3) == Deferred("nothing was sent: tls: handshake timed out")


# --- it may have been executed


@pytest.mark.parametrize(
    "broken", [b"", b"HTTP/1.1 20", b"\x00\x01 nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n"]
)
def test_an_answer_lost_or_broken_after_the_request_proves_nothing(broken: bytes) -> None:
    read = []

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await whole_request(reader))
        writer.write(broken)

    assert send_to(lose) == Unknown("no answer: RemoteProtocolError")
    assert len(read) == 1
    assert KEY.encode() in read[0]


def test_a_reset_after_the_request_was_read_proves_nothing() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        reset(writer)

    assert send_to(break_off) == Unknown("no answer: ReadError")


def test_no_answer_in_time_proves_nothing() -> None:
    async def dawdle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await reader.read()

    assert send_to(dawdle, seconds=0.2) == Unknown("no answer: ReadTimeout")


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n"])
def test_a_head_that_never_ends_proves_nothing(piece: bytes) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        head = b"" if piece.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\n"
        await say_without_end(writer, head, piece, pause=0.01)

    assert send_to(drip, seconds=0.3) == Unknown("no answer: ReadTimeout")


def test_a_giant_head_proves_nothing() -> None:
    async def boast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536)

    assert send_to(boast) == Unknown("no answer: RemoteProtocolError")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_the_key_nowhere(status: int) -> None:
    elsewhere: list[bytes] = []

    async def scenario() -> Outcome:
        async with (
            listening(answering(seen=elsewhere)) as other,
            listening(answering(status, None, f"Location: {other}")) as url,
        ):
            crm = HttpAdapter(base_url=url)
            outcome = await crm.send(delivery())
            await crm.aclose()
            return outcome

    assert asyncio.run(scenario()) == Unknown(f"HTTP {status}: redirects are not followed")
    assert elsewhere == []


# --- it happened, whatever became of the body


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_success_whose_body_breaks_off_is_delivered(how: str) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"id": 7}')
        await writer.drain()
        if how == "reset":
            reset(writer)

    assert send_to(break_off) == UNPARSED


def test_a_success_whose_body_drips_beyond_the_deadline_is_delivered() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 200 OK\r\n\r\n", b" ", pause=0.01)

    assert send_to(drip, seconds=0.3) == UNPARSED


def test_a_success_with_broken_chunks_is_delivered() -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n")

    assert send_to(garble) == UNPARSED


def test_a_success_with_a_giant_body_is_delivered() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536)

    assert send_to(flood) == UNPARSED


def test_a_bomb_is_delivered_and_never_unpacked() -> None:
    bomb = gzip.compress(b"[" * (64 * MEGABYTE))

    async def explode(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"gzip" not in await whole_request(reader)
        await say(writer, 200, bomb, "Content-Encoding: gzip", "Content-Type: application/json")

    tracemalloc.start()
    try:
        outcome = send_to(explode)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert outcome == UNPARSED
    assert peak_bytes < 16 * MEGABYTE


def test_a_refusal_whose_body_breaks_off_is_still_a_refusal() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b"HTTP/1.1 422 No\r\nContent-Length: 100\r\n\r\n{")

    assert send_to(break_off) == Rejected("HTTP 422", result={"status": 422})


# --- under the dispatcher


def run_once_against(server: Server, database: Database, ob: Outbox, *, times: int = 1, **settings: Any) -> None:
    """A dispatcher's `run_once` with an adapter for `server`, again an hour later."""

    async def scenario() -> None:
        async with listening(server) as url:
            crm = HttpAdapter(base_url=url, **{"timeout": timedelta(seconds=5), **settings})
            for _ in range(times):
                working = dispatcher(database, ob, adapters={"crm": crm})
                await working.run_once()
                await working.close()
                age(database, timedelta(hours=1))

    asyncio.run(scenario())


def losing_the_first(seen: list[bytes]) -> Server:
    """A server that loses its first answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await whole_request(reader))
        if len(seen) > 1:
            await say(writer, 201, b'{"id": 7}')

    return answer


def test_every_attempt_at_an_entry_carries_its_child_key_and_bytes(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    with sqlite.begin() as session:
        payload = {"url": "/contacts", "json": {"name": "né", "share": 1.10}}
        entry = ob.enqueue(session, "crm.contacts.create", payload, parent="customer:7")

    run_once_against(losing_the_first(seen), sqlite, ob, times=2, window=timedelta(days=7))

    settled = settlement_row(sqlite, entry.id)
    assert (settled.state, settled.attempts) == ("delivered", 2)
    assert json.loads(settled.result) == {"status": 201, "body": {"id": 7}}
    first, second = seen
    assert first == second
    assert f"Idempotency-Key: {entry.child_key}\r\n".encode() in first


def test_an_entry_in_doubt_is_not_sent_to_another_place(sqlite: Database, ob: Outbox) -> None:
    """The server that answers there does not know its key."""
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"text": "once"})

    for _ in range(2):  # each time on a port of its own
        run_once_against(losing_the_first(seen), sqlite, ob, window=timedelta(days=7))

    assert queue_row(sqlite, id).state == "retry"
    assert len(seen) == 1


def test_a_lost_answer_without_keys_is_uncertain_and_never_sent_again(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"text": "once"})

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await whole_request(reader))

    run_once_against(lose, sqlite, ob, times=2, key_header=None)

    assert queue_row(sqlite, id).state == "uncertain"
    assert len(seen) == 1


def test_a_malformed_payload_fails_and_says_why(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"method": "GET"})

    run_once_against(answering(seen=seen), sqlite, ob)

    settled = settlement_row(sqlite, id)
    assert (settled.state, settled.reason[:23]) == ("failed", "payload field 'method' ")
    assert seen == []


def test_the_adapter_knows_more_at_the_deadline_than_the_dispatcher_would(sqlite: Database, ob: Outbox) -> None:
    """Cancelled by the dispatcher, a success that drips would be in doubt. Of 2 s on, the two limits are 0.1 s apart."""
    id = put_one(sqlite, ob, payload={"text": "x"})

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 200 OK\r\n\r\n", b" ", pause=0.01)

    run_once_against(drip, sqlite, ob, timeout=timedelta(seconds=2))

    assert settlement_row(sqlite, id).state == "delivered"
