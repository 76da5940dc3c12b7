"""Requests to Starlette and what is built on it: a middleware that commits before the first byte, and the claim.

    idempotency = Idempotency(async_sessionmaker(engine), scope=customer_of)

    async def place_order(request):
        async with idempotency.claim(request) as claimed:
            claimed.session.add(Order(...))
            outbox.enqueue(claimed.session, "stripe.payment_intents.create", {...})
            return JSONResponse({"order": 42}, 201)

    app = Starlette(routes=[...], middleware=[Middleware(IdempotencyMiddleware)])

The claim is made where the app asks for it, so after whatever it has authenticated. The middleware holds the answer back
until the rows, the record and the entries are committed; it turns refusals into problem documents, and replays.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Generic, TypeVar, cast

import anyio
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outbox.errors import ClaimError, ConfigurationError, RequestRefused, RequestUndone
from outbox.http.answers import Answer, plain_answer
from outbox.http.header import HEADER
from outbox.http.policy import BODY_BYTES_MAX, Policy, request_content, require_scope, require_sessions, too_large
from outbox.http.transaction import RequestTransaction, undone_by_conflict
from outbox.idempotency import Claim
from outbox.responses import Response as KeptResponse
from outbox.session import sync_session

SessionT = TypeVar("SessionT")
Result = TypeVar("Result")
_EXCHANGE = "outbox.http.exchange"
_POLICY = Policy()  # for refusals before any claim


@dataclass(frozen=True, slots=True)
class ClaimedRequest(Generic[SessionT]):
    """A request whose key is claimed: what the handler works with.

    session: of the one transaction in which the rows, the entries and the record commit; the middleware commits it.
    claim: for `respond` and `reject`, if the answer is an error that is to be kept; see `as_response`.
    """

    session: SessionT
    claim: Claim

    async def reject(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """`claim.reject`, which talks to the database, for a coroutine. Returns the response that the handler is to return."""
        return as_response(await _in_session(self.session, lambda _: self.claim.reject(status, body, headers)))


class Idempotency(Generic[SessionT]):
    """Claims the keys of requests, each in a session of its own.

    sessions: makes a Session or an AsyncSession, as a sessionmaker does. With a Session the work of the claim and the
        commit run on a thread.
    scope: the app's own function: who is calling, as text; sync or async. A replay goes to the same caller only, so let
        it raise for one who may not ask. There is no default.
    content: what must be equal in a retry, given the request, as bytes or JSON; by default the method, the path, the
        query, the content type and the body.
    Raises `ConfigurationError` without a scope function, and for what makes no sessions.
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
        self._claims = Claims(sessions, content, policy or Policy())
        self._scope = scope

    @asynccontextmanager
    async def claim(self, request: Request) -> AsyncIterator[ClaimedRequest[SessionT]]:
        """Claim the request's key. For one that was answered before, the block is not entered: the replay is sent.

        The block commits nothing: the middleware does, with the answer. An exception that leaves it undoes all, whatever
        the app's handler of it answers.

        Raises, for the middleware to answer: `KeyMissing`, `KeyMalformed`, `KeyInFlight`, `RequestMismatch`, `KeyExpired`,
        `RequestTooLarge`, `RequestUndone`. Raises `ConfigurationError` without the middleware.
        """
        caller: str = await _awaited(self._scope(request))
        async with self._claims.claim(request, caller) as claimed:
            yield claimed


@dataclass(frozen=True, slots=True)
class Claims(Generic[SessionT]):
    """Claims the key of a request whose caller is known: what `Idempotency` and the dependency of FastAPI share."""

    sessions: Callable[[], SessionT]
    content: Callable[[Request], Any] | None
    policy: Policy

    @asynccontextmanager
    async def claim(self, request: Request, caller: str) -> AsyncIterator[ClaimedRequest[SessionT]]:
        exchange = _exchange_of(request)
        key = self.key_of(request)
        content = await self._content_of(request, exchange)
        claimed: ClaimedRequest[SessionT] = await exchange.begin(self.sessions(), key, caller, content)
        try:
            with undone_by_conflict():
                yield claimed
        except BaseException:
            exchange.has_failed = True
            raise

    def key_of(self, request: Request) -> str:
        """The request's key. From now on the middleware answers its refusals by this policy."""
        _exchange_of(request).policy = self.policy
        return self.policy.key_of(request.headers.getlist(HEADER))

    async def _content_of(self, request: Request, exchange: "_Exchange") -> Any:
        if self.content is not None:
            return await _awaited(self.content(request))
        body = await exchange.body.whole()
        query: bytes = request.scope["query_string"]
        content_type = request.headers.get("content-type", "")
        return request_content(request.method, request.scope["path"], query, content_type, body)


