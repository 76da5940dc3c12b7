"""An answer is the outcome of its own request only, however a server answers: twice, unasked, too early or under another key."""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from support.loopback import Answer as Server
from support.loopback import answering, listening, say, whole_request
from support.stripe_sends import API_KEY, INTENT
from support.stripe_sends import delivery as payment
from support.transports import counting, over, post

import dispatchers.adapters.http_client.belonging
import dispatchers.adapters.http_client.transport
from dispatchers.adapters import HttpAdapter, StripeAdapter
from dispatchers.adapters.http_client.belonging import ForeignAnswer
from dispatchers.adapters.http_client.transport import Transport
from dispatchers.delivery import Delivered, Delivery, Outcome, Unknown

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CLOSING = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


# --- the attack


class Twice:
    """A server that executes each request, and sends another answer up to 4 ms after some of its answers. Then it closes.

    Requests that come meanwhile are not read, and not executed.

    executed: the keys. unasked: how many of those answers it has sent.
    """

    def __init__(self, second: bytes, *, share: float) -> None:
        self.executed = set[str]()
        self.unasked = 0
        self.connections = 0
        self._second = second
        self._share = share

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        self.connections += 1
        while True:
            request = (await whole_request(reader)).decode()
            self.executed.add(request.lower().partition("idempotency-key: ")[2].partition("\r\n")[0])
            writer.write(OK)
            answered = loop.time()
            if random.random() >= self._share:
                continue
            await asyncio.sleep(random.uniform(0, 0.004))
            if loop.time() - answered < 0.008:  # a loaded machine wakes it later
                writer.write(self._second)
                self.unasked += 1
                return


async def sends(transport: Transport, url: str, number: int) -> dict[str, int]:
    """The status of each request by its key, 0 for one in doubt; thirty at a time, each after a pause of up to 4 ms."""
    statuses: dict[str, int] = {}
    keys = [str(each) for each in range(number)]

    async def worker() -> None:
        while keys:
            key = keys.pop()
            await asyncio.sleep(random.uniform(0, 0.004))
            try:
                statuses[key] = (await post(transport, url, headers={"Idempotency-Key": key})).status
            except httpx.HTTPError:
                statuses[key] = 0

    await asyncio.gather(*(worker() for _ in range(30)))
    return statuses


@pytest.mark.parametrize("second", [OK, CLOSING])
def test_a_second_answer_is_the_outcome_of_no_other_request(second: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatchers.adapters.http_client.belonging, "DISTRUST_SECONDS", 0.0
    )  # so that connections are used again
    server = Twice(second, share=0.2)

    statuses = over(server, lambda transport, url: sends(transport, url, 2_000))

    assert server.unasked > 0
    assert server.connections < 1_000
    assert {key for key, status in statuses.items() if status == 200} <= server.executed
    assert 400 not in statuses.values()


def test_no_answer_of_a_correct_server_is_in_doubt() -> None:
    async def correct(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await whole_request(reader)
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.01]))
            writer.write(random.choice([OK, OK.replace(b"200 OK", b"422 No")]))

    connections, server = counting(correct)
    statuses = over(server, lambda transport, url: sends(transport, url, 1_000))

    assert 0 not in statuses.values()
    assert len(connections) < 300


# --- what speaks for another request


def second_answer(server: Server, **settings: Any) -> Any:
    """What the second of two requests on one connection ends with: its status, or why it is in doubt."""

    async def two(transport: Transport, url: str) -> Any:
        await post(transport, url)
        try:
            return (await post(transport, url, content=bytes(settings.pop("bytes", 2)))).status
        except ForeignAnswer as doubt:
            return str(doubt).partition(": ")[2]

    return over(server, two)


def replying(*answers: bytes) -> Server:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await whole_request(reader)
            writer.write(answer)
        await reader.read()

    return reply


@pytest.mark.usefixtures("without_rest")
@pytest.mark.parametrize("status", [400, 403, 404, 408, 422, 429])
def test_a_refusal_that_closes_a_used_connection_is_in_doubt(status: int) -> None:
    closing = CLOSING.replace(b"400", str(status).encode())

    assert second_answer(replying(OK, closing)) == f"HTTP {status} closed a connection that was used before"
    assert second_answer(replying(OK, OK.replace(b"200", b"422"))) == 422


@pytest.mark.usefixtures("without_rest")
@pytest.mark.parametrize("more", [OK, b"HTTP/1.1 500 No\r\n\r\n", b"x"])
def test_two_answers_to_a_request_on_a_used_connection_are_in_doubt(more: bytes) -> None:
    assert second_answer(replying(OK, OK + more)) == "more than one answer came"


@pytest.mark.usefixtures("without_rest")
def test_an_answer_before_the_request_has_arrived_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatchers.adapters.http_client.transport, "MAX_REUSED_BYTES", 100_000_000)

    async def too_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.Event().wait()  # it reads nothing more

    found = second_answer(too_early, bytes=50_000_000)

    assert found == "it came before the service had received the request"


@pytest.mark.usefixtures("without_rest")
def test_a_long_request_has_a_connection_of_its_own() -> None:
    """A service may refuse it early, and that counts then."""
    connections, server = counting(answering())

    async def three(transport: Transport, url: str) -> list[bool]:
        return [(await post(transport, url, content=bytes(size))).is_first for size in (0, 70_000, 0)]

    assert over(server, three) == [True, True, False]
    assert len(connections) == 2


