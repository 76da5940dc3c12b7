"""HttpAdapter's find: a user's function, and the reading that it is handed."""

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import httpx
import pytest
from test_http_adapter import ENTRY, adapter, delivery

from dispatchers import Absent, Adapter, CannotTell, Found
from dispatchers.adapters import HttpAdapter
from dispatchers.testing.conformance import Scenario
from dispatchers.testing.conformance_http import HttpLookupSuite
from dispatchers.testing.faulty_http import answer

TOKEN = "Bearer crm_token_1"


async def by_entry(delivery: Any, get: Any) -> Any:
    answer = await get(f"/contacts?made_by={delivery.id}")
    if answer.status != 200 or not answer.whole:
        return CannotTell(f"HTTP {answer.status}")
    try:
        made = json.loads(answer.body)["made"]
    except (ValueError, KeyError, TypeError):
        return CannotTell("an answer of another shape")
    return Found({"ids": made}) if made else Absent()


def by_entry_blocking(delivery: Any, get: Any) -> Any:
    answer = get(f"/contacts?made_by={delivery.id}")
    return Found({"thread": threading.current_thread().name}) if answer.status == 200 else CannotTell("no")


def look(find: Any, far: Any = lambda request: httpx.Response(200, json={"made": [7]}), **settings: Any) -> Any:
    looking: Any = adapter(far, find=find, **settings)
    return asyncio.run(looking.find(delivery()))


class TestHttpLooks(HttpLookupSuite):
    operation = "crm.contacts.create"
    payload = {"url": "/contacts"}  # noqa: RUF012
    secrets = (TOKEN,)
    scenarios = (
        Scenario("there", answer(json={"made": [7]}), Found),
        Scenario("not there", answer(json={"made": []}), Absent),
        Scenario("failed", answer(500), CannotTell),
    )

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        return HttpAdapter(base_url=remote.url, headers={"Authorization": TOKEN}, timeout=timeout, find=by_entry)


def test_it_reads_with_our_credentials_and_without_a_key() -> None:
    requests: list[httpx.Request] = []

    def far(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"made": [7]})

    finding = look(by_entry, far, headers={"Authorization": TOKEN})

    (request,) = requests
    assert finding == Found({"ids": [7]})
    assert (request.method, str(request.url)) == ("GET", f"https://crm.test/contacts?made_by={ENTRY}")
    assert request.headers["Authorization"] == TOKEN
    assert "Idempotency-Key" not in request.headers


def test_a_sync_function_reads_from_a_thread_of_its_own() -> None:
    assert look(by_entry_blocking) == Found({"thread": "outbox-find"})


@pytest.mark.parametrize("is_async", [True, False])
def test_nothing_is_read_elsewhere(is_async: bool) -> None:
    async def find(delivery: Any, get: Any) -> Any:
        return await get("https://evil.test/")

    finding = look(find if is_async else lambda delivery, get: get("https://evil.test/"))

    assert isinstance(finding, CannotTell)
    assert finding.reason.startswith("the url of a status lookup must be a path below the adapter's base_url")


def test_what_cannot_be_read_is_inconclusive() -> None:
    def far(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert look(by_entry, far) == CannotTell("no answer: ConnectError")
    assert look(by_entry_blocking, far) == CannotTell("no answer: ConnectError")


def test_without_a_function_it_cannot_be_looked_at() -> None:
    assert adapter(lambda request: httpx.Response(200)).find is None
