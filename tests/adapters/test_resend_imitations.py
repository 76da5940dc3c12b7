"""Our fake of Resend, and one that others wrote from Resend's documents: the adapter meets the same answers at both."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.emulate import emulated_resend

from dispatchers import Delivered, Delivery, KeyConflict, Outcome, Rejected
from dispatchers.adapters.providers import resend
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.provider_core import Refusal
from dispatchers.testing.provider_service import RunningProvider, service_of

MAIL = {"from": "shop@example.com", "to": "ada@example.com", "subject": "Your order", "html": "<p>Hello</p>"}
HEADERS = {"Authorization": "Bearer re_test_1"}


class Imitation:
    """url: of the imitation. ours: None if it is theirs."""

    def __init__(self, url: str, ours: RunningProvider | None = None) -> None:
        self.url = url
        self.ours = ours

    def send(self, key: str, payload: Any = MAIL, operation: str = "emails.send") -> Outcome:
        adapter = resend(api_key="re_test_1", base_url=self.url)
        delivery = Delivery(ENTRY, f"resend.{operation}", json.dumps(payload).encode(), key, 1, {}, {}, 0.0)

        async def main() -> Outcome:
            try:
                return await adapter.send(delivery)
            finally:
                await adapter.aclose()

        return asyncio.run(main())


@pytest.fixture(params=["ours", "emulate"])
def imitation(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Imitation]:
    if request.param == "ours":
        with service_of(resend) as service:
            yield Imitation(service.url, service)
    else:
        with emulated_resend(tmp_path) as url:
            yield Imitation(url)


def id_of(outcome: Outcome) -> str:
    assert isinstance(outcome, Delivered)
    return str(outcome.result["id"])


def test_a_mail_under_a_known_key_is_the_first_one(imitation: Imitation) -> None:
    first, again, other = imitation.send("key-1"), imitation.send("key-1"), imitation.send("key-2")

    assert id_of(first) == id_of(again) != id_of(other)


def test_another_mail_under_a_known_key_is_refused(imitation: Imitation) -> None:
    imitation.send("key-1")

    assert isinstance(imitation.send("key-1", MAIL | {"subject": "Your bill"}), KeyConflict)


def test_a_refused_mail_leaves_its_key_free(imitation: Imitation) -> None:
    """A failed request is not stored, so the key may be used again, even for another mail."""
    if imitation.ours:
        imitation.ours.fake.force(Refusal(422, {"name": "validation_error"}))
    refused = imitation.send("key-1", {"to": "ada@example.com"})

    assert isinstance(refused, Rejected)
    assert isinstance(imitation.send("key-1"), Delivered)


def test_a_batch_has_an_id_for_each_mail(imitation: Imitation) -> None:
    outcome = imitation.send("key-1", [MAIL], "emails.batch")

    assert isinstance(outcome, Delivered)
    assert len(outcome.result["data[].id"]) == 1


@pytest.mark.parametrize(("chars", "status"), [(256, 200), (257, 400)])
def test_a_key_has_at_most_256_characters(imitation: Imitation, chars: int, status: int) -> None:
    answer = httpx.post(f"{imitation.url}/emails", json=MAIL, headers=HEADERS | {"Idempotency-Key": "k" * chars})

    assert answer.status_code == status
