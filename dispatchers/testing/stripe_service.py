"""The fake Stripe on a real socket: in a thread for tests, or as a process of its own.

    with running_stripe() as stripe:
        client = StripeClient("sk_test_fake", base_addresses={"api": stripe.url})
        stripe.force(ServiceFault.LOSE_RESPONSE)
        ...
        assert len(stripe.ledger.charges) == 1

    python -m dispatchers.testing.stripe_service --port 0 --ledger ledger.sqlite --lose 0.1

It speaks HTTP/1.1 by itself rather than through a framework: a lost response is a connection that really breaks, and a request
continues after its client has gone, as at Stripe.
"""

import argparse
import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import h11

from dispatchers.testing.faulty_http import read_request, reset_connection
from dispatchers.testing.service_faults import Faults, ServiceFault
from dispatchers.testing.stripe_core import API_KEY, Answer, Execution, FakeStripe, Request
from dispatchers.testing.stripe_ledger import StripeLedger

if TYPE_CHECKING:
    from stripe import StripeClient

    from dispatchers.adapters.stripe.adapter import StripeAdapter


@dataclass(frozen=True, slots=True)
class RunningStripe:
    """A fake Stripe that listens at `url`."""

    url: str
    fake: FakeStripe

    @property
    def ledger(self) -> StripeLedger:
        """The record of what the imitation has done."""
        return self.fake.ledger

    @property
    def api_key(self) -> str:
        """The key that the imitation accepts."""
        return API_KEY

    def adapter(self, **settings: Any) -> "StripeAdapter":
        """An adapter for this imitation. settings: those of `StripeAdapter`."""
        from dispatchers.adapters.stripe.adapter import StripeAdapter  # the imitation itself needs no SDK

        return StripeAdapter(**{"api_key": self.api_key, "base_url": self.url, **settings})

    def client(self, **settings: Any) -> "StripeClient":
        """A client of Stripe's SDK for this imitation. settings: those of `stripe.StripeClient`."""
        from stripe import StripeClient

        return StripeClient(self.api_key, **{"base_addresses": {"api": self.url}, **settings})

    def force(self, *faults: ServiceFault | None) -> None:
        """Let the next requests meet these faults, one each, in this order. None is a request without a fault."""
        self.fake.force(*faults)


@contextlib.contextmanager
def running_stripe(fake: FakeStripe | None = None, **arguments: Any) -> Iterator[RunningStripe]:
    """Serve `fake`, or an imitation made from `arguments`, on a free local port, in its own thread and event loop."""
    fake = fake or FakeStripe(**arguments)
    listening: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        stopped = asyncio.Event()
        async with serving(fake, "127.0.0.1", 0) as port:
            listening.set_result((port, asyncio.get_running_loop(), stopped))
            await stopped.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if listening.done():
                raise
            listening.set_exception(error)

    thread = threading.Thread(target=run, name="fake-stripe", daemon=True)
    thread.start()
    port, loop, stopped = listening.result()
    try:
        yield RunningStripe(f"http://127.0.0.1:{port}", fake)
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()


@contextlib.asynccontextmanager
async def serving(fake: FakeStripe, host: str, port: int) -> AsyncIterator[int]:
    """Serve `fake` inside a running event loop; yields the port. Leaving ends all requests in progress."""
    conversations: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast(asyncio.Task[None], asyncio.current_task())
        conversations.add(task)
        try:
            await Conversation(fake, reader, writer).run()
        except (ConnectionError, h11.RemoteProtocolError, asyncio.CancelledError):
            pass  # The client went away, spoke nonsense, or we are closing: no one reads the answer.
        finally:
            writer.close()
            conversations.discard(task)

    server = await asyncio.start_server(accept, host, port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)


