"""How an app receives its requests: one object, the same for every framework."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from outbox.default_outbox import default
from outbox.errors import ClaimError, ConfigurationError, InvalidValue, NotSerializable, RequestError, RequestTooLarge
from outbox.http.answers import KEPT_HEADERS, NEVER_REPLAYED
from outbox.http.header import parse_key
from outbox.http.problems import TYPES, problem_of
from outbox.http.waiting import MAX_WAITING, limited_wait
from outbox.instance import DAY, Outbox
from outbox.keys import pae
from outbox.requests.claim_block import IdempotentBlock, change_options, checked_wait
from outbox.requests.responses import Response
from outbox.times import check_span

MAX_BODY_BYTES = 1024 * 1024
"""The default limit of a request's body, which is held in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests are received. Raises `InvalidValue` for a setting that cannot work.

    outbox: the `Outbox` that stores the records; by default that of `outbox.configure`.
    strict: accept a key only as a String of RFC 9651, in double quotes.
    wait: how long a request waits while another one uses its key, before it gets 409. None answers 409 immediately.
    max_waiting: how many requests of this process, on one engine, may wait at the same time. One more gets 409 at once. Each
        waiting request uses a connection, and a thread if sessions are not async: keep the number far below both. It is
        always less than the engine's `pool_size`.
    retention: how long a retry is answered with the stored response.
    kept_headers: the headers of an answer that are kept for its replays. Headers of one connection or one caller, such as
        Set-Cookie, are refused.
    problem_types: the beginning of every problem's type URI; the problem's name follows.
    """

    outbox: Outbox = field(default=default)
    strict: bool = False
    wait: timedelta | None = None
    max_waiting: int = MAX_WAITING
    retention: timedelta = DAY
    kept_headers: Collection[str] = KEPT_HEADERS
    problem_types: str = TYPES

    def __post_init__(self) -> None:
        checked_wait(self.wait)
        check_span("retention", self.retention)
        if not isinstance(self.max_waiting, int) or isinstance(self.max_waiting, bool) or self.max_waiting < 1:
            raise InvalidValue(
                "max_waiting",
                self.max_waiting,
                "must be an int of at least 1; to let no request wait, set wait=None",
            )
        if isinstance(self.kept_headers, str):
            raise InvalidValue("kept_headers", self.kept_headers, "must be a collection of names, not one str")
        for name in self.kept_headers:
            if name.lower() in NEVER_REPLAYED:
                raise InvalidValue("kept_headers", name, "belongs to one connection or caller and is never replayed")
        if not isinstance(self.problem_types, str):
            raise InvalidValue("problem_types", self.problem_types, "must be a str, the beginning of a URI")

    def key_of(self, lines: Sequence[str], *, are_joined: bool = False) -> str:
        """Return the key in the values of a request's Idempotency-Key lines.

        are_joined: whether the server has joined several lines by commas, as WSGI does (PEP 3333). Then a comma is refused.
        """
        return parse_key(lines, strict=self.strict, are_joined=are_joined)

    def problem(self, refusal: RequestError) -> Response:
        """Return the answer to a refused request: a problem document."""
        return problem_of(refusal, self.problem_types)


def check_answer_size(policy: Policy, size: int) -> None:
    """Raise `NotSerializable` if an answer of `size` bytes is too large to keep."""
    max_bytes = policy.outbox.configuration.max_payload_bytes
    if size > max_bytes:
        raise NotSerializable(
            f"the answer has more than {max_bytes} bytes, the maximum that can be stored for a replay: send a"
            " smaller answer, or a link, or set max_payload_bytes"
        )


def whole_body(policy: Policy, chunks: Iterable[bytes]) -> bytes:
    """Read an answer's body to its end, also of a stream or a file: nothing of it may be sent before the commit."""
    body = bytearray()
    for chunk in chunks:
        body += chunk
        check_answer_size(policy, len(body))
    return bytes(body)


def block_of(policy: Policy, session: Session, key: str, scope: str, content: Any) -> IdempotentBlock:
    """The `outbox.idempotent` block of a request."""
    block = policy.outbox.idempotent(
        session,
        key,
        scope=scope,
        content=content,
        source="http",
        wait=policy.wait,
        retention=policy.retention,
    )
    change_options(block, lock_wait=limited_wait(policy.max_waiting))
    return block


def too_large(max_body_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request's body has more than {max_body_bytes} bytes, so a retry could not be distinguished from another"
        " request: send a smaller body"
    )


def body_was_read(left: str, remedy: str) -> ClaimError:
    return ClaimError(
        f"the request's body was read before the claim, and {left}, so a retry could not be distinguished from another"
        f" request: {remedy}"
    )


def require_whole_body(size: int, headers: Iterable[tuple[str, str]], remedy: str) -> None:
    """Raise unless the `size` bytes that are left of a body are what the request's headers say that there was.

    `ClaimError`: some of it was read before the claim. Two requests that differ only in the part read would seem equal.
    `RequestError`: it has no length, and whether its body was empty on arrival is unknown.
    """
    by_name = {name.lower(): value for name, value in headers}
    declared = by_name.get("content-length", "").strip()
    if declared.isdecimal() and size < int(declared):
        raise body_was_read(f"{size} of its {declared} bytes are left", remedy)
    if not declared and not size and "chunked" in by_name.get("transfer-encoding", "").lower():
        raise RequestError("the request's body came in chunks and is empty: send Content-Length instead")


def request_content(method: str, path: str, query: bytes, content_type: str, body: bytes) -> bytes:
    """Return what must be equal in a retry: the method, the path with its parameters filled in, the query, and the body's bytes.

    The path, not the route's template: `/orders/1/refunds` and `/orders/2/refunds` are two requests.
    """
    return pae(b"obx/http-request/v1", method.encode(), path.encode(), query, content_type.encode(), body)


def require_scope(scope: object, example: str) -> None:
    """Raise `ConfigurationError` unless `scope` is the app's own function."""
    if not callable(scope):
        raise ConfigurationError(
            f"scope must be the app's own function that returns who is calling, not {scope!r}: without it one caller's"
            f" answer could be replayed to another. For example {example}"
        )


def require_sessions(sessions: object) -> None:
    """Raise `ConfigurationError` unless `sessions` can make a session for each request."""
    if not callable(sessions):
        raise ConfigurationError(
            f"sessions must make a Session for each request, as a sessionmaker does; {type(sessions).__name__} makes no Session"
        )
