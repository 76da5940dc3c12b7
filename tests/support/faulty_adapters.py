"""An honest adapter with its suite, and adapters that each have one defect for the suite to find."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from dispatchers import Adapter, Deferred, Delivered, Delivery, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.testing.conformance import Scenario
from dispatchers.testing.conformance_http import HttpSuite
from dispatchers.testing.faulty_http import FaultyHttp, answer

TOKEN = "crm_token_5eb63bbb"
TLS = httpx.create_ssl_context()  # once: making one takes longer than all the rest of a send
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
FOREIGN = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, httpx.CookieConflict)


class Crm(Adapter):
    """An honest adapter. What is below has one defect each."""

    window = timedelta(days=7)

    def __init__(self, url: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.url = url
        self.timeout = timeout

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            return await self.exchange(delivery)
        except UNSENT as error:
            return Deferred(f"not connected: {type(error).__name__}")
        except FOREIGN as error:
            return Unknown(f"no answer: {type(error).__name__}")

    async def exchange(self, delivery: Delivery) -> Outcome:
        headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": delivery.key}
        async with self.client() as client:
            request = client.build_request(
                "PUT", f"{self.url}/contacts", content=delivery.payload_json, headers=headers
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return self.meaning(response)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=TLS, trust_env=False)

    def meaning(self, response: httpx.Response) -> Outcome:
        match response.status_code:
            case 200 | 201:
                return Delivered({"status": response.status_code})
            case 401 | 403 | 429:
                return Deferred(f"HTTP {response.status_code}")
            case 400 | 404 | 422:
                return Rejected(f"HTTP {response.status_code}")
            case _:
                return Unknown(f"HTTP {response.status_code}")


class CrmSuite(HttpSuite):
    operation = "crm.contacts.upsert"
    payload = {"email": "ada@example.com"}  # noqa: RUF012
    secrets: Sequence[str] = (TOKEN,)
    private: Sequence[str] = ("ada@example.com",)
    client_exceptions = FOREIGN
    remote_timeout = timedelta(seconds=0.3)
    scenarios: Sequence[Scenario] = (
        Scenario("created", answer(201), Delivered),
        Scenario("invalid", answer(422), Rejected),
        Scenario("limited", answer(429), Deferred),
        Scenario("failed", answer(500), Unknown),
    )
    never: Mapping[type[Any], str] = {
        KeyConflict: "the CRM does not compare requests",
        InProgress: "the CRM lets the second request wait",
    }
    adapter_class: type[Crm] = Crm

    def adapter(self, remote: FaultyHttp, timeout: timedelta) -> Adapter:
        return self.adapter_class(remote.url, timeout)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*args: object, **settings: object) -> None:
            raise error

        monkeypatch.setattr(httpx.AsyncClient, "send", fail)
        return self.adapter_class("http://crm.test")


def suite_of(adapter_class: type[Crm], **declared: Any) -> HttpSuite:
    """The suite for this adapter."""
    made: HttpSuite = type("Suite", (CrmSuite,), {"adapter_class": adapter_class, **declared})()
    return made


def scenario_of(suite: HttpSuite, name: str) -> Scenario:
    return next(scenario for scenario in (*suite.scenarios, *suite.fault_scenarios()) if scenario.name == name)


# --- adapters with a defect


class Retrying(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        outcome = await super().send(delivery)
        return await super().send(delivery) if isinstance(outcome, Unknown) else outcome


class Following(Crm):
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=TLS, trust_env=False, follow_redirects=True)


class Raising(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        return await self.exchange(delivery)


class ForgettingAnException(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        try:
            return await self.exchange(delivery)
        except httpx.HTTPError as error:
            return Unknown(f"no answer: {type(error).__name__}")


class QuotingErrors(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        try:
            return await self.exchange(delivery)
        except FOREIGN as error:
            return Unknown(f"no answer: {error}!")


class HopingForTheBest(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        try:
            return await self.exchange(delivery)
        except FOREIGN:
            return Delivered()


class TellingTheToken(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Unknown(f"HTTP {response.status_code} with {response.request.headers['Authorization']}")


class TellingThePayload(Crm):
    async def exchange(self, delivery: Delivery) -> Outcome:
        await super().exchange(delivery)
        return Unknown(f"no contact {delivery.payload['email']}")


class KeepingTheToken(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Delivered({"sent": [dict(response.request.headers)]})


class LoggingTheToken(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        try:
            raise ValueError(f"{response.request.headers}, {TOKEN}")
        except ValueError:
            logging.getLogger("crm").exception("odd")
        return super().meaning(response)


class ShowingTheToken(Crm):
    def __repr__(self) -> str:
        return f"Crm({self.url!r}, {TOKEN!r})"


class Deaf(Crm):
    """Continues when it is cancelled."""

    async def send(self, delivery: Delivery) -> Outcome:
        exchange = asyncio.ensure_future(super().send(delivery))
        while not exchange.done():
            try:
                await asyncio.shield(exchange)
            except asyncio.CancelledError:
                continue
        return exchange.result()


class Blocking(Crm):
    """A blocking call in an async function: nothing else runs meanwhile, the dispatcher's timer included."""

    async def exchange(self, delivery: Delivery) -> Outcome:
        time.sleep(5)  # noqa: ASYNC251
        return Delivered()


