"""Restate: starts a handler for each entry over the HTTP ingress, with the child key as its idempotency key.

    orders = RestateAdapter(url="https://restate.example.com:8080")
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.fulfil", {"number": "C-1"}, parent="order:C-1")     # to the handler `orders/fulfil`

The handler gets the payload as its input. The adapter does not wait for the handler's end. A workflow of Restate has the child
key as its own key: `target="Fulfilment/{key}/run"`.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import httpx

from dispatchers.adapters.causes import nothing_sent
from dispatchers.adapters.credentials import credentials_of
from dispatchers.adapters.http_client.belonging import without_answer
from dispatchers.adapters.http_client.request_writer import origin_of
from dispatchers.adapters.http_client.transport import HEADER_VALUE, NEVER_SENT, Answer, Transport
from dispatchers.adapters.places import OPERATION, Places, PlacesAdapter, Unsendable
from dispatchers.adapters.retry_after import retry_after
from dispatchers.adapters.trust import Tls, for_http
from dispatchers.delivery import (
    Absent,
    CannotTell,
    Deferred,
    Delivered,
    Delivery,
    Finding,
    Found,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

WINDOW: Final = timedelta(days=1)  # the default of `idempotency_retention` and `workflow_completion_retention`
KEY: Final = "{key}"
NOT_COMPLETED: Final = 470
NOT_FOUND: Final = "invocation not found"
REFUSED: Final = frozenset({400, 405, 411, 413, 414, 415, 422, 431})
FAILURES: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
OURS: Final = frozenset({"content-type", "idempotency-key", "content-length", "host"})


class Target(NamedTuple):
    """The paths of one handler's invocation under one key. key_header: the headers that carry the key."""

    start: str
    output: str
    key_header: Mapping[str, str]


class RestateAdapter(PlacesAdapter):
    """Starts handlers of services, virtual objects and workflows. It needs `httpx`.

    url: of Restate's ingress.
    target: the handler of each operation: "Service/handler", "Object/its key/handler" or "Workflow/{key}/run"; a template with
        `{operation}`, or a mapping from operations to targets. Without a slash, its last dot divides service and handler. An
        entry's `options={"target": ...}` replaces it.
    window: how long Restate keeps an invocation after its end: at most the shortest `idempotency_retention` of the services, and
        `workflow_completion_retention` of the workflows. Both are one day by default.
    headers: sent with each request, such as Authorization. They are never shown.
    tls, proxy: as in `HttpAdapter`.
    reuse: False for a connection of its own for each send: then no answer can belong to another send.
    transport: replaces real connections in tests.
    """

    def __init__(
        self,
        *,
        url: str,
        target: str | Mapping[str, str] = OPERATION,
        window: timedelta = WINDOW,
        headers: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: Tls = None,
        proxy: str | None = None,
        reuse: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError("url must be a URL such as https://restate.example.com:8080 (it is not shown)")
        if not isinstance(window, timedelta) or window <= timedelta(0):
            raise ConfigurationError(f"window={window!r} must be a positive timedelta: Restate forgets what has ended")
        self._headers = _checked_headers(headers or {})
        self._places = Places("target", target)
        for each in [target] if isinstance(target, str) else target.values():
            if OPERATION not in each:
                _path(each, ConfigurationError)
        self._ingress = url.rstrip("/")
        self._credentials = credentials_of(self._headers, [url])
        self._transport = Transport(
            timeout=timeout,
            tls=for_http(tls),
            proxy=proxy,
            reuse=reuse,
            origins=[origin_of(url)],
            transport=transport,
        )
        self.window = self._window = window
        self.timeout = timeout
        self.retry = retry
        known = [
            f"{parts.hostname}:{parts.port}{parts.path}",
            target if isinstance(target, str) else sorted(target.items()),
        ]
        self.pinned = f"restate {sha256(json.dumps(known).encode()).hexdigest()[:16]}"  # each handler has its own keys

    def __repr__(self) -> str:
        return f"RestateAdapter(window={self.window!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            target = self._target(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        headers = {**delivery.headers, **self._headers, **target.key_header, "content-type": "application/json"}
        try:
            answer = await self._transport.send(
                httpx.Request("POST", self._ingress + target.start, headers=headers, content=delivery.payload_json)
            )
        except NEVER_SENT as error:
            return Deferred(nothing_sent(error))
        except FAILURES as error:
            return Unknown(without_answer(error))
        return self._credentials.removed_from(_outcome(answer))

    async def find(self, delivery: Delivery) -> Finding:
        """Ask for the output of the invocation under this key. Its failure is an output too."""
        try:
            target = self._target(delivery)
            request = httpx.Request("GET", self._ingress + target.output, headers=self._headers)
            answer = await self._transport.send(request)
        except Unsendable as problem:
            return CannotTell(str(problem))
        except FAILURES as error:
            return CannotTell(without_answer(error))
        finding = _finding(answer)
        if finding == Absent() and delivery.age > self._window:
            return CannotTell(f"Restate has no such invocation, and may have deleted one after {self._window}")
        return self._credentials.removed_from(finding)

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        await self._transport.aclose()

    def _target(self, delivery: Delivery) -> Target:
        names = _path(self._places.of(delivery), Unsendable)
        path = "/".join(quote(delivery.key if name == KEY else name, safe="") for name in names)
        if KEY in names:
            workflow = path.rpartition("/")[0]
            return Target(f"/{path}/send", f"/restate/workflow/{workflow}/output", {})
        output = f"/restate/invocation/{path}/{quote(delivery.key, safe='')}/output"
        return Target(f"/{path}/send", output, {"idempotency-key": delivery.key})


def _path(target: str, error: type[Exception]) -> list[str]:
    """The parts of a target. Raises `error` for one that is no target."""
    if "/" in target:
        names = target.split("/")
    else:
        service, _, handler = target.rpartition(".")
        names = [service, handler]
    if len(names) not in (2, 3) or not all(names) or {".", ".."} & {*names} or KEY in (names[0], names[-1]):
        raise error(f"the target {target!r} must be Service/handler, Object/key/handler or Workflow/{KEY}/run")
    return names


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if name.lower() in OURS or not HEADER_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"headers: {name!r} cannot be set, or its value cannot be sent as a header (it is not shown)"
            )
    return dict(headers)


