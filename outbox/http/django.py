"""Requests to Django, on PostgreSQL with psycopg 3: a decorator for views that works in Django's own transaction.

    idempotency = Idempotency(scope=lambda request: request.user.get_username())

    @login_required
    @idempotency.claim
    def place_order(request, claimed):
        order = Order.objects.create(...)                                   # Django's ORM
        outbox.enqueue(claimed.session, "stripe.payment_intents.create", {...})
        return JsonResponse({"order": order.pk}, status=201)

The session uses the connection that Django has open, in a savepoint of `transaction.atomic()`. Django commits once what both
have written, before the answer is sent. Use the session for the outbox, and Django's ORM for your rows.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, cast

from sqlalchemy.orm import Session

from outbox.extras import missing

try:
    from django.conf import settings
    from django.core.exceptions import RequestDataTooBig
    from django.db import Error as DjangoError
    from django.db import transaction
    from django.http import HttpRequest, HttpResponse
    from django.http.request import RawPostDataException
except ModuleNotFoundError as error:
    raise missing("outbox.http.django", "django", error) from error

from outbox.django import joined_session
from outbox.errors import ConfigurationError, RequestError
from outbox.http.answers import plain_answer
from outbox.http.header import HEADER
from outbox.http.policy import (
    MAX_BODY_BYTES,
    Policy,
    body_was_read,
    request_content,
    require_scope,
    require_whole_body,
    too_large,
    whole_body,
)
from outbox.http.transaction import ClaimedRequest, RequestTransaction, undone_by, undone_by_conflict
from outbox.requests.fingerprint import canonical_json
from outbox.requests.responses import Response as KeptResponse
from outbox.sql.errors.driver import sqlstate

__all__ = ["Idempotency", "as_response"]


class Idempotency:
    """Claims the keys of requests to sync views.

    scope: your own function. It gets the request and returns the authenticated caller, as text. Let it raise if the caller
        has no access, because a replay is sent to every caller that it returns. There is no default.
    content: what must be equal in a retry: a function of the request that returns bytes or JSON. By default the method, the
        path, the query, the content type and the body are compared.
    using: Django's name of the database.
    max_body_bytes: the largest body of a request, also with `content`. A larger one is refused with 413 and not read.
    Raises `ConfigurationError` without a scope function.
    """

    def __init__(
        self,
        *,
        scope: Callable[[HttpRequest], str],
        content: Callable[[HttpRequest], Any] | None = None,
        policy: Policy | None = None,
        using: str = "default",
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        require_scope(scope, "scope=lambda request: request.user.get_username()")
        self._scope = scope
        self._content = content
        self._policy = policy or Policy()
        self._using = using
        self._max_body_bytes = max_body_bytes

    def claim(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        """Decorate a view. The view gets the `ClaimedRequest` after the request. Its answer is kept, and a retry does not call
        the view.

        If the view raises, or answers with an error without `claim.reject`, its work is undone and the key is free.
        Raises `ConfigurationError` for an async view, because its ORM works on another thread.
        """
        if inspect.iscoroutinefunction(view):
            raise ConfigurationError(
                f"the view {view.__name__!r} is async, but Django's transactions are sync: write the view as a plain def"
            )

        @wraps(view)
        def claim_and_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            try:
                caller, key, content = self._asked(request)
                with (
                    self._transaction() as session,
                    closing(RequestTransaction(session, self._policy, key, caller, content)) as claimed,
                ):
                    if claimed.replay is not None:
                        return as_response(claimed.replay)
                    with undone_by_conflict():
                        sent = view(request, ClaimedRequest(session, claimed.claim), *args, **kwargs)
                    return self._finish(claimed, sent)
            except RequestError as refusal:
                return as_response(self._policy.problem(refusal))

        # With ATOMIC_REQUESTS Django would commit only after the view, where a conflict could not be answered any more.
        view_of_its_own: Any = transaction.non_atomic_requests(using=self._using)(claim_and_view)
        return cast(Callable[..., HttpResponse], view_of_its_own)

    def _asked(self, request: HttpRequest) -> tuple[str, str, Any]:
        caller = self._scope(request)
        headers: Any = request.headers
        key = self._policy.key_of([headers[HEADER]] if HEADER in headers else [], are_joined=True)
        if int(request.META.get("CONTENT_LENGTH") or 0) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        try:
            return caller, key, self._content_of(request) if self._content is None else self._content(request)
        except RequestDataTooBig:
            raise too_large(settings.DATA_UPLOAD_MAX_MEMORY_SIZE) from None

    def _content_of(self, request: HttpRequest) -> bytes:
        headers: Any = request.headers  # a cached property, which Django does not type
        content_type: str = headers.get("Content-Type", "")
        try:
            body = request.body  # without a Content-Length Django reads DATA_UPLOAD_MAX_MEMORY_SIZE at most
        except RawPostDataException:
            body, content_type = _form(request), "multipart/form-data"  # the boundary means nothing in it
        else:
            require_whole_body(len(body), headers.items(), READ_BEFORE)
        if len(body) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        query = request.META.get("QUERY_STRING", "").encode("latin-1")
        return request_content(request.method or "", request.path, query, content_type, body)

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        atomic: Any = transaction.atomic(self._using)
        with _undone_for_django(), atomic, joined_session(self._using) as session:
            yield session

    def _finish(self, claimed: RequestTransaction, response: Any) -> HttpResponse:
        if hasattr(response, "render"):
            response.render()
        body = whole_body(self._policy, response)
        answer = claimed.finish(KeptResponse(response.status_code, body, response.items()))
        if not claimed.is_kept:  # so that Django drops the view's hooks of on_commit, too
            transaction.set_rollback(True, self._using)
        made: Any = _made(answer)
        made.cookies = response.cookies
        # What the view's response has open, a file for one, the server closes with ours. The name is Django's own: under another
        # it would be closed when it is collected.
        made._resource_closers = getattr(response, "_resource_closers", [])
        return made


READ_BEFORE = "read request.body before the claim instead, because Django keeps it, or set Idempotency(content=...)"


def _form(request: HttpRequest) -> bytes:
    """The fields and the files of a form that was parsed before the claim, as CsrfViewMiddleware does: its bytes are gone.

    Raises `ClaimError` if the body was not read as a form.
    """
    if request.content_type != "multipart/form-data" or not (request.POST or request.FILES):
        raise body_was_read("nothing of it is left", READ_BEFORE)
    files = {name: [_file(file) for file in files] for name, files in request.FILES.lists()}
    return canonical_json([dict(request.POST.lists()), files])


def _file(file: Any) -> list[Any]:
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    file.seek(0)
    return [file.name, file.content_type, digest.hexdigest()]


def as_response(response: KeptResponse) -> HttpResponse:
    """Convert the result of `claim.respond` or `claim.reject` to a response that the view can return."""
    return _made(plain_answer(response))


def _made(response: KeptResponse) -> HttpResponse:
    made = HttpResponse(response.body, status=response.status)
    del made["Content-Type"]  # Django's default: what was kept says it
    for name, value in response.headers.lines:
        made[name] = value
    return made


@contextmanager
def _undone_for_django() -> Iterator[None]:
    """`undone_by_conflict` for the errors of Django's ORM and of its commit."""
    try:
        yield
    except DjangoError as error:
        undone = undone_by(sqlstate(error.__cause__))
        if undone is None:
            raise
        raise undone from error
