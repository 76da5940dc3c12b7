"""Requests to Flask: a decorator that commits before the view's answer is sent.

    idempotency = Idempotency(sessionmaker(engine), scope=lambda: g.user.id)

    @app.post("/orders")
    @login_required
    @idempotency.claim
    def place_order(request: ClaimedRequest[Session]):
        request.session.add(Order(...))
        outbox.enqueue(request.session, "stripe.payment_intents.create", {...})
        return {"order": 42}, 201

Decorators above `@idempotency.claim`, and the app's `before_request`, run before the claim. Refusals are problem documents.
"""

from collections.abc import Callable
from contextlib import closing
from functools import wraps
from typing import Any

from sqlalchemy.orm import Session, scoped_session

from outbox.extras import missing

try:
    from flask import Response as FlaskResponse
    from flask import current_app, request
    from werkzeug.exceptions import RequestEntityTooLarge
    from werkzeug.wsgi import LimitedStream
except ModuleNotFoundError as error:
    raise missing("outbox.http.flask", "flask", error) from error

from outbox.errors import ConfigurationError, RequestError
from outbox.http.answers import plain_answer
from outbox.http.header import HEADER
from outbox.http.policy import (
    MAX_BODY_BYTES,
    Policy,
    body_was_read,
    request_content,
    require_scope,
    require_sessions,
    require_whole_body,
    too_large,
    whole_body,
)
from outbox.http.transaction import ClaimedRequest, RequestTransaction, undone_by_conflict
from outbox.requests.responses import Response as KeptResponse
from outbox.sessions.session import sync_session

__all__ = ["Idempotency", "as_response"]


