"""What `bench sends` compares: bare clients, the adapters that the library has, and the whole dispatcher."""

import asyncio
import json
import ssl
from datetime import date, timedelta
from typing import Any, Protocol
from uuid import uuid4

import aiohttp
import stripe
from sqlalchemy import Engine, text

import outbox
from benchmarks.draining import filling, numbers
from dispatchers import Delivered, Delivery, Outcome
from dispatchers.adapters import HttpAdapter, StripeAdapter
from dispatchers.adapters.providers import BodyField, Header, Post, Profile, bearer
from dispatchers.process.dispatcher_work import DispatcherWork

CONTACT = {"email": "ada@example.com", "name": "Ada", "note": "a customer since the first day"}
INTENT = {"amount": 2000, "currency": "eur", "description": "one line of an order"}
HEADERS = {"Authorization": "Bearer crm_token_1", "Content-Type": "application/json"}
SECRET = "sk_test_benchmark"
HEADER_KEY = Header("Idempotency-Key")


class Sender(Protocol):
    """One way to send. name: as it is printed."""

    name: str

    async def prepare(self, sends: int) -> None:
        """What is not measured, before so many sends."""

    async def send_all(self, sends: int, in_flight: int) -> None: ...

    async def close(self) -> None:
        """Close the connections."""


class Loop:
    """As many tasks as requests may be in flight; each sends one after another."""

    async def prepare(self, sends: int) -> None:
        pass

    async def send_all(self, sends: int, in_flight: int) -> None:
        left = iter(range(sends))

        async def send_some() -> None:
            for _ in left:
                await self.send()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(sends, in_flight)):
                group.create_task(send_some())

    async def send(self) -> None:
        raise NotImplementedError


class BareAiohttp(Loop):
    name = "bare aiohttp"

    def __init__(self, url: str, tls: ssl.SSLContext) -> None:
        self._url = f"{url}/v2/contacts"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls))

    async def send(self) -> None:
        headers = {**HEADERS, "Idempotency-Key": f"key_{next(numbers)}"}
        async with self._session.post(self._url, data=json.dumps(CONTACT).encode(), headers=headers) as answer:
            await answer.read()
            if answer.status != 200:
                raise SystemExit(f"bare aiohttp: HTTP {answer.status}")

    async def close(self) -> None:
        await self._session.close()


class BareStripe(Loop):
    name = "bare stripe SDK over aiohttp"

    def __init__(self, url: str, tls: ssl.SSLContext) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls))
        self._client = stripe.StripeClient(
            SECRET,
            base_addresses={"api": url},
            max_network_retries=0,
            http_client=stripe.AIOHTTPClient(session=self._session),
        )

    async def send(self) -> None:
        params: stripe.params.PaymentIntentCreateParams = {"amount": 2000, "currency": "eur", "description": "a line"}
        await self._client.v1.payment_intents.create_async(params, {"idempotency_key": f"key_{next(numbers)}"})

    async def close(self) -> None:
        await self._session.close()


class Alone(Loop):
    """An adapter without a dispatcher."""

    def __init__(self, name: str, adapter: HttpAdapter | StripeAdapter, operation: str, payload: object) -> None:
        self.name = name
        self._adapter = adapter
        self._operation = operation
        self._body = json.dumps(payload).encode()

    async def send(self) -> None:
        key = f"key_{next(numbers)}"
        delivery = Delivery(
            uuid4(), self._operation, self._body, key, 1, {}, {}, asyncio.get_running_loop().time() + 30
        )
        outcome = await self._adapter.send(delivery)
        if not isinstance(outcome, Delivered):
            raise SystemExit(f"{self.name}: {outcome}")

    async def close(self) -> None:
        await self._adapter.aclose()


