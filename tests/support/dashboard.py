"""What the tests of the dashboard share: its app on a test's database, and a browser's way to use it."""

import asyncio
import html
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx
from starlette.requests import Request

from dispatchers.dashboard import Dashboard, Identity
from dispatchers.store.records.heartbeats import Heartbeat, beat
from support.database import TABLES, Database

SITE = "http://ops.example"
OPERATOR = "operator"


def signed_in(*roles: str, name: str = "ada") -> Any:
    """An authenticator that takes each request for one of this identity."""
    return lambda request: Identity(name, roles)


def by_header(request: Request) -> Identity | None:
    """An authenticator of the kind that a host app has: the header X-User is `name=role+role`."""
    name, _, roles = request.headers.get("x-user", "").partition("=")
    return Identity(name, [role for role in roles.split("+") if role]) if name else None


@contextmanager
def dashboard(database: Database, **settings: Any) -> Iterator[Dashboard]:
    """The app. By default an operator is signed in."""
    made = Dashboard(database.engine, **{"authenticate": signed_in(OPERATOR), **settings})
    try:
        yield made
    finally:
        made.close()


def put_heartbeat(
    database: Database,
    operation: str = "mail.send",
    *,
    window: float | str | None = 86400.0,
    can_look_up: bool = True,
    failure_fields: Sequence[str] = (),
) -> None:
    """As of a live dispatcher that serves one operation. window: in seconds."""
    operations = {
        operation: {
            "window": window,
            "timeout": 30.0,
            "max_attempts": 20,
            "max_age": 259200.0,
            "at_least_once": False,
            "can_look_up": can_look_up,
            "form": "native",
            "failure_fields": list(failure_fields),
        }
    }
    settings: dict[str, Any] = {"lease": 60.0, "margin": 5.0, "retention": 604800.0, "callback_concurrency": 4}
    declared = json.dumps(settings | {"callbacks": [], "max_connections": None, "operations": operations})
    heartbeat = Heartbeat(id=uuid4(), host="web-1", pid=812, version="1", in_flight=0, declared=declared)
    with database.owner() as connection:
        beat(connection, TABLES, heartbeat)


class Browser:
    """Reads pages of an app under a prefix, and sends their forms, as a browser does."""

    def __init__(self, app: Any, prefix: str = "", **headers: str) -> None:
        self.client = httpx.Client(transport=_Transport(app), base_url=SITE, headers=headers)
        self.prefix = prefix
        self.page = ""

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(self.prefix + path, params=query or None)
        self.page = answer.text
        return answer

    def text(self, path: str, **query: Any) -> str:
        """The page, which must be there."""
        answer = self.get(path, **query)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return str(answer.text)

    def send(self, path: str, *, origin: str | None = SITE, **fields: str) -> Any:
        """Send the form of the page that was read last, with its hidden fields. A page without this form lends those of all."""
        forms = dict(re.findall(r'<form[^>]* action="([^"]*)"[^>]*>(.*?)</form>', self.page, re.DOTALL))
        hidden: dict[str, list[str]] = {}
        form = forms.get(html.escape(self.prefix + path), self.page)
        for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form):
            hidden.setdefault(name, []).append(html.unescape(value))
        headers = {} if origin is None else {"Origin": origin}
        return self.client.post(self.prefix + path, data={**hidden, **fields}, headers=headers)

    def links(self) -> Sequence[str]:
        """Every address on the page."""
        return re.findall(r'(?:href|src|action|hx-get)="([^"]*)"', self.page)

    def api(self, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON API: GET without a body, else POST."""
        if body is None:
            return self.client.get(f"{self.prefix}/api{path}", headers=headers)
        return self.client.post(f"{self.prefix}/api{path}", json=body, headers=headers)


class _Transport(httpx.BaseTransport):
    """Each request in an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def handle() -> tuple[httpx.Response, bytes]:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            answer = await transport.handle_async_request(request)
            return answer, await answer.aread()

        answer, body = asyncio.run(handle())
        return httpx.Response(answer.status_code, headers=answer.headers.raw, stream=httpx.ByteStream(body))
