"""Every `find` of ours in the suite for status lookups, and faulty ones that it catches."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from support.faulty_adapters import TLS, TOKEN, scenario_of

from dispatchers import Absent, Adapter, CannotTell, Delivered, Delivery, Found, Outcome
from dispatchers.adapters import StripeAdapter
from dispatchers.testing.conformance import ENTRY, Scenario
from dispatchers.testing.conformance_http import HttpLookupSuite
from dispatchers.testing.conformance_lookups import LookupSuite
from dispatchers.testing.faulty_http import answer

SECRET = "sk_test_4eC39HqLyjWDarjtT1zdp7dc"
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "created": 1, "metadata": {}}
OURS = {**INTENT, "id": "pi_2", "metadata": {"outbox_id": str(ENTRY)}}
DECLINED = {**OURS, "status": "requires_payment_method"}
DATE = {"Date": "Sat, 21 Nov 2026 15:00:00 GMT"}


def page(*objects: Any, **fields: Any) -> Any:
    return answer(json={"object": "list", "data": objects, "has_more": False} | fields, headers=DATE)


class TestStripeLooks(HttpLookupSuite):
    operation = "stripe.payment_intents.create"
    payload = {"amount": 2000, "currency": "eur"}  # noqa: RUF012
    secrets = (SECRET,)
    scenarios = (
        Scenario("there", page(INTENT, OURS), Found),
        Scenario("not there", page(INTENT), Absent),
        Scenario("nothing there", page(), Absent),
        Scenario("older ones only", page(INTENT, has_more=True), Absent),
        Scenario("there but declined", page(DECLINED), CannotTell, payload={**payload, "confirm": True}),
        Scenario("no clock", answer(json={"object": "list", "data": [], "has_more": False}), CannotTell),
        Scenario("an object without metadata", page({"id": "pi_1", "object": "payment_intent"}), CannotTell),
        Scenario("no list", answer(json={}, headers=DATE), CannotTell),
        Scenario("not found", answer(404, json={"error": {"type": "invalid_request_error"}}), CannotTell),
    )

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        return StripeAdapter(api_key=SECRET, base_url=remote.url, timeout=timeout)


# --- an honest find, and what is wrong with others


class Looking(Adapter):
    """What is below has one defect each."""

    def __init__(self, url: str, timeout: timedelta) -> None:
        self.url = url
        self.timeout = timeout

    async def send(self, delivery: Delivery) -> Outcome:
        return Delivered()

    async def find(self, delivery: Delivery) -> Any:
        try:
            response = await self.get(delivery)
        except httpx.HTTPError as error:
            return CannotTell(type(error).__name__)
        return self.meaning(response) if response.status_code == 200 else CannotTell(f"HTTP {response.status_code}")

    async def get(self, delivery: Delivery) -> httpx.Response:
        async with httpx.AsyncClient(verify=TLS, trust_env=False) as client:
            return await client.get(f"{self.url}/{delivery.id}", headers={"Authorization": TOKEN})

    def meaning(self, response: httpx.Response) -> Any:
        try:
            return Found({"id": 7}) if response.json()["made"] else Absent()
        except (ValueError, KeyError, TypeError):
            return CannotTell("no JSON")


class Hasty(Looking):
    """Takes an unreachable service for an empty one."""

    async def find(self, delivery: Delivery) -> Any:
        finding = await super().find(delivery)
        return Absent() if isinstance(finding, CannotTell) else finding


class TakingErrorsForAbsence(Looking):
    async def find(self, delivery: Delivery) -> Any:
        try:
            response = await self.get(delivery)
        except httpx.HTTPError as error:
            return CannotTell(type(error).__name__)
        return self.meaning(response) if response.status_code == 200 else Absent()


class TakingAnythingForAbsence(Looking):
    def meaning(self, response: httpx.Response) -> Any:
        return Found({"id": 7}) if b"true" in response.content else Absent()


class Mistaken(Looking):
    def meaning(self, response: httpx.Response) -> Any:
        return Found({"id": 7})


class Revealing(Looking):
    def meaning(self, response: httpx.Response) -> Any:
        return Found({"asked with": response.request.headers["authorization"]})


class KeepingTuples(Looking):
    def meaning(self, response: httpx.Response) -> Any:
        return Found({"ids": (7,)})


class Answering(Looking):
    def meaning(self, response: httpx.Response) -> Any:
        return True


class Deaf(Looking):
    async def find(self, delivery: Delivery) -> Any:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue


class LookingSuite(HttpLookupSuite):
    operation = "crm.contacts.upsert"
    payload = {"email": "ada@example.com"}  # noqa: RUF012
    secrets = (TOKEN,)
    remote_timeout = timedelta(seconds=0.3)
    scenarios = (
        Scenario("there", answer(json={"made": True}), Found),
        Scenario("not there", answer(json={"made": False}), Absent),
        Scenario("failed", answer(500), CannotTell),
    )
    of: type[Looking] = Looking

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        return self.of(remote.url, timeout)


class TestHonestLooks(LookingSuite):
    pass


@pytest.mark.parametrize(
    ("adapter_class", "scenario", "text"),
    [
        (Hasty, "connection refused", "does not prove absence"),
        (Hasty, "reset without an answer", "does not prove absence"),
        (TakingErrorsForAbsence, "quotes us with 503", "does not prove absence"),
        (TakingErrorsForAbsence, "quotes us with 401", "does not prove absence"),
        (TakingErrorsForAbsence, "redirect 302", "does not prove absence"),
        (TakingAnythingForAbsence, "a body that is no JSON", "does not prove absence"),
        (Mistaken, "not there", "returned Found"),
        (Revealing, "there", "the result shows secret 0"),
        (KeepingTuples, "there", "equal after it was written and read"),
        (Answering, "there", "returned an object of type bool"),
        (Deaf, "hangs before the first byte", "must return by its deadline"),
    ],
)
def test_a_defect_is_caught(adapter_class: type[Looking], scenario: str, text: str) -> None:
    suite = type("TestPlanted", (LookingSuite,), {"of": adapter_class})()

    with pytest.raises(AssertionError) as failure:
        suite.test_every_rule_holds(scenario_of(suite, scenario))

    assert text in str(failure.value)
    assert TOKEN not in str(failure.value)


def test_a_finding_needs_a_scenario_or_a_reason() -> None:
    suite = type("TestPlanted", (LookingSuite,), {"scenarios": LookingSuite.scenarios[:1]})()

    with pytest.raises(AssertionError, match="no scenario expects Absent: add one to `scenarios`"):
        suite.test_each_finding_has_a_scenario_or_a_reason(Absent)


def test_an_adapter_without_a_find_is_reported() -> None:
    suite = type("TestPlanted", (LookingSuite,), {"of": type("Blind", (Looking,), {"find": None})})()

    with pytest.raises(AssertionError, match="Blind must have a method `find`"):
        suite.test_every_rule_holds(suite.scenarios[0])


@pytest.mark.parametrize("hook", ["adapter(self, remote, timeout)", "remote(self)"])
def test_a_hook_that_is_missing_is_named(hook: str) -> None:
    suite = type("TestPlanted", (LookupSuite,), {})()

    with pytest.raises(NotImplementedError) as failure:
        getattr(suite, hook.partition("(")[0])(*[None] * hook.count(","))

    assert str(failure.value) == f"TestPlanted needs {hook}"


def test_what_is_left_out_is_said() -> None:
    suite = type("TestPlanted", (LookupSuite,), {"operation": "a.b"})()

    with pytest.raises(
        pytest.fail.Exception, match="TestPlanted must set payload, scenarios, secrets: see the docstring"
    ):
        suite.pytest_generate_tests(json)  # type: ignore[arg-type]