class Idempotency:
    """Claims the keys of requests.

    sessions: makes a Session, or is a scoped_session, whose current session is used.
    scope: your own function, called in the request's context. It returns the authenticated caller, as text. Let it abort if
        the caller has no access, because a replay is sent to every caller that it returns. There is no default.
    content: what must be equal in a retry: a function that returns bytes or JSON. By default the method, the path, the query,
        the content type and the body are compared.
    max_body_bytes: the largest body of a request, also with `content`. A larger one is refused with 413, and not read
        further.
    Raises `ConfigurationError` without a scope function, and for asynchronous sessions.
    """

    def __init__(
        self,
        sessions: Callable[[], Session] | scoped_session[Any],
        *,
        scope: Callable[[], str],
        content: Callable[[], Any] | None = None,
        policy: Policy | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        require_scope(scope, "scope=lambda: g.user.id")
        require_sessions(sessions)
        _require_sync(getattr(sessions, "class_", None))
        self._sessions = sessions
        self._scope = scope
        self._content = content
        self._policy = policy or Policy()
        self._max_body_bytes = max_body_bytes

    def claim(self, view: Callable[..., Any]) -> Callable[..., FlaskResponse]:
        """Decorate a view. The view gets the `ClaimedRequest` first. Its answer is kept, and a retry does not call the view.

        If the view raises or aborts, or answers with an error without `claim.reject`, its work is undone and the key is free.
        """

        @wraps(view)
        def claim_and_view(*args: Any, **kwargs: Any) -> FlaskResponse:
            try:
                with closing(self._begin()) as transaction:
                    return self._answer(transaction, view, args, kwargs)
            except RequestError as refusal:
                return as_response(self._policy.problem(refusal))

        return claim_and_view

    def _begin(self) -> RequestTransaction:
        caller = self._scope()
        key = self._policy.key_of(request.headers.getlist(HEADER), are_joined=True)
        content = self._content_asked()
        session = self._sessions()
        _require_sync(session)
        return RequestTransaction(sync_session(session), self._policy, key, caller, content)

    def _answer(
        self, transaction: RequestTransaction, view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FlaskResponse:
        if transaction.replay is not None:
            return as_response(transaction.replay)
        claimed = ClaimedRequest(transaction.session, transaction.claim)
        with undone_by_conflict():
            sent = current_app.make_response(current_app.ensure_sync(view)(claimed, *args, **kwargs))
        return self._finish(transaction, sent)

    def _content_asked(self) -> Any:
        _forget_unread_stream()
        is_left_over = _is_left_over()
        body = self._bounded_body()
        if self._content is not None:
            return self._content()
        if is_left_over:
            raise body_was_read("only a part of it is left", READ_BEFORE)
        require_whole_body(len(body), request.headers.items(), READ_BEFORE)
        path = request.root_path + request.path
        return request_content(request.method, path, request.query_string, request.content_type or "", body)

    def _bounded_body(self) -> bytes:
        """The body, of which no more is read than is allowed; the view finds it in the request."""
        limit = min(self._max_body_bytes, request.max_content_length or self._max_body_bytes)
        length = request.content_length
        if length is not None and length > limit:
            raise too_large(limit)
        is_chunked = length is None and "wsgi.input_terminated" in request.environ
        if is_chunked:
            request.environ["wsgi.input"] = LimitedStream(request.environ["wsgi.input"], limit + 1, is_max=True)
        try:
            body = request.get_data()
            if is_chunked:
                request.stream.read(1)  # where the app's own MAX_CONTENT_LENGTH has cut it off, this raises
        except RequestEntityTooLarge:
            raise too_large(limit) from None
        if len(body) > limit:
            raise too_large(limit)
        return body

    def _finish(self, transaction: RequestTransaction, response: FlaskResponse) -> FlaskResponse:
        response.direct_passthrough = False
        close: Callable[[], None] | None = getattr(response.response, "close", None)
        try:
            body = whole_body(self._policy, response.iter_encoded())
        finally:
            if close is not None:
                close()
        sent = KeptResponse(response.status_code, body, response.headers.to_wsgi_list())
        answer = transaction.finish(sent)
        if answer is not sent:
            response.headers.clear()
            response.headers.extend(answer.headers.lines)
        response.set_data(answer.body)
        return response


READ_BEFORE = (
    "call request.get_data() before anything else reads the body, because it keeps the bytes, or set"
    " Idempotency(content=...)"
)

FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def _forget_unread_stream() -> None:
    """Undo an access to request.form, .values or .files where the body is no form.

    Werkzeug has made the stream for it and read nothing; it must be made again, of no more bytes than are allowed.
    """
    kept = vars(request)
    is_unparsed = "form" in kept and "_cached_data" not in kept and request.mimetype not in FORMS
    if is_unparsed and request.content_length is None and _position(request.stream) == 0:
        kept.pop("stream", None)


def _position(stream: Any) -> int:
    """How many bytes were read; 0 for a server's own stream without a position."""
    try:
        return int(stream.tell())
    except (AttributeError, OSError):
        return 0


def _is_left_over() -> bool:
    """Whether the app has taken some of the body from the request's stream, and the request has not kept it.

    Werkzeug keeps what it has read of a request in the request's own dict. A body with a length is compared by its length
    instead. "_cached_data" is a name of Werkzeug's own: under another, a body in chunks that was kept would be refused, too.
    """
    kept = vars(request)
    return request.content_length is None and "stream" in kept and "_cached_data" not in kept


def _require_sync(session: object) -> None:
    if hasattr(session, "run_sync"):
        raise ConfigurationError(
            "the claim of a Flask view works in a Session, not in an AsyncSession: pass sessionmaker(create_engine(...)) to"
            " Idempotency, for async views too"
        )


def as_response(response: KeptResponse) -> FlaskResponse:
    """Convert the result of `claim.respond` or `claim.reject` to a response that the view can return."""
    plain = plain_answer(response)
    made: FlaskResponse = current_app.response_class(plain.body, plain.status)
    made.headers.clear()
    made.headers.extend(plain.headers.lines)
    made.set_data(plain.body)
    return made
