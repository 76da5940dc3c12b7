"""One HTTP exchange of an ASGI app: the request's body, which is read twice, and the answer, which waits for the commit.

A replay or a refusal is remembered here when it is raised. The app answers the exception itself, inside of all its
middleware; the answer that was remembered then leaves in place of the app's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import anyio.to_thread
from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from outbox.errors import ClaimError, OutboxError, RequestError, RequestUndone
from outbox.http.answers import with_added
from outbox.http.policy import Policy, check_answer_size, require_whole_body, too_large
from outbox.http.transaction import RequestTransaction
from outbox.requests.idempotency import Claim
from outbox.requests.responses import Response
from outbox.sessions.session import sync_session

Result = TypeVar("Result")
Headers = Sequence[tuple[bytes, bytes]]

PLACEHOLDER = 489
"""A refusal's status for the app's handlers of HTTPExceptions: no app has a handler of this one, which would be asked first."""


# --- what ends the handling of a request


class Replayed(HTTPException):
    """Ends the handling of a request that was answered before."""

    def __init__(self, status: int) -> None:
        super().__init__(status, "the request was answered before, and its answer is sent again")


class _AnsweredByTheApp(HTTPException):
    """Makes a refusal an HTTPException too: the app's innermost layer answers it, and no middleware sees an exception.

    A handler that reads its status would answer any HTTPException: that answer is not sent.
    """

    @property
    def status_code(self) -> int:  # type: ignore[override]  # an attribute there, which this class never sets
        vars(self)["asked"]()
        return PLACEHOLDER

    __str__ = Exception.__str__
    __repr__ = Exception.__repr__


@cache
def _answered_kind(kind: Any) -> Any:
    return type(kind.__name__, (kind, _AnsweredByTheApp), {})


def _answered(refusal: RequestError, asked: Callable[[], None]) -> RequestError:
    plain: Any = type(refusal)
    kind = _answered_kind(plain)
    made = kind.__new__(kind, *refusal.args)
    made.__dict__.update(vars(refusal) | {"asked": asked, "detail": str(refusal), "headers": None})
    return cast(RequestError, made)


def has_own_handler(scope: Scope, refusal: RequestError) -> bool:
    """Whether the app in which the request is has a handler of this refusal, or of all that is ours."""
    handled = getattr(scope.get("app"), "exception_handlers", {})
    return any(kind in handled for kind in type(refusal).__mro__ if issubclass(kind, OutboxError))


# --- the exchange


class Exchange:
    """What passes between the server and the app.

    started: something of an answer has left. has_failed: the app's work is not to be committed.
    """

    def __init__(self, body: "RequestBody", send: Send) -> None:
        self.body = body
        self.policy = Policy()  # for refusals before any claim
        self.claimed: Any = None  # what the handler works with, once there is a claim
        self.started = False
        self.has_failed = False
        self._send = send
        self._session: Any = None
        self._transaction: RequestTransaction | None = None
        self._head: Message = {}
        self._buffered = bytearray()
        self._ending: Response | None = (
            None  # the replay or refusal that was raised, until it or an answer to it is sent
        )
        self._is_replay = False
        self._is_general = False  # what answers the refusal would answer any HTTPException
        self._is_ended = False  # it was sent: what the app still says is dropped
        self._raised: list[BaseException] = []

    async def begin(self, session: Any, key: str, caller: str, content: Any) -> Claim:
        """Claim the key in `session`. Raises `Replayed` if the request was answered before."""
        if self._session is not None:
            raise ClaimError("the request is already claimed: claim a request only once")
        if self.started:
            raise ClaimError(
                "a part of the answer was sent before the claim: claim the request before the app sends anything"
            )
        self._session = session

        def open_transaction(inner: Session) -> RequestTransaction:
            # Kept here rather than returned: a cancelled await would lose it, open.
            self._transaction = RequestTransaction(inner, self.policy, key, caller, content)
            return self._transaction

        transaction = await in_session(session, open_transaction)
        if transaction.replay is not None:
            await self.close()  # its connection is free before the client has read anything
            self._ending, self._is_replay = transaction.replay, True
            replayed = Replayed(transaction.replay.status)
            self._raised.append(replayed)
            raise replayed
        return transaction.claim

    def refuse(self, refusal: RequestError) -> bool:
        """Remember the refusal, for the client. Returns False if it is too late for that: another answer is sent."""
        if self.started or self._ending is not None:
            return False
        self._ending = self.policy.problem(refusal)
        self._raised.append(refusal)
        return True

    def raise_refusal(self, refusal: RequestError, scope: Scope) -> NoReturn:
        """Remember the refusal, and have the app end the request. scope: of the innermost app."""
        if not self.refuse(refusal) or has_own_handler(scope, refusal):
            raise refusal
        raised = _answered(refusal, self._note_general)
        self._raised.append(raised)
        raise raised from refusal

    def _note_general(self) -> None:
        self._is_general = True

    def has_raised(self, error: BaseException | None) -> bool:
        """Whether `error` is what ended the request here, also if a framework has put another around it."""
        if error is None:
            return False
        if any(error is raised for raised in self._raised) or self.has_raised(error.__cause__):
            return True
        return isinstance(error, BaseExceptionGroup) and all(map(self.has_raised, error.exceptions))

    @property
    def is_ending(self) -> bool:
        """Whether the client gets, or has got, what was remembered."""
        return self._is_ended or self._ending is not None

    async def send(self, message: Message) -> None:
        """Pass on what the app sends; while a claim is open, only once all of it is here and is committed."""
        if self._is_ended:
            return
        if self._ending is not None:
            await self._send_instead(message)
            return
        transaction = self._transaction
        if transaction is None:
            self.started = True
            await self._send(message)
            return
        try:
            await self._buffer(message, transaction)
        except BaseException:  # the app may answer something else now; nothing of its work is committed with that
            self.has_failed = True
            raise

    async def _send_instead(self, message: Message) -> None:
        """Send what was remembered as soon as the app answers; but this very refusal it may answer by itself, by no 5xx."""
        if message["type"] != "http.response.start":
            return
        if self._is_replay or self._is_general or message["status"] >= 500:
            await self.end(message["headers"])
            return
        await self.close()
        self._ending, self.started = None, True
        await self._send(message)

    async def end(self, sent: Headers = ()) -> None:
        """Send what was remembered, if the app has not answered yet. sent: the headers of the app's own answer."""
        ending, self._ending = self._ending, None
        if ending is None:
            return
        await self.close()  # first: the answer is sent now, without a connection in use
        self.started = self._is_ended = True
        await self._send_answer(with_added(ending, _decoded(sent)))

    async def _buffer(self, message: Message, transaction: RequestTransaction) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._buffered.clear()
        elif message["type"] == "http.response.body":
            self._buffered += message.get("body", b"")
            check_answer_size(self.policy, len(self._buffered))
            if not message.get("more_body", False):
                await self._finish(transaction)

    async def _finish(self, transaction: RequestTransaction) -> None:
        sent = Response(self._head["status"], bytes(self._buffered), _decoded(self._head["headers"]))
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
            await self._send_answer(answer)

    async def _send_answer(self, answer: Response) -> None:
        has_body = answer.status >= 200 and answer.status not in (204, 304)
        length = [("content-length", str(len(answer.body)))] if has_body else []
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in [*length, *answer.headers.lines]
        ]
        await self._send({**self._head, "type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer.body})

    async def _commit(self, transaction: RequestTransaction, sent: Response) -> Response:
        try:
            return await in_session(self._session, lambda _: transaction.finish(sent), has_thread=True)
        except RequestUndone as error:
            self.refuse(error)
            raise

    async def close(self) -> None:
        """Roll back what is not committed, and give the session back."""
        self._transaction, transaction = None, self._transaction
        self._session, session = None, self._session
        if session is None:
            return
        if transaction is not None:
            await in_session(session, lambda _: transaction.close(), has_thread=True)
        await in_session(session, Session.close, has_thread=True)

    def release(self) -> None:
        """End it after the app has returned: what the app still sends is dropped.

        The server's functions refer to the request's scope, which refers to this. With them the session and all that the request
        has made would stay until the garbage collector runs.
        """
        self._is_ended = True
        self._send = _drop
        self._raised.clear()
        self.body.release()


async def _drop(message: Message) -> None: ...


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}


def _decoded(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


class RequestBody:
    """The request's body, which both the claim and the app read: each gets all of it, in any order."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int) -> None:
        self._receive = receive
        self._headers = headers
        self._max_bytes = max_bytes
        self._unread: deque[Message] = deque()
        self._seen = bytearray()
        self._is_complete = False
        self._is_too_large = False

    def release(self) -> None:
        """End it: nothing more is received. See `Exchange.release`."""
        self._receive = _disconnected

    async def receive(self) -> Message:
        """The next message, for the app."""
        return self._unread.popleft() if self._unread else await self._take()

    async def bounded(self) -> bytes:
        """What there is of it. Raises `RequestTooLarge` as soon as there is more than `max_bytes`."""
        while not (self._is_complete or self._is_too_large):
            message = await self._take()
            self._unread.append(message)
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
        if self._is_too_large:
            raise too_large(self._max_bytes)
        return bytes(self._seen)

    async def whole(self) -> bytes:
        """All of it. Raises `ClaimError` if a middleware outside of ours has read some of it, which is lost."""
        body = await self.bounded()
        require_whole_body(len(body), _decoded(self._headers), READ_BEFORE)
        return body

    async def _take(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._see(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        return message

    def _see(self, chunk: bytes) -> None:
        if len(self._seen) + len(chunk) > self._max_bytes:
            self._is_too_large = True
            self._seen.clear()  # an upload to a route that claims nothing only passes by
        if not self._is_too_large:
            self._seen += chunk


READ_BEFORE = (
    "put IdempotencyMiddleware around the middleware that reads the body, or let that middleware call request.body(),"
    " or set Idempotency(content=...)"
)


async def in_session(session: Any, work: Callable[[Session], Result], *, has_thread: bool = False) -> Result:
    """Do blocking `work` on the plain Session: under an AsyncSession's greenlet, or on a thread.

    has_thread: it has a thread of its own, and need not wait for one of those that all the app shares: `work` ends what holds a
        connection and locks already, and each of those may wait for just these.
    """
    if hasattr(session, "run_sync"):
        return cast(Result, await session.run_sync(work))
    limiter = anyio.CapacityLimiter(1) if has_thread else None
    return await anyio.to_thread.run_sync(work, sync_session(session), limiter=limiter)
