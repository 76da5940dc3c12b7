"""Requests over HTTP that may come twice: the Idempotency-Key header, problem documents, and one module for each framework.

Each module has a class `Idempotency`, whose `claim` claims a request. The handler gets a `ClaimedRequest`.

- `outbox.http.starlette` and `outbox.http.fastapi`: a middleware that commits before it sends the first byte of an answer.
  `claim` is a block, or a dependency.
- `outbox.http.flask`: `claim` is a decorator for views.
- `outbox.http.django`: `claim` is a decorator for views, and the session is in Django's own transaction.

This package imports none of these modules. Its other exports are for other frameworks. See docs/http-api.md and
docs/http-rules.md.
"""

from outbox.http.answers import KEPT_HEADERS, REPLAYED, replay
from outbox.http.header import HEADER, parse_key
from outbox.http.policy import Policy, request_content
from outbox.http.problems import problem_of
from outbox.http.transaction import ClaimedRequest, RequestTransaction

__all__ = [
    "HEADER",
    "KEPT_HEADERS",
    "REPLAYED",
    "ClaimedRequest",
    "Policy",
    "RequestTransaction",
    "parse_key",
    "problem_of",
    "replay",
    "request_content",
]
