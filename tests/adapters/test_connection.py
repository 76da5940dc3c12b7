"""One connection on each event loop, whose transports have no class in common."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from support.loopback import answering, serving
from support.mail_servers import tls_contexts

from dispatchers.adapters.http_client.answer_reader import AnswerReader
from dispatchers.adapters.http_client.connection import Connection

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
encrypted = pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])


async def opened(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(loop), "127.0.0.1", port)
    return connection


@loops
@encrypted
def test_a_connection_carries_requests_and_sees_that_it_closes(
    new_loop: Callable[[], asyncio.AbstractEventLoop], is_encrypted: bool, tmp_path: Path
) -> None:
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:localhost") if is_encrypted else (None, None)

    async def scenario() -> None:
        async with serving(answering(), server_tls) as port:
            connection = await opened(port)
            below = connection._transport
            assert below is not None
            if client_tls is not None:
                await connection.encrypt(client_tls, "localhost")
            for _ in range(2):
                answer = AnswerReader(100)
                await connection.ask(REQUEST, answer, connection.loop.time() + 60)
                assert answer.status == 200
                assert connection.can_be_used_again(answer)
                assert not connection.is_closed()
            below.abort()  # its descriptor may soon belong to another connection
            assert not connection.can_be_used_again(answer)
            assert connection.is_closed()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