def _outcome(answer: Answer) -> Outcome:
    status, after = answer.status, retry_after(answer.headers)
    reason = f"HTTP {status}"
    if status in (200, 202):
        return Delivered(_invocation(answer), replayed=_field(answer, "status") == "PreviouslyAccepted")
    if status in (401, 403, 407, 429):
        return Deferred(reason, after=after, cooldown=True)
    if status == 404:
        return Deferred(f"{reason}: no such service or handler is registered", after=after)
    if status in REFUSED:
        return Rejected(reason)
    return Unknown(reason, after=after, cooldown=status == 503 and after is not None)


def _finding(answer: Answer) -> Finding:
    """An answer that names an invocation is its output. A handler that has failed with 404 is no absence."""
    if answer.headers.get("x-restate-id") and (answer.status == 200 or _is_from(answer, "invocation")):
        return Found({"invocation_id": answer.headers["x-restate-id"][:100]})
    if answer.status == NOT_COMPLETED and _is_from(answer, "ingress"):
        return Found()
    if answer.status == 404 and _is_from(answer, "ingress") and _field(answer, "message") == NOT_FOUND:
        return Absent()
    return CannotTell(f"HTTP {answer.status}")


def _is_from(answer: Answer, source: str) -> bool:
    return answer.headers.get("x-restate-error-source") == source


def _invocation(answer: Answer) -> dict[str, str] | None:
    id = _field(answer, "invocationId")
    return {"invocation_id": id[:100]} if id else None


def _field(answer: Answer, name: str) -> str:
    """A text of the JSON body; empty if there is none."""
    try:
        body: Any = json.loads(answer.body) if answer.whole else None
    except (ValueError, RecursionError):
        return ""
    found = body.get(name) if isinstance(body, dict) else None
    return found if isinstance(found, str) else ""