@pytest.mark.usefixtures("without_rest")
def test_a_service_that_closes_after_each_refusal_is_not_in_doubt_for_it() -> None:
    """Tomcat does so after each 400. The first answer on a connection shows it."""
    connections, server = counting(replying(CLOSING))
    also, used = counting(replying(OK, CLOSING))

    async def server_of_both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (used if connections else server)(reader, writer)

    async def three(transport: Transport, url: str) -> list[int]:
        return [(await post(transport, url)).status for _ in range(3)]

    assert over(server_of_both, three) == [400, 200, 400]
    assert (len(connections), len(also)) == (1, 1)


# --- what follows from it


@pytest.mark.usefixtures("without_rest")
def test_after_a_doubt_each_send_has_its_own_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, server = counting(replying(OK, CLOSING))

    async def many(transport: Transport, url: str) -> None:
        await post(transport, url)
        with pytest.raises(ForeignAnswer):
            await post(transport, url)
        for _ in range(3):
            assert (await post(transport, url)).is_first
        now = asyncio.get_running_loop().time
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now() + 601)
        await post(transport, url)
        assert not (await post(transport, url)).is_first

    with caplog.at_level(logging.WARNING), pytest.raises(ForeignAnswer):
        over(server, many, timeout=timedelta(hours=1))

    assert len(connections) == 5
    assert caplog.text.count("each send to it has its own connection for 10 minutes") == 2


def test_bytes_on_an_idle_connection_end_the_reuse() -> None:
    async def unasked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.002)
        writer.write(OK)
        await reader.read()

    connections, server = counting(unasked)

    async def three(transport: Transport, url: str) -> None:
        for _ in range(3):
            assert (await post(transport, url)).is_first
            await asyncio.sleep(0.02)
        (origin,) = transport._belonging._manners
        assert not transport._belonging.may_reuse(origin, 0)

    over(server, three)
    assert len(connections) == 3


@pytest.mark.usefixtures("without_rest")
def test_without_reuse_each_send_has_its_own_connection() -> None:
    connections, server = counting(answering())

    async def three(transport: Transport, url: str) -> list[bool]:
        return [(await post(transport, url)).is_first for _ in range(3)]

    assert over(server, three, reuse=False) == [True] * 3
    assert len(connections) == 3


# --- the key in the answer


def http_outcome(header: str, key: str = "ck1_A") -> Outcome:
    async def send() -> Outcome:
        async with listening(answering(200, {}, header)) as url:
            adapter = HttpAdapter(base_url=url, timeout=timedelta(minutes=1))
            try:
                return await adapter.send(Delivery(uuid4(), "crm.x", b"{}", key, 1, {}, {}, deadline=0.0))
            finally:
                await adapter.aclose()

    return asyncio.run(send())


@pytest.mark.parametrize("echo", ["ck1_A", '"ck1_A"', "ck1_A, ck1_A"])
def test_an_answer_that_repeats_the_key_counts(echo: str) -> None:
    assert http_outcome(f"idempotency-key: {echo}") == Delivered({"status": 200, "body": {}})


@pytest.mark.parametrize("echo", ["ck1_B", "", "CK1_A"])
def test_an_answer_with_another_key_is_in_doubt(echo: str) -> None:
    assert http_outcome(f"Idempotency-Key: {echo}") == Unknown(
        "the answer may belong to another request: its Idempotency-Key is not that of the request"
    )


def stripe_outcomes(echoes: Callable[[int, str], str | None]) -> list[Outcome]:
    """The outcomes of three payments under keys k0 to k2, whose answers repeat what `echoes` returns."""

    async def stripe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while True:
            key = (await whole_request(reader)).decode().partition("Idempotency-Key: ")[2].partition("\r\n")[0]
            echo = echoes(number, key)
            await say(writer, 200, json.dumps(INTENT).encode(), *([f"Idempotency-Key: {echo}"] if echo else []))
            number += 1

    async def three() -> list[Outcome]:
        async with listening(stripe) as url:
            adapter = StripeAdapter(api_key=API_KEY, base_url=url, timeout=timedelta(minutes=1))
            try:
                return [await adapter.send(payment(key=f"k{each}")) for each in range(3)]
            finally:
                await adapter.aclose()

    return asyncio.run(three())


@pytest.mark.usefixtures("without_rest")
def test_a_success_of_stripe_repeats_the_key_or_is_in_doubt() -> None:
    assert [type(each) for each in stripe_outcomes(lambda number, key: key)] == [Delivered] * 3
    assert [type(each) for each in stripe_outcomes(lambda number, key: None)] == [Delivered] * 3  # an imitation
    missing = stripe_outcomes(lambda number, key: None if number else key)
    other = stripe_outcomes(lambda number, key: key if number < 2 else "k1")

    assert [type(each) for each in missing] == [Delivered, Unknown, Delivered]  # the third has a connection of its own
    assert [type(each) for each in other] == [Delivered, Delivered, Unknown]
    assert "it does not repeat the request's key" in missing[1].reason  # type: ignore[union-attr]
    assert "Idempotency-Key is not that of the request" in other[2].reason  # type: ignore[union-attr]
