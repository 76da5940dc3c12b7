"""Lookups of host names: one that hangs delays only its own host, and of several addresses the first that answers is used."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from support.loopback import answering
from support.transports import over

from dispatchers.adapters.http_client.connector import HAPPY_EYEBALLS_SECONDS
from dispatchers.adapters.http_client.transport import Transport

SECOND = timedelta(seconds=1)
STREAM = (socket.SOCK_STREAM, 6, "")


async def post(transport: Transport, url: str, host: str) -> int:
    return (await transport.send(httpx.Request("POST", f"http://{host}:{httpx.URL(url).port}/x"))).status


def lookups() -> int:
    return [thread.name for thread in threading.enumerate()].count("outbox-resolve")


def one_is_left() -> bool:
    """Whether one lookup is left soon: the thread of another that was answered may still be ending."""
    latest = time.monotonic() + 60
    while lookups() != 1 and time.monotonic() < latest:
        time.sleep(0.01)
    return lookups() == 1


@contextmanager
def hanging_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """It answers for `hangs.test` only at the end of the block, or when the event is set; for all others it answers at once."""
    answers = threading.Event()

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if host == "hangs.test":
            answers.wait()
        return [(socket.AF_INET, *STREAM, ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        yield answers
    finally:
        answers.set()


def test_a_lookup_that_hangs_delays_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(transport: Transport, url: str) -> None:
        hanging = [asyncio.create_task(post(transport, url, "hangs.test")) for _ in range(50)]
        await asyncio.sleep(0)
        assert await post(transport, url, "crm.test") == 200
        assert await asyncio.to_thread(one_is_left)  # the event loop's own threads are free
        answers.set()
        assert await asyncio.gather(*hanging) == [200] * 50

    with hanging_name_server(monkeypatch) as answers:
        over(answering(), both, timeout=60 * SECOND)


def test_a_lookup_that_hangs_ends_with_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(transport: Transport, url: str) -> None:
        for _ in range(2):
            with pytest.raises(httpx.ConnectTimeout):
                await post(transport, url, "hangs.test")
            assert lookups() == 1
        answers.set()
        assert await post(transport, url, "hangs.test") == 200

    with hanging_name_server(monkeypatch) as answers:
        over(answering(), give_up, timeout=SECOND)


def test_a_failed_lookup_is_made_again_for_the_next_send(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [socket.gaierror(socket.EAI_AGAIN, "try again"), ("127.0.0.1", 0)]

    def getaddrinfo(*args: Any, **kwargs: Any) -> list[Any]:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return [(socket.AF_INET, *STREAM, answer)]

    async def twice(transport: Transport, url: str) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        with pytest.raises(httpx.ConnectError):
            await post(transport, url, "crm.test")
        assert await post(transport, url, "crm.test") == 200

    over(answering(), twice)


@contextmanager
def unreachable(host: str, port: int) -> Iterator[None]:
    """A port where connecting takes forever: the queue of connections that no server accepts is full."""
    with socket.socket(socket.AF_INET6) as listener, socket.socket(socket.AF_INET6) as one:
        listener.bind((host, port))
        listener.listen(0)
        one.connect((host, port))
        yield


def test_the_next_address_is_tried_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        dead = [(socket.AF_INET6, *STREAM, ("::1", port, 0, 0))] * 50
        return [*dead, (socket.AF_INET, *STREAM, ("127.0.0.1", port))]

    async def at_two_addresses(transport: Transport, url: str) -> float:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        loop = asyncio.get_running_loop()
        with unreachable("::1", httpx.URL(url).port or 80):
            began = loop.time()
            assert await post(transport, url, "crm.test") == 200
            assert len(asyncio.all_tasks()) <= 3  # this one and the server's: the other attempt was given up
            return loop.time() - began

    assert over(answering(), at_two_addresses, timeout=30 * SECOND) < 49 * HAPPY_EYEBALLS_SECONDS