class Counted:
    """Makes an adapter note when the sends that were expected have ended."""

    def expect(self, sends: int) -> None:
        self._left = sends
        self.ended = asyncio.Event()

    async def send(self, delivery: Delivery) -> Outcome:
        outcome: Outcome = await super().send(delivery)  # type: ignore[misc]  # of the adapter beside it
        self._left -= 1
        if not self._left:
            self.ended.set()
        return outcome


class CountedHttpAdapter(Counted, HttpAdapter):
    """An `HttpAdapter` that counts."""


class CountedStripeAdapter(Counted, StripeAdapter):
    """A `StripeAdapter` that counts."""


class Dispatched:
    """An adapter under a dispatcher that works as in `outbox run`: claimed from PostgreSQL, sent, settled there."""

    def __init__(
        self,
        name: str,
        adapter: CountedHttpAdapter | CountedStripeAdapter,
        engine: Engine,
        operation: str,
        payload: object,
    ) -> None:
        self.name = name
        self._adapter = adapter
        self._engine = engine
        self._operation = operation
        self._payload = payload
        self._outbox = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="bench")

    async def prepare(self, sends: int) -> None:
        await asyncio.to_thread(self._fill, sends)
        self._adapter.expect(sends)

    def _fill(self, sends: int) -> None:
        with filling(self._engine) as session:
            for _ in range(sends):
                self._outbox.enqueue(session, self._operation, self._payload, parent=f"n:{next(numbers)}")

    async def send_all(self, sends: int, in_flight: int) -> None:
        destination = self._operation.partition(".")[0]
        dispatcher = DispatcherWork(
            self._engine, outbox=self._outbox, adapters={destination: self._adapter}, concurrency=in_flight
        )
        await dispatcher.pump(self._adapter.ended)
        with self._engine.connect() as connection:
            left = connection.scalar(text("SELECT count(*) FROM outbox_queue"))
        if left:
            raise SystemExit(f"{self.name}: the dispatcher left {left} of {sends}")

    async def close(self) -> None:
        await self._adapter.aclose()


def http_alone(url: str, tls: ssl.SSLContext) -> Alone:
    payload = {"url": "/contacts", "json": CONTACT}
    return Alone("HttpAdapter", HttpAdapter(**_http(url, tls)), "crm.contacts.create", payload)


def http_dispatched(url: str, tls: ssl.SSLContext, engine: Engine) -> Dispatched:
    adapter, payload = CountedHttpAdapter(**_http(url, tls)), {"url": "/contacts", "json": CONTACT}
    return Dispatched("HttpAdapter in a dispatcher", adapter, engine, "crm.contacts.create", payload)


def profile_alone(url: str, tls: ssl.SSLContext, key: Header | BodyField = HEADER_KEY) -> Alone:
    """The request of `http_alone`, as the operation of a profile."""
    crm = Profile(
        name="crm",
        title="CRM",
        as_of=date(2026, 11, 27),
        sources=("this benchmark",),
        base_url=f"{url}/v2",
        auth=bearer("token"),
        key=key,
        window=timedelta(days=7),
        stores="2xx",
        operations={"contacts.create": Post("/contacts")},
        result=("id",),
    )
    name = "a profile" if isinstance(key, Header) else "a profile with the key in the body"
    return Alone(name, crm(token="crm_token_1", tls=tls), "crm.contacts.create", CONTACT)


def _http(url: str, tls: ssl.SSLContext) -> dict[str, Any]:
    headers = {"Authorization": HEADERS["Authorization"]}
    return {"base_url": f"{url}/v2", "headers": headers, "window": timedelta(days=7), "tls": tls}


def stripe_alone(url: str) -> Alone:
    adapter = StripeAdapter(api_key=SECRET, base_url=url)
    return Alone("StripeAdapter", adapter, "stripe.payment_intents.create", INTENT)


def stripe_dispatched(url: str, engine: Engine) -> Dispatched:
    adapter = CountedStripeAdapter(api_key=SECRET, base_url=url)
    return Dispatched("StripeAdapter in a dispatcher", adapter, engine, "stripe.payment_intents.create", INTENT)
