"""Requests to Starlette and frameworks that are built on it: a middleware that commits before the first byte, and the claim.

    idempotency = Idempotency(async_sessionmaker(engine), scope=customer_of)

    async def place_order(request):
        async with idempotency.claim(request) as claimed:
            claimed.session.add(Order(...))
            outbox.enqueue(claimed.session, "stripe.payment_intents.create", {...})
            return JSONResponse({"order": 42}, 201)

    app = Starlette(routes=[...], middleware=[Middleware(IdempotencyMiddleware)])

The handler makes the claim, so the claim comes after the app's authentication. The middleware sends the answer only when the
rows, the record and the entries are committed. It answers refusals with problem documents, and sends replays.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Generic, cast

from outbox.extras import missing

try:
    import anyio
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise missing("outbox.http.starlette", "starlette", error) from error

from outbox.errors import ClaimError, ConfigurationError, RequestError
from outbox.http.answers import plain_answer
from outbox.http.header import HEADER
from outbox.http.policy import MAX_BODY_BYTES, Policy, request_content, require_scope, require_sessions
from outbox.http.starlette_exchange import Exchange, RequestBody, in_session
from outbox.http.transaction import ClaimedRequest, SessionT, undone_by_conflict
from outbox.requests.fingerprint import Fingerprint, fingerprint
from outbox.requests.responses import Response as KeptResponse

_EXCHANGE = "outbox.http.exchange"

__all__ = ["Idempotency", "IdempotencyMiddleware", "as_response", "claimed_request", "reject"]


class Idempotency(Generic[SessionT]):
    """Claims the keys of requests, each in its own session.

    sessions: makes a Session or an AsyncSession, as a sessionmaker does. With a Session, the claim and the commit run on a
        thread.
    scope: your own function of the request, sync or async. It returns the authenticated caller, as text. Let it raise if the
        caller has no access, because a replay is sent to every caller that it returns. There is no default.
    content: what must be equal in a retry: a function of the request, sync or async, that returns bytes, JSON or a
        Fingerprint. By default the method, the path, the query, the content type and the body are compared. It can read the
        body with `await request.body()`.
    Raises `ConfigurationError` without a scope function, and if `sessions` cannot make sessions.
    """

    def __init__(
        self,
        sessions: Callable[[], SessionT],
        *,
        scope: Callable[[Request], str | Awaitable[str]],
        content: Callable[[Request], Any] | None = None,
        policy: Policy | None = None,
    ) -> None:
        require_scope(scope, "scope=lambda request: request.user.username")
        require_sessions(sessions)
        self._claims = SessionClaims(sessions, content, policy or Policy())
        self._scope = scope

    @asynccontextmanager
    async def claim(self, request: Request) -> AsyncIterator[ClaimedRequest[SessionT]]:
        """Claim the request's key. If the request was answered before, the block does not run, and the replay is sent.

        The block does not commit: the middleware commits with the answer. An exception that leaves the block undoes
        everything, also if the app answers it.

        Raises for the middleware to answer: `KeyMissing`, `KeyMalformed`, `KeyInFlight`, `RequestMismatch`, `KeyExpired`,
        `RequestTooLarge`, `RequestUndone`. Raises `ConfigurationError` without the middleware.
        """
        caller: str = await _awaited(self._scope(request))
        async with self._claims.claim(request, caller) as claimed:
            yield claimed


@dataclass(frozen=True, slots=True)
class SessionClaims(Generic[SessionT]):
    """Claims the key of a request whose caller is known: what `Idempotency` and the dependency of FastAPI share."""

    sessions: Callable[[], SessionT]
    content: Callable[[Request], Any] | None
    policy: Policy

    @asynccontextmanager
    async def claim(self, request: Request, caller: str) -> AsyncIterator[ClaimedRequest[SessionT]]:
        exchange = _exchange_of(request)
        key = self.key_of(request)
        try:
            content = await self._content_of(request, exchange)
            session = self.sessions()
            claimed = ClaimedRequest(session, await exchange.begin(session, key, caller, content))
            exchange.claimed = claimed
        except RequestError as refusal:
            exchange.raise_refusal(refusal, request.scope)
        try:
            with undone_by_conflict():
                yield claimed
        except RequestError as refusal:
            exchange.has_failed = True
            exchange.raise_refusal(refusal, request.scope)
        except BaseException:
            exchange.has_failed = True
            raise

    def key_of(self, request: Request) -> str:
        """The request's key. From now on the middleware answers its refusals by this policy."""
        exchange = _exchange_of(request)
        exchange.policy = self.policy
        try:
            return self.policy.key_of(request.headers.getlist(HEADER))
        except RequestError as refusal:
            exchange.raise_refusal(refusal, request.scope)

    async def _content_of(self, request: Request, exchange: Exchange) -> Any:
        if self.content is not None:
            await exchange.body.bounded()
            return await _fingerprinted(await _awaited(self.content(request)))
        body = await exchange.body.whole()
        query: bytes = request.scope["query_string"]
        content_type = request.headers.get("content-type", "")
        return request_content(request.method, request.scope["path"], query, content_type, body)


