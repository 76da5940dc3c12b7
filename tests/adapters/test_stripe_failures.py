"""StripeAdapter, against the real SDK: what each exception means, and what a broken or reused connection does."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import httpx
import pytest
import respx
import stripe
import stripe.oauth_error
from support.stripe_sends import API_KEY, INTENT, KEY, delivery, raised, send

from dispatchers.adapters import StripeAdapter
from dispatchers.adapters.stripe.outcomes import ROWS, Exchange, outcome_of
from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected, Unknown


@pytest.fixture
def adapter() -> StripeAdapter:
    return StripeAdapter(api_key=API_KEY, api_version="2026-10-28.endive")


def descendants(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_exception_of_the_sdk_has_a_row_of_its_own() -> None:
    without = {cls for cls in (stripe.StripeError, *descendants(stripe.StripeError)) if cls not in ROWS}

    assert without == set()


def test_an_exception_without_a_row_is_answered_as_its_parent() -> None:
    class NewError(stripe.RateLimitError):
        """Of a later SDK."""

    assert isinstance(outcome_of(NewError("m", http_status=429), Exchange(started=True)), Deferred)


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (
            raised(stripe.CardError, "m", "p", "c", http_status=402),
            Rejected("CardError: HTTP 402", conclusive=True, result={"http_status": 402}),
        ),
        (stripe.AuthenticationError("no API key"), Deferred("AuthenticationError", cooldown=True)),
        (raised(stripe.APIConnectionError, "m"), Unknown("APIConnectionError")),
        (raised(stripe.SignatureVerificationError, "m", "sig"), Unknown("SignatureVerificationError")),
        (
            raised(stripe.oauth_error.InvalidGrantError, "c", "d", http_status=400),
            Unknown("InvalidGrantError: HTTP 400"),
        ),
        (stripe.QuotaExceededError("m", http_status=400), Deferred("QuotaExceededError: HTTP 400", cooldown=True)),
        (stripe.StripeError("m", http_status=200), Delivered({"unparsed": True, "http_status": 200})),
        (RuntimeError("unforeseen"), Unknown("RuntimeError")),
    ],
)
def test_an_exception_raised_after_the_send_began_means(exception: Exception, expected: Outcome) -> None:
    assert outcome_of(exception, Exchange(started=True)) == expected


# --- the connection, over real sockets

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """A server on a loopback port, at this base URL; each of its connections is handed to `answer`, then closed."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()  # without `async with`, which waits since Python 3.12 until the last client has gone


async def whole_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.split(b":")[1]))


def send_to(answer: Answer, scheme: str = "http", timeout: timedelta = timedelta(seconds=5)) -> Outcome:
    async def scenario() -> Outcome:
        async with listening(answer) as url:
            adapter = StripeAdapter(api_key=API_KEY, base_url=url.replace("http", scheme, 1), timeout=timeout)
            try:
                return await adapter.send(delivery())
            finally:
                await adapter.aclose()

    return asyncio.run(scenario())


async def closing_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"not TLS")


def test_a_refused_connection_was_surely_not_sent() -> None:
    async def closed_port() -> str:
        async with listening(closing_at_once) as url:
            return url

    adapter = StripeAdapter(api_key=API_KEY, base_url=asyncio.run(closed_port()))

    assert send(adapter) == Deferred("nothing was sent: connect: refused")


def test_an_unresolvable_host_was_surely_not_sent() -> None:
    adapter = StripeAdapter(api_key=API_KEY, base_url="http://stripe.invalid")

    assert isinstance(send(adapter), Deferred)


def test_a_failed_tls_handshake_was_surely_not_sent() -> None:
    assert isinstance(send_to(closing_at_once, scheme="https"), Deferred)


def test_a_refusal_that_another_send_met_is_no_proof_for_this_one() -> None:
    """Python chains an error to whatever was being handled; only the cause belongs to this send."""
    try:
        raise httpx.ConnectError("of another send")
    except httpx.ConnectError:
        try:
            raise raised(stripe.APIConnectionError, "ReadError") from httpx.ReadError("of this one")
        except stripe.APIConnectionError as error:
            outcome = outcome_of(error, Exchange(started=True))

    assert isinstance(outcome, Unknown)


def test_an_answer_lost_after_the_request_was_read_is_unknown() -> None:
    read = []

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await whole_request(reader))

    outcome = send_to(lose)

    assert isinstance(outcome, Unknown)
    assert len(read) == 1
    assert KEY.encode() in read[0]


def test_a_success_whose_body_breaks_off_is_delivered() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\nRequest-Id: req_3\r\n\r\n{"id": "pi_')

    assert send_to(break_off) == Delivered({"unparsed": True, "http_status": 200, "request_id": "req_3"})


def test_no_answer_in_time_is_unknown() -> None:
    async def dawdle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await reader.read()

    assert send_to(dawdle, timeout=timedelta(seconds=1)) == Unknown("ReadTimeout")


async def succeed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(INTENT).encode()
    while True:
        try:
            await whole_request(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    assert isinstance(send_to(succeed), Delivered)


@pytest.mark.usefixtures("without_rest")
def test_a_connection_is_reused_and_a_cancelled_send_harms_no_other() -> None:
    connections, hangs = [], asyncio.Event()

    async def first_hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        if len(connections) == 1:
            await whole_request(reader)
            hangs.set()
            await reader.read()
        else:
            await succeed(reader, writer)

    async def scenario() -> list[Outcome]:
        async with listening(first_hangs) as url:
            adapter = StripeAdapter(api_key=API_KEY, base_url=url)
            sending = asyncio.ensure_future(adapter.send(delivery()))
            await hangs.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            outcomes = [await adapter.send(delivery()) for _ in range(3)]
            await adapter.aclose()
            return outcomes

    outcomes = asyncio.run(scenario())

    assert [type(outcome) for outcome in outcomes] == [Delivered] * 3
    assert len(connections) == 2


def test_an_adapter_outlives_its_event_loop(adapter: StripeAdapter, charges: respx.Route) -> None:
    for _ in range(2):
        assert isinstance(asyncio.run(adapter.send(delivery())), Delivered)
