"""The W3C headers of a trace, as the adapters send them."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import respx
from support.mail_servers import Mailbox, adapter_for, mail_server, send
from support.stripe_sends import delivery as charge
from test_http_adapter import delivery as contact

from dispatchers import Found
from dispatchers.adapters import HttpAdapter, StripeAdapter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OWN = "00-11111111111111111111111111111111-2222222222222222-01"
TRACE = {"traceparent": PARENT, "tracestate": "vendor=1"}


def sent_over_http(payload: dict[str, Any], trace: Mapping[str, str] = TRACE, **settings: Any) -> httpx.Headers:
    """The headers that the service gets."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(204)

    crm = HttpAdapter(base_url="https://crm.test", transport=httpx.MockTransport(answer), **settings)
    asyncio.run(crm.send(contact(payload, headers=trace)))
    return seen[0].headers


def test_a_request_carries_the_trace_of_its_delivery() -> None:
    sent = sent_over_http({})

    assert (sent["traceparent"], sent["tracestate"]) == (PARENT, "vendor=1")


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_a_payload_that_sets_the_traceparent_sets_the_whole_trace(name: str) -> None:
    """The state of one trace under the parent of another would be a trace that no one made."""
    sent = sent_over_http({"headers": {name: OWN}})

    assert sent.get_list("traceparent") == [OWN]
    assert "tracestate" not in sent


def test_an_adapter_that_sets_the_tracestate_sets_the_whole_trace() -> None:
    sent = sent_over_http({}, headers={"tracestate": "mine=1"})

    assert sent["tracestate"] == "mine=1"
    assert "traceparent" not in sent


def test_a_status_lookup_over_http_carries_the_trace() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    async def find(delivery: Any, get: Any) -> Found:
        await get("/contacts?made_by=7")
        return Found()

    crm = HttpAdapter(base_url="https://crm.test", transport=httpx.MockTransport(answer), find=find)

    assert asyncio.run(crm.find(contact({}, headers=TRACE))) == Found()
    assert (seen[0].headers["traceparent"], seen[0].headers["tracestate"]) == (PARENT, "vendor=1")


@pytest.fixture
def stripe() -> Iterator[respx.MockRouter]:
    with respx.mock(base_url="https://api.stripe.com") as router:
        yield router


def test_a_request_to_stripe_carries_the_trace(stripe: respx.MockRouter) -> None:
    route = stripe.post("/v1/payment_intents").respond(json={"id": "pi_1", "object": "payment_intent"})

    asyncio.run(StripeAdapter(api_key="sk_test_x").send(charge(headers=TRACE)))

    sent = route.calls.last.request.headers
    assert (sent["traceparent"], sent["tracestate"]) == (PARENT, "vendor=1")


def test_a_trace_that_no_header_can_hold_is_not_sent_to_stripe(stripe: respx.MockRouter) -> None:
    route = stripe.post("/v1/payment_intents").respond(json={"id": "pi_1", "object": "payment_intent"})

    asyncio.run(StripeAdapter(api_key="sk_test_x").send(charge(headers={"traceparent": "a\nb", "tracestate": " x"})))

    assert not {"traceparent", "tracestate"} & set(route.calls.last.request.headers)


def test_a_mail_does_not_show_the_trace_to_its_recipients() -> None:
    """And every attempt sends the same bytes, by which a server with keys recognises it."""
    mailbox = Mailbox()

    async def main() -> None:
        async with mail_server(mailbox) as port:
            adapter = adapter_for(port)
            await send(adapter, headers=TRACE)
            await adapter.aclose()

    asyncio.run(main())

    assert len(mailbox.contents) == 1
    assert PARENT.encode() not in mailbox.contents[0]