class BlockingAWhile(Crm):
    async def exchange(self, delivery: Delivery) -> Outcome:
        time.sleep(self.timeout.total_seconds() + 1.5)  # noqa: ASYNC251
        return Delivered()


class Lingering(Crm):
    """Continues in the background after it was cancelled."""

    async def send(self, delivery: Delivery) -> Outcome:
        return await asyncio.shield(asyncio.ensure_future(self.twice(delivery)))

    async def twice(self, delivery: Delivery) -> Outcome:
        outcome = await super().send(delivery)
        return await super().send(delivery) if isinstance(outcome, Unknown) else outcome


class LeavingATask(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        self.task = asyncio.ensure_future(asyncio.Event().wait())
        return await super().send(delivery)


class NumberingAttempts(Crm):
    async def exchange(self, delivery: Delivery) -> Outcome:
        return await super().exchange(
            delivery._replace(payload_json=json.dumps([delivery.payload, delivery.attempt]).encode())
        )


class NumberingProcesses(Crm):
    def __init__(self, url: str, timeout: timedelta) -> None:
        super().__init__(f"{url}/{uuid4()}", timeout)


class InventingKeys(Crm):
    async def exchange(self, delivery: Delivery) -> Outcome:
        return await super().exchange(delivery._replace(key=str(uuid4())))


class MixingUp(Crm):
    async def exchange(self, delivery: Delivery) -> Outcome:
        self.key = delivery.key
        await asyncio.sleep(0)
        return await super().exchange(delivery._replace(key=self.key))


class KeepingAClient(Crm):
    """Its connections belong to the event loop in which they were opened."""

    def __init__(self, url: str, timeout: timedelta) -> None:
        super().__init__(url, timeout)
        self.kept = httpx.AsyncClient(verify=TLS, trust_env=False)

    async def exchange(self, delivery: Delivery) -> Outcome:
        return self.meaning(await self.kept.put(self.url, headers={"Idempotency-Key": delivery.key}))


class ClosingOnce(Crm):
    open = True

    async def aclose(self) -> None:
        assert self.open, "closed already"
        self.open = False


class DroppingAfterClose(Crm):
    open = True

    async def send(self, delivery: Delivery) -> Outcome:
        return await super().send(delivery) if self.open else Rejected("closed")

    async def aclose(self) -> None:
        self.open = False


class Optimistic(Crm):
    async def send(self, delivery: Delivery) -> Outcome:
        outcome = await super().send(delivery)
        return Deferred(outcome.reason) if isinstance(outcome, Unknown) else outcome


class Parsing(Crm):
    """Sends again what it could not parse."""

    async def exchange(self, delivery: Delivery) -> Outcome:
        async with self.client() as client:
            headers = {"Idempotency-Key": delivery.key}
            response = await client.put(self.url, content=delivery.payload_json, headers=headers)
            try:
                return Delivered(response.json())
            except ValueError:
                return Unknown("no JSON")


class AnsweringTheImpossible(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return KeyConflict("422") if response.status_code == 422 else super().meaning(response)


class AnsweringAnything(Crm):
    def meaning(self, response: httpx.Response) -> Any:
        return response.status_code


class KeepingObjects(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Delivered({"at": object()})


class KeepingTuples(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Delivered({"at": (1, 2)})


class Mute(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Rejected(" ")


class BackwardInTime(Crm):
    def meaning(self, response: httpx.Response) -> Outcome:
        return Deferred("later", after=timedelta(seconds=-1))


class Slow(Crm):
    def __init__(self, url: str, timeout: timedelta) -> None:
        super().__init__(url, timedelta(minutes=5))


class ServingNothing(Crm):
    def serves(self, operation: str) -> bool:
        return False