class IdempotencyMiddleware:
    """Commits what a request has claimed before the first byte of its answer leaves; answers refusals and replays.

    Outside of a claim it changes nothing. It belongs inside of what compresses answers or adds cookies to them, and
    around everything that may claim: among the app's middleware, or a route's.

    claims: claim each request of these `methods` before the app sees it; the app then asks `claimed_request` for it. Here
        an exception counts as what the app's handler of it answers, since no other trace of it comes out of the app.
        It must stand inside of what authenticates. Without it the app claims by itself.
    body_bytes_max: of a request that is claimed; a larger one is a 413. As much of each body is held in memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        claims: Idempotency[Any] | None = None,
        methods: Collection[str] = ("POST", "PATCH"),
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        self._app = app
        self._claims = claims
        self._methods = _checked_methods(methods)
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope[_EXCHANGE] = _Exchange(_Body(receive, self._body_bytes_max), send)
        # A file that the server sends by its path would leave before the commit, and could not be kept.
        extensions = scope.get("extensions") or {}
        scope["extensions"] = {name: value for name, value in extensions.items() if name != "http.response.pathsend"}
        try:
            await self._run(scope, exchange)
        finally:
            with anyio.CancelScope(shield=True):  # a client that hangs up must not leave a transaction open
                await exchange.close()

    async def _run(self, scope: Scope, exchange: "_Exchange") -> None:
        try:
            if self._claims is None or scope["method"] not in self._methods:
                await self._app(scope, exchange.body.receive, exchange.send)
            else:
                async with self._claims.claim(Request(scope, exchange.body.receive)):
                    await self._app(scope, exchange.body.receive, exchange.send)
        except Exception as error:
            # What the commit raises comes through the app's answer, where its framework may have put another error around it.
            ended = exchange.undone or error
            if exchange.started or not isinstance(ended, RequestRefused | _Replayed):
                raise
            await exchange.close()  # first: what is sent now must not be held back
            answer = ended.answer if isinstance(ended, _Replayed) else exchange.policy.problem(ended)
            await as_response(answer)(scope, exchange.body.receive, exchange.send)


def _checked_methods(methods: Collection[str]) -> frozenset[str]:
    """As requests have them. One that no request has would leave every request unclaimed, without a word."""
    if isinstance(methods, str):
        raise ConfigurationError(f"methods must be a collection of names, such as ('POST', 'PATCH'), not {methods!r}")
    return frozenset(method.upper() for method in methods)


def claimed_request(request: HTTPConnection) -> ClaimedRequest[Any]:
    """The request as it was claimed; raises `ClaimError` if it was not."""
    claimed = _exchange_of(request).claimed
    if claimed is None:
        raise ClaimError(
            f"the request {request.url.path!r} has not been claimed: async with idempotency.claim(request)"
        )
    return claimed


def as_response(answer: KeptResponse | Answer) -> Response:
    """What `claim.respond` or `claim.reject` returned, for the handler to return."""
    wire = plain_answer(answer) if isinstance(answer, KeptResponse) else answer
    response = Response(wire.body, wire.status)
    for name, value in wire.headers:
        response.headers.append(name, value)
    return response


class _Replayed(Exception):
    """Ends the handling of a request that was answered before."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("the request was answered before, and its answer is sent again")
        self.answer = answer


# --- one request and its answer


