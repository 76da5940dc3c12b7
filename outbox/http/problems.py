"""Problem documents of RFC 9457: the answers to refused requests. Pure."""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from outbox.errors import (
    KeyExpired,
    KeyInFlight,
    KeyMalformed,
    KeyMissing,
    RequestError,
    RequestMismatch,
    RequestTooLarge,
    RequestUndone,
)
from outbox.requests.responses import Response

MEDIA_TYPE = "application/problem+json"  # RFC 9457, section 3

# Never fetched, only compared: a `tag:` URI, as RFC 9457, section 3.1.1, has it for a type without a page.
TYPES = "tag:sqlalchemy-outbox,2026:"


class Kind(NamedTuple):
    """A kind of refusal. remedy: what the client is to do. has_retry_after: whether the answer has Retry-After."""

    name: str
    title: str
    remedy: str
    has_retry_after: bool = False


KINDS: Mapping[type[RequestError], Kind] = {
    KeyMissing: Kind(
        "key-missing", "The request has no idempotency key", "Send the header, and repeat it with each retry."
    ),
    KeyMalformed: Kind(
        "key-malformed", "The idempotency key is malformed", "Send one key, in one header, in the specified form."
    ),
    KeyInFlight: Kind(
        "key-in-flight",
        "A request with this idempotency key is being processed",
        "Send the same request again, with the same key, after the seconds that Retry-After names.",
        has_retry_after=True,
    ),
    RequestTooLarge: Kind("request-too-large", "The request's body is too large", "Send a smaller body."),
    RequestMismatch: Kind(
        "request-mismatch",
        "The idempotency key was used with another request",
        "Use a new key for a new request. Repeat an earlier request without any change.",
    ),
    KeyExpired: Kind(
        "key-expired",
        "The idempotency key is older than its retry window",
        "Look up the result of the first request. To execute the request once more, use a new key.",
    ),
    RequestUndone: Kind(
        "request-undone",
        "The database undid the request",
        "Nothing was stored. Send the same request again, with the same key, after the seconds that Retry-After names.",
        has_retry_after=True,
    ),
    RequestError: Kind(
        "request-refused",
        "The request cannot be answered in its present form",
        "Read `detail`, and correct the request.",
    ),
}
"""The text of each refusal; a class that is not listed uses the first of its bases that is."""


def problem_of(refusal: RequestError, types: str = TYPES) -> Response:
    """The answer to a refused request: `type`, `title`, `status` and `detail`, and Retry-After if it says when to ask again.

    types: what precedes the problem's name in its type URI, such as `https://api.example.com/problems/`.
    """
    kind = next(KINDS[base] for base in type(refusal).__mro__ if base in KINDS)
    problem = {"type": types + kind.name, "title": kind.title, "status": refusal.status, "detail": str(refusal)}
    headers = [("Content-Type", MEDIA_TYPE)]
    if isinstance(refusal, KeyInFlight | RequestUndone):
        headers.append(("Retry-After", str(max(1, math.ceil(refusal.retry_after.total_seconds())))))
    return Response(refusal.status, json.dumps(problem).encode(), headers)
