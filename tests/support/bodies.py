"""Shops in which the tests of bodies put readers of them, and bodies in chunks."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.middleware.csrf import get_token
from django.test import Client
from django.urls import path

import outbox
import outbox.http.django
from outbox.http import Policy
from support.database import Database
from support.http_requests import use_django

HEADERS = {"Authorization": "ada-token", "Idempotency-Key": "retry-001"}
LIMIT = 100_000
CONTENT: dict[str, dict[str, Any]] = {"all of it": {}, "content": {"content": lambda *request: b"the same"}}


def django_shop_maker(database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    """Makes the shop, inside the middleware that is given to it."""
    use_django(database, "READ_COMMITTED", [])  # a test may change Django's settings before it makes the shop

    def make(*middleware: str, csrf: bool = False, **more: Any) -> Client:
        idempotency = outbox.http.django.Idempotency(
            scope=lambda request: "ada", policy=Policy(outbox=ob), max_body_bytes=LIMIT, **more
        )

        @idempotency.claim
        def view(request: Any, claimed: Any) -> HttpResponse:
            shown = {name: file.read().decode() for name, file in request.FILES.items()}
            return HttpResponse(f"{dict(request.POST)} {shown}", status=201)

        use_django(database, "READ_COMMITTED", [path("orders", view), path("token", token)])
        monkeypatch.setattr(settings, "MIDDLEWARE", list(middleware))
        return Client(enforce_csrf_checks=csrf)

    return make


def token(request: HttpRequest) -> HttpResponse:
    return HttpResponse(get_token(request))


async def in_chunks(body: bytes) -> Any:
    yield body


def statuses(app: Any, bodies: list[bytes], how: str) -> list[int]:
    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            sent = bodies if how == "length" else [in_chunks(body) for body in bodies]
            return [(await client.post("/orders", headers=HEADERS, content=body)).status_code for body in sent]

    return asyncio.run(ask())