class IdempotencyMiddleware:
    """Commits what a request has claimed before it sends the first byte of the answer. Answers refusals and replays.

    Requests without a claim are unchanged. Put it inside middleware that compresses answers or adds cookies, and outside
    everything that may claim: among the app's middleware, or a route's.

    claims: claim each request of these `methods` before the app runs. The app then gets the claim from `claimed_request`. If
        an exception handler of the app answers an exception, this answer counts, because the middleware sees only the answer.
        Put the middleware inside your authentication. Without `claims` the app claims by itself.
    methods: the methods of the requests that `claims` claims.
    max_body_bytes: the largest body of a claimed request. A larger one is refused with 413. Up to this size, a body is kept
        in memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        claims: Idempotency[Any] | None = None,
        methods: Collection[str] = ("POST", "PATCH"),
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._claims = claims
        self._methods = _checked_methods(methods)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope[_EXCHANGE] = Exchange(RequestBody(receive, scope["headers"], self._max_body_bytes), send)
        # A file that the server sends by its path would leave before the commit, and could not be kept.
        extensions = scope.get("extensions") or {}
        scope["extensions"] = {name: value for name, value in extensions.items() if name != "http.response.pathsend"}
        try:
            await self._run(scope, exchange)
        finally:
            with anyio.CancelScope(shield=True):  # a client that hangs up must not leave a transaction open
                await exchange.close()
            exchange.release()

    async def _run(self, scope: Scope, exchange: Exchange) -> None:
        try:
            if self._claims is None or scope["method"] not in self._methods:
                await self._app(scope, exchange.body.receive, exchange.send)
            else:
                async with self._claims.claim(Request(scope, exchange.body.receive)):
                    await self._app(scope, exchange.body.receive, exchange.send)
        except Exception as error:
            if isinstance(error, RequestError):
                exchange.refuse(error)
            if not exchange.is_ending:
                raise
            await exchange.end()
            if not exchange.has_raised(error):
                raise
        else:
            await exchange.end()


def _checked_methods(methods: Collection[str]) -> frozenset[str]:
    """The methods in upper case, as requests have them. With any other spelling no request would be claimed, unnoticed."""
    if isinstance(methods, str):
        raise ConfigurationError(f"methods must be a collection of names, such as ('POST', 'PATCH'), not {methods!r}")
    return frozenset(method.upper() for method in methods)


def claimed_request(request: HTTPConnection) -> ClaimedRequest[Any]:
    """Return the claimed request. Raises `ClaimError` if it was not claimed."""
    claimed: ClaimedRequest[Any] | None = _exchange_of(request).claimed
    if claimed is None:
        raise ClaimError(
            f"the request {request.url.path!r} has not been claimed: use `async with idempotency.claim(request)`"
        )
    return claimed


async def reject(
    claimed: ClaimedRequest[Any], status: int, body: Any = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Call `claim.reject`, which uses the database, from a coroutine. Returns the response for the handler to return."""
    rejected = await in_session(claimed.session, lambda _: claimed.claim.reject(status, body, headers), has_thread=True)
    return as_response(rejected)


def as_response(response: KeptResponse) -> Response:
    """Convert the result of `claim.respond` or `claim.reject` to a response that the handler can return."""
    plain = plain_answer(response)
    made = Response(plain.body, plain.status)
    for name, value in plain.headers.lines:
        made.headers.append(name, value)
    return made


def _exchange_of(request: HTTPConnection) -> Exchange:
    exchange = request.scope.get(_EXCHANGE)
    if exchange is None:
        raise ConfigurationError(
            "the app has no IdempotencyMiddleware around this route, so its answers would be sent before the commit: call"
            " app.add_middleware(IdempotencyMiddleware)"
        )
    return cast(Exchange, exchange)


async def _fingerprinted(content: Any) -> Any:
    """JSON as its fingerprint, taken on a thread: of a large body it takes long enough for others to notice."""
    if isinstance(content, bytes | Fingerprint):
        return content
    return Fingerprint(await run_in_threadpool(fingerprint, content))


async def _awaited(value: Any) -> Any:
    return await value if isawaitable(value) else value
