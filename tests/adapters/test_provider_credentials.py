"""Credentials of a profile's adapter that expire: a function returns the present one."""

import asyncio
from typing import Any

import pytest
from support.profiles import profile

from dispatchers import CannotTell, Deferred, Delivery, Outcome
from dispatchers.adapters.providers import sendgrid
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.faulty_http import FaultyHttp, answer
from outbox.errors import ConfigurationError


def delivery() -> Delivery:
    return Delivery(ENTRY, "pay.payments.create", b"{}", "ck1_abc", 1, {}, {}, 0.0)


def send(adapter: Any) -> Outcome:
    async def main() -> Outcome:
        try:
            outcome: Outcome = await adapter.send(delivery())
            return outcome
        finally:
            await adapter.aclose()

    return asyncio.run(main())


def test_a_credential_that_expires_is_asked_for_at_each_send(remote: FaultyHttp) -> None:
    tokens = iter(["token_1_secret", "token_2_secret"])
    adapter = profile(scope="account")(api_key=lambda: next(tokens), base_url=remote.url)
    remote.behave(answer(422, json={"name": "x"}))

    for _ in range(2):
        send(adapter)

    sent = [request.headers["authorization"] for request in remote.requests]
    assert sent == ["Bearer token_1_secret", "Bearer token_2_secret"]
    assert "key=" not in adapter.pinned


def test_a_credential_that_cannot_be_had_defers_the_send(remote: FaultyHttp) -> None:
    def fails() -> str:
        raise OSError("no token for secret_1")

    outcome = send(profile(scope="account")(api_key=fails, base_url=remote.url))

    assert outcome == Deferred("nothing was sent: the function of a credential raised OSError", cooldown=True)
    assert remote.requests == []


@pytest.mark.parametrize("returned", [None, "", b"bytes", "secret\r\nX-Other: 1", "secret ü", "secret\n"])
def test_a_credential_that_no_header_can_have_defers_the_send(remote: FaultyHttp, returned: Any) -> None:
    outcome = send(profile(scope="account")(api_key=lambda: returned, base_url=remote.url))

    assert isinstance(outcome, Deferred)
    assert outcome.reason.startswith("nothing was sent: the function of a credential ")
    assert remote.requests == []


@pytest.mark.parametrize("scope", ["api_key", "unknown"])
def test_a_function_of_an_api_key_needs_the_name_of_the_account(scope: Any) -> None:
    """Otherwise another account's API key would not be noticed between two attempts."""
    with pytest.raises(ConfigurationError, match="give pinned="):
        profile(scope=scope)(api_key=lambda: "token")

    assert profile(scope=scope)(api_key=lambda: "token", pinned="shop_1").pinned.endswith(
        "shop_1 key in Idempotency-Key"
    )
    sendgrid(api_key=lambda: "token")


def test_only_a_credential_may_be_a_function() -> None:
    """Another setting is pinned, and a function is another one in each process."""
    with pytest.raises(ConfigurationError, match=r"shop must be a text \("):
        profile(base_url="https://{shop}.pay.example.com")(api_key="k", shop=lambda: "shop_1")


def test_a_lookup_has_the_present_credential(remote: FaultyHttp) -> None:
    async def find(delivery: Delivery, get: Any) -> CannotTell:
        await get("/payments")
        return CannotTell()

    adapter = profile(scope="account")(api_key=lambda: "token_1", base_url=remote.url, find=find)

    async def main() -> None:
        await adapter.find(delivery())
        await adapter.aclose()

    asyncio.run(main())

    assert [request.headers["authorization"] for request in remote.requests] == ["Bearer token_1"]


def test_a_setting_that_only_the_own_address_names_is_not_needed_elsewhere() -> None:
    of_shops = profile(base_url="https://{shop}.pay.example.com")

    with pytest.raises(ConfigurationError, match="needs shop="):
        of_shops(api_key="k")

    of_shops(api_key="k", base_url="https://sandbox.pay.example.com")
