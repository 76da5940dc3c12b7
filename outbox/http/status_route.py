"""The status resource of accepted requests: an ASGI app. Mount it at the URL of `configure(status_url=...)`.

    app.mount("/requests", StatusRoute(sessionmaker(engine), caller=scope_of))

It answers GET and HEAD with 200 and JSON, for open and for finished requests, like Google's long-running operations and
Microsoft's guidelines: a final response of 402 is the outcome of the request, not of the GET. While the request is open,
Retry-After says when to ask again. The answer must not be cached (RFC 9111, section 5.2.2.5).
"""

import asyncio
import base64
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy.orm import Session

from outbox.default_outbox import default
from outbox.entries.status import EntryStatus
from outbox.errors import ConfigurationError, EncryptionError, InvalidValue
from outbox.instance import Outbox
from outbox.keys import check_field
from outbox.requests.responses import Response
from outbox.requests.status import RequestStatus, check_sources

log = logging.getLogger("outbox.http.status_route")

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Caller: TypeAlias = Callable[[Mapping[str, Any]], Any]

NOT_FOUND = {"status": 404, "title": "Not Found", "detail": "no request of yours has this id"}
NOT_ALLOWED = {"status": 405, "title": "Method Not Allowed", "detail": "a request's status can only be read"}


class StatusRoute:
    """The ASGI app.

    sessions: makes a Session (used on a thread) or an AsyncSession: a `sessionmaker` or an `async_sessionmaker`.
    caller: your own function, sync or async. It gets ASGI's connection scope, and returns the scope under which the
        authenticated caller's requests are claimed, or None for an anonymous caller. Any value that cannot be a scope counts
        as None, such as the empty text of many frameworks. For another answer (401), let it raise the framework's error.
    sources: the sources of the claims whose records are shown. Add sources other than HTTP only if `caller` distinguishes
        them: anyone can guess the ids of jobs ("app") and messages (inboxes).
    outbox: by default the configured one.

    The last segment of the path is the request's id. The answer is the same 404 for an unknown id and for a request of
    another scope, so that no other caller learns which requests exist. Raises `ConfigurationError` without a caller function.
    """

    def __init__(
        self,
        sessions: Callable[[], Any],
        *,
        caller: Caller,
        sources: Collection[str] = ("http",),
        outbox: Outbox | None = None,
    ) -> None:
        if not callable(caller):
            raise ConfigurationError(
                f"caller must be the app's own function that returns whose requests may be read, not {caller!r}: without it one"
                " caller could see another's. For example caller=lambda scope: scope['user'].username"
            )
        check_sources(sources)
        self._sources = sources
        self._sessions = sessions
        self._caller = caller
        self._outbox = outbox or default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the status of a request is read over HTTP, not {scope['type']!r}")
        if scope["method"] not in ("GET", "HEAD"):
            await _problem(send, NOT_ALLOWED, {"Allow": "GET, HEAD"})
            return
        status = await self._find(scope)
        if status is None:
            await _problem(send, NOT_FOUND, {}, with_body=scope["method"] == "GET")
            return
        after = {} if status.retry_after is None else {"Retry-After": str(int(status.retry_after.total_seconds()))}
        await _answer(send, 200, "application/json", shown(status), after, with_body=scope["method"] == "GET")

    async def _find(self, scope: Scope) -> RequestStatus | None:
        id = _id(scope["path"])
        caller = self._caller(scope)
        if inspect.isawaitable(caller):
            caller = await caller
        if id is None or not _is_authenticated(caller):
            return None
        session = self._sessions()
        if hasattr(session, "run_sync"):
            return await self._read_async(session, id, caller)
        found: RequestStatus | None = await asyncio.to_thread(self._read, session, id, caller)
        return found

    def _read(self, session: Session, id: UUID, caller: str) -> RequestStatus | None:
        with session:
            return self._outbox.request_status(session, id, scope=caller, sources=self._sources)

    async def _read_async(
        self, session: AbstractAsyncContextManager[Any], id: UUID, caller: str
    ) -> RequestStatus | None:
        async with session as opened:
            found: RequestStatus | None = await self._outbox.request_status(
                opened, id, scope=caller, sources=self._sources
            )
            return found


def _is_authenticated(caller: object) -> bool:
    """Whether requests may be claimed under this scope over HTTP."""
    if caller is None or caller == "":
        return False
    if not isinstance(caller, str):
        kind = type(caller).__name__
        log.warning("answered 404 to a request for a status: caller= returned %s, but must return a str or None", kind)
        return False
    try:
        check_field("scope", caller)
    except InvalidValue:
        return False
    return True


def shown(status: RequestStatus) -> dict[str, Any]:
    """The resource as JSON. No payload, key or reason is in it; a result is what the adapter kept."""
    return {
        "id": str(status.id),
        "state": status.state,
        "created_at": status.created_at.isoformat(),
        "answered_at": None if status.answered_at is None else status.answered_at.isoformat(),
        "effects": [_effect(entry) for entry in status.entries],
        "response": None if status.response is None else _response(status.response),
    }


def _effect(entry: EntryStatus) -> dict[str, Any]:
    effect = {
        "operation": entry.operation,
        "discriminator": entry.discriminator,
        "state": entry.state,
        "settled_at": None if entry.settled_at is None else entry.settled_at.isoformat(),
    }
    try:
        return {**effect, "result": entry.result}
    except EncryptionError as error:
        log.warning("left the result of entry %s out of its request's status: %s", entry.id, error)
        return effect


def _response(response: Response) -> dict[str, Any]:
    fields = {"status": response.status, "headers": dict(response.headers)}
    return {**fields, **_body(response)}


def _body(response: Response) -> dict[str, Any]:
    """JSON as JSON, text as a string, anything else in base64 under a name of its own."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if not response.body:
            return {"body": None}
        if kind == "application/json" or kind.endswith("+json"):
            return {"body": json.loads(response.body, parse_constant=_refuse)}
        if kind.startswith("text/"):
            return {"body": response.body.decode()}
    except (ValueError, RecursionError):  # it is not what its header says, or nests too deep
        pass
    return {"body_base64": base64.b64encode(response.body).decode()}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _id(path: str) -> UUID | None:
    segment = path.rpartition("/")[2]
    try:
        id = UUID(segment)
    except ValueError:
        return None
    return id if str(id) == segment else None


async def _problem(
    send: Send, problem: Mapping[str, Any], headers: Mapping[str, str], *, with_body: bool = True
) -> None:
    await _answer(send, problem["status"], "application/problem+json", problem, headers, with_body=with_body)


async def _answer(
    send: Send, status: int, kind: str, content: object, headers: Mapping[str, str], *, with_body: bool
) -> None:
    body = json.dumps(content).encode()
    fields = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store", **headers}
    lines = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body if with_body else b""})
