"""Requests to Flask: a decorator that commits before the view's answer is handed to the server.

    idempotency = Idempotency(sessionmaker(engine), scope=lambda: g.user.id)

    @app.post("/orders")
    @login_required
    @idempotency.claimed
    def place_order(request: ClaimedRequest):
        request.session.add(Order(...))
        outbox.enqueue(request.session, "stripe.payment_intents.create", {...})
        return {"order": 42}, 201

What stands above the decorator, and the app's `before_request`, come before the claim. Refusals are problem documents.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from typing import Any

from flask import Response as FlaskResponse
from flask import current_app, request
from sqlalchemy.orm import Session, scoped_session

from outbox.errors import ClaimError, ConfigurationError, RequestRefused
from outbox.http.answers import Answer, plain_answer
from outbox.http.header import HEADER
from outbox.http.policy import BODY_BYTES_MAX, Policy, request_content, require_scope, require_sessions, too_large
from outbox.http.transaction import RequestTransaction, undone_by_conflict
from outbox.idempotency import Claim
from outbox.responses import Response as KeptResponse
from outbox.session import sync_session


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request whose key is claimed: what the view works with.

    session: of the one transaction in which the rows, the entries and the record commit, after the view.
    claim: for `respond` and `reject`, if the answer is an error that is to be kept.
    """

    session: Session
    claim: Claim


class Idempotency:
    """Claims the keys of requests.

    sessions: makes a Session, or is a scoped_session, of which it takes the current one.
    scope: the app's own function: who is calling, as text, called in the request's context. A replay goes to the same
        caller only, so let it abort for one who may not ask. There is no default.
    content: what must be equal in a retry, as bytes or JSON; by default the method, the path, the query, the content
        type and the body.
    body_bytes_max: of a request; a larger one is a 413.
    Raises `ConfigurationError` without a scope function, and for sessions that are asynchronous.
    """

    def __init__(
        self,
        sessions: Callable[[], Session] | scoped_session[Any],
        *,
        scope: Callable[[], str],
        content: Callable[[], Any] | None = None,
        policy: Policy | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        require_scope(scope, "scope=lambda: g.user.id")
        require_sessions(sessions)
        _require_sync(getattr(sessions, "class_", None))
        self._sessions = sessions
        self._scope = scope
        self._content = content
        self._policy = policy or Policy()
        self._body_bytes_max = body_bytes_max

    def claimed(self, view: Callable[..., Any]) -> Callable[..., FlaskResponse]:
        """Decorate a view: its first argument is the `ClaimedRequest`, its answer is kept, a retry does not reach it.

        A view that raises or aborts, or answers with an error that `claim` was not told, is undone, and its key is free.
        """

        @wraps(view)
        def claim_and_view(*args: Any, **kwargs: Any) -> FlaskResponse:
            try:
                with closing(self._begin()) as transaction:
                    return self._answer(transaction, view, args, kwargs)
            except RequestRefused as refusal:
                return as_response(self._policy.problem(refusal))

        return claim_and_view

    def _begin(self) -> RequestTransaction:
        caller = self._scope()
        key = self._policy.key_of(request.headers.getlist(HEADER))
        content = self._content_of_request() if self._content is None else self._content()
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

    def _content_of_request(self) -> bytes:
        if (request.content_length or 0) > self._body_bytes_max:
            raise too_large(self._body_bytes_max)
        was_parsed = "form" in vars(request)
        body = request.get_data()
        if len(body) > self._body_bytes_max:
            raise too_large(self._body_bytes_max)
        if was_parsed and not body and (request.form or request.files):
            raise ClaimError(
                "the request's form was read before the claim, and its body is gone, so that a retry could not be told"
                " from another request: call request.get_data() before request.form, or give Idempotency(content=...)"
            )
        path = request.root_path + request.path
        return request_content(request.method, path, request.query_string, request.content_type or "", body)

    def _finish(self, transaction: RequestTransaction, response: FlaskResponse) -> FlaskResponse:
        body = b"".join(self._bounded(response))
        sent = Answer(response.status_code, body, tuple(response.headers.to_wsgi_list()))
        answer = transaction.finish(sent)
        if answer is not sent:
            response.headers.clear()
            response.headers.extend(answer.headers)
        response.set_data(answer.body)
        return response

    def _bounded(self, response: FlaskResponse) -> Iterable[bytes]:
        """The whole body, a stream's or a file's as well: nothing of it may leave before the commit."""
        response.direct_passthrough = False
        close: Callable[[], None] | None = getattr(response.response, "close", None)
        try:
            size = 0
            for chunk in response.iter_encoded():
                size += len(chunk)
                self._policy.check_answer_size(size)
                yield chunk
        finally:
            if close is not None:
                close()


def _require_sync(session: object) -> None:
    """Raise if `session`, or its class, is an asynchronous one."""
    if hasattr(session, "run_sync"):
        raise ConfigurationError(
            "the claim of a Flask view works in a Session, not in an AsyncSession: give Idempotency a"
            " sessionmaker(create_engine(...)); views that are coroutines have it, too"
        )


def as_response(answer: KeptResponse | Answer) -> FlaskResponse:
    """What `claim.respond` or `claim.reject` returned, for the view to return."""
    wire = plain_answer(answer) if isinstance(answer, KeptResponse) else answer
    response: FlaskResponse = current_app.response_class(wire.body, wire.status)
    response.headers.clear()
    response.headers.extend(wire.headers)
    response.set_data(wire.body)
    return response