class _Exchange:
    """What passes between the server and the app: the body, remembered, and the answer, held back until the commit."""

    def __init__(self, body: "_Body", send: Send) -> None:
        self.body = body
        self.policy = _POLICY
        self.claimed: ClaimedRequest[Any] | None = None
        self.started = False
        self.has_failed = False
        self.undone: RequestUndone | None = None  # by the database, at the commit
        self._send = send
        self._session: Any = None
        self._transaction: RequestTransaction | None = None
        self._head: Message = {}
        self._held = bytearray()

    async def begin(self, session: Any, key: str, caller: str, content: Any) -> ClaimedRequest[Any]:
        """Claim the key in `session`. Raises `_Replayed` if the request was answered before."""
        if self._session is not None:
            raise ClaimError("the request has been claimed already: a request has one key")
        if self.started:
            raise ClaimError("the answer has begun before the claim: claim before anything is sent")
        self._session = session

        def open_transaction(inner: Session) -> RequestTransaction:
            # Kept here rather than returned: a cancelled await would lose it, open.
            self._transaction = RequestTransaction(inner, self.policy, key, caller, content)
            return self._transaction

        transaction = await _in_session(session, open_transaction)
        if transaction.replay is not None:
            raise _Replayed(transaction.replay)
        self.claimed = ClaimedRequest(session, transaction.claim)
        return self.claimed

    async def send(self, message: Message) -> None:
        """Pass on what the app sends; while a claim is open, only once all of it is here and is committed."""
        transaction = self._transaction
        if transaction is None:
            self.started = True
            await self._send(message)
            return
        try:
            await self._hold(message, transaction)
        except BaseException:  # the app may answer something else now; nothing of its work is committed with that
            self.has_failed = True
            raise

    async def _hold(self, message: Message, transaction: RequestTransaction) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._held.clear()
        elif message["type"] == "http.response.body":
            self._held += message.get("body", b"")
            self.policy.check_answer_size(len(self._held))
            if not message.get("more_body", False):
                await self._finish(transaction)

    async def _finish(self, transaction: RequestTransaction) -> None:
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in self._head["headers"])
        sent = Answer(self._head["status"], bytes(self._held), headers)
        if self.has_failed:
            await self.close()
            answer = sent
        else:
            answer = await self._commit(transaction, sent)
        self._transaction, self.started = None, True  # what comes after it, such as trailers, passes
        if answer is sent:
            await self._send(self._head)
            await self._send({"type": "http.response.body", "body": sent.body})
        else:
            response = as_response(answer)
            await self._send({**self._head, "status": answer.status, "headers": response.raw_headers})
            await self._send({"type": "http.response.body", "body": answer.body})

    async def _commit(self, transaction: RequestTransaction, sent: Answer) -> Answer:
        try:
            return await _in_session(self._session, lambda _: transaction.finish(sent))
        except RequestUndone as error:
            self.undone = error
            raise

    async def close(self) -> None:
        """Roll back what is not committed, and give the session back."""
        self._transaction, transaction = None, self._transaction
        self._session, session = None, self._session
        if session is None:
            return
        if transaction is not None:
            await _in_session(session, lambda _: transaction.close())
        await _in_session(session, Session.close)


class _Body:
    """The request's body, which both the claim and the app read: each gets all of it, whoever comes first."""

    def __init__(self, receive: Receive, bytes_max: int) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self._unread: deque[Message] = deque()
        self._seen = bytearray()
        self._is_complete = False
        self._is_too_large = False

    async def receive(self) -> Message:
        """The next message, for the app."""
        return self._unread.popleft() if self._unread else await self._take()

    async def whole(self) -> bytes:
        """All of it. Raises `RequestTooLarge` as soon as there is more than `bytes_max`."""
        while not (self._is_complete or self._is_too_large):
            message = await self._take()
            self._unread.append(message)
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
        if self._is_too_large:
            raise too_large(self._bytes_max)
        return bytes(self._seen)

    async def _take(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._see(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        return message

    def _see(self, chunk: bytes) -> None:
        if len(self._seen) + len(chunk) > self._bytes_max:
            self._is_too_large = True
            self._seen.clear()  # an upload to a route that claims nothing only passes by
        if not self._is_too_large:
            self._seen += chunk


def _exchange_of(request: HTTPConnection) -> _Exchange:
    exchange = request.scope.get(_EXCHANGE)
    if exchange is None:
        raise ConfigurationError(
            "the app has no IdempotencyMiddleware around this route, and its answers would leave before the commit:"
            " app.add_middleware(IdempotencyMiddleware)"
        )
    return cast(_Exchange, exchange)


async def _awaited(value: Any) -> Any:
    return await value if isawaitable(value) else value


async def _in_session(session: Any, work: Callable[[Session], Result]) -> Result:
    """Do blocking `work` on the plain Session: under an AsyncSession's greenlet, or on a thread."""
    if hasattr(session, "run_sync"):
        return cast(Result, await session.run_sync(work))
    return await run_in_threadpool(work, sync_session(session))