class Conversation:
    """One connection: requests and answers in turn, until either side has had enough."""

    def __init__(self, fake: FakeStripe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._fake = fake
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        while (request := await self._request()) is not None:
            answer = await self._answer(request)
            if answer.lost == "reset":
                return reset_connection(self._writer)
            if answer.lost == "cut":
                return await self._send(answer, len(answer.body) // 2)
            if answer.lost:
                return self._writer.transport.abort()
            await self._send(answer)
            if self._http.our_state is h11.MUST_CLOSE:
                return None
            self._http.start_next_cycle()
        return None

    async def _answer(self, request: Request) -> Answer:
        await asyncio.sleep(self._fake.latency().total_seconds())
        received = self._fake.receive(request)
        if isinstance(received, Execution):
            await asyncio.sleep(received.takes.total_seconds())
            return self._fake.execute(received)
        return received

    async def _request(self) -> Request | None:
        read = await read_request(self._http, self._reader, self._writer)
        if read is None:
            return None
        path, _, query = read.target.partition("?")
        return Request(method=read.method, path=path, query=query, headers=read.headers, body=read.body)

    async def _send(self, answer: Answer, sent_bytes: int | None = None) -> None:
        """sent_bytes: how much of the body is sent before the connection ends; None for all of it."""
        headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
        body = answer.body if sent_bytes is None else answer.body[:sent_bytes]
        events = [h11.Response(status_code=answer.status, headers=headers), h11.Data(data=body)]
        for event in events if sent_bytes is not None else [*events, h11.EndOfMessage()]:
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


# --- as a process


def main() -> None:
    """Serve until SIGTERM. The first line printed is the port."""
    parser = argparse.ArgumentParser(prog="stripe_service", description="A strict fake of Stripe's v1 API.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (the default): any free one; printed as the first line")
    ledger_help = "SQLite file for what really happened; a restart continues it, with its keys (default: in memory)"
    parser.add_argument("--ledger", type=Path, help=ledger_help)
    parser.add_argument("--api-key", action="append", help=f"accept this key, its account its own ({API_KEY})")
    parser.add_argument("--window-hours", type=float, default=24, help="how long a key is remembered (24)")
    parser.add_argument("--seed", type=int, help="for the faults and ids")
    fractions = parser.add_argument_group("faults, as fractions of all requests")
    fractions.add_argument("--lose", type=float, default=0, help="commit, then drop the connection")
    fractions.add_argument("--lose-request", type=float, default=0, help="drop the connection, nothing done")
    fractions.add_argument("--fail", type=float, default=0, help="a 500 that is remembered; it happened")
    fractions.add_argument("--fail-before", type=float, default=0, help="a 500 that is remembered; it did not happen")
    fractions.add_argument("--unavailable", type=float, default=0, help="a 503 that is not remembered")
    fractions.add_argument("--rate-limit", type=float, default=0, help="429")
    fractions.add_argument("--slow", type=float, default=0, help="execute slowly; meanwhile 409 for the key")
    fractions.add_argument("--cut-off", type=float, default=0, help="commit, then break off in the answer's body")
    seconds = parser.add_argument_group("durations, in seconds")
    seconds.add_argument("--slow-for", type=float, default=1)
    seconds.add_argument("--retry-after", type=float, default=1)
    seconds.add_argument("--latency", type=float, default=0)
    given = parser.parse_args()

    faults = Faults(
        lose_response=given.lose,
        lose_request=given.lose_request,
        fail_after=given.fail,
        fail_before=given.fail_before,
        unavailable=given.unavailable,
        rate_limit=given.rate_limit,
        slow=given.slow,
        cut_off=given.cut_off,
        slow_for=timedelta(seconds=given.slow_for),
        retry_after=timedelta(seconds=given.retry_after),
        latency=timedelta(seconds=given.latency),
    )
    ledger = StripeLedger(given.ledger or ":memory:")
    fake = FakeStripe(
        accounts={key: f"acct_{number}" for number, key in enumerate(given.api_key or [API_KEY])},
        ledger=ledger,
        faults=faults,
        window=timedelta(hours=given.window_hours),
        # With the same seed a restart would make the ids again that the ledger already has.
        random=Random(None if given.seed is None else given.seed + ledger.count()),
    )
    asyncio.run(_serve_until_signalled(fake, given.host, given.port))


async def _serve_until_signalled(fake: FakeStripe, host: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving(fake, host, port) as bound:
        print(bound, flush=True)
        await stopped.wait()


if __name__ == "__main__":
    main()
