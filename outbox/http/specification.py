"""The documentation of idempotency keys that an API must publish, from its settings. Pure.

The draft of the header has it that a server publishes this: draft-ietf-httpapi-idempotency-key-header-07, section 2.5.2, with the
expiry of keys at least (2.3), and best the key's format and what errors mean (2.7, 5). `specification_page` and
`specification_openapi` write it down.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import getdoc
from typing import Any, Literal

from outbox.errors import InvalidValue
from outbox.http.answers import REPLAYED
from outbox.http.header import BARE_CHARACTER, EXAMPLE_KEY, HEADER, KEY_BYTES_MAX, STRING_CHARACTER
from outbox.http.policy import BODY_BYTES_MAX, COMPARED, Policy
from outbox.http.problems import KINDS, MEDIA_TYPE, type_uri

VISIBLE = "".join(map(chr, range(ord("!"), ord("~") + 1)))
METHODS = ("GET", "PUT", "POST", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE")  # OpenAPI 3.1, Path Item Object


@dataclass(frozen=True, slots=True)
class KeyForm:
    """How a key is sent.

    strict: in double quotes only. excluded: what a key without quotes may not have of visible ASCII.
    pattern: what the header's value is to match, as JSON Schema has it (ECMA 262).
    """

    header: str
    strict: bool
    excluded: str
    bytes_min: int
    bytes_max: int
    pattern: str
    example: str

    @classmethod
    def of(cls, policy: Policy) -> "KeyForm":
        string = f'"{STRING_CHARACTER}{{1,{KEY_BYTES_MAX}}}"'
        bare = f"{BARE_CHARACTER}{{1,{KEY_BYTES_MAX}}}"
        pattern = f"^{string}$" if policy.strict else f"^(?:{string}|{bare})$"
        excluded = "".join(char for char in VISIBLE if not re.fullmatch(BARE_CHARACTER, char))
        return cls(HEADER, policy.strict, excluded, 1, KEY_BYTES_MAX, pattern, EXAMPLE_KEY)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A problem that a request may be answered with. says_when: whether Retry-After comes with it."""

    status: int
    name: str
    type: str
    title: str
    remedy: str
    has_retry_after: bool


@dataclass(frozen=True, slots=True)
class Route:
    """An operation of the API that takes a key."""

    method: str
    path: str

    @classmethod
    def of(cls, text: str) -> "Route":
        """Of `POST /orders`. Raises `InvalidValue`."""
        method, _, path = text.partition(" ")
        if method not in METHODS or not path.startswith("/") or " " in path:
            raise InvalidValue(
                "route",
                text,
                f"must be a method and a path, 'POST /orders/{{id}}', with one of the methods {', '.join(METHODS)}",
            )
        return cls(method, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """What holds for the idempotency keys of one API.

    scope: who the caller is, to whom keys belong; None if the app does not document it. compared: what must be equal in a retry.
    in_flight, wait_seconds: what a request meets whose key is held; for how long it waits at most.
    retry_seconds: how long a retry is answered with the first answer. audit_seconds: how long that can be looked up.
    refused_seconds: how long after the last effect of its request a key is refused; None if the app does not document it.
        status_url: where an accepted request can be watched; None if none is accepted.
    """

    routes: Sequence[Route]
    key: KeyForm
    scope: str | None
    compared: Sequence[str]
    body_bytes_max: int
    in_flight: Literal["conflict", "wait"]
    wait_seconds: float
    retry_seconds: float
    audit_seconds: float
    refused_seconds: float | None
    replayed_header: str
    kept_headers: Sequence[str]
    problem_media_type: str
    refusals: Sequence[Refusal]
    status_url: str | None

    def status_of(self, name: str) -> int:
        """The status of the refusal of this name."""
        (status,) = [refusal.status for refusal in self.refusals if refusal.name == name]
        return status


def specify(
    policy: Policy,
    *,
    routes: Sequence[Route] = (),
    scope: Callable[..., Any] | None = None,
    content: Callable[..., Any] | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    refused: timedelta | None = None,
) -> Specification:
    """The specification of an API that receives its requests by `policy`.

    scope, content: the app's own functions, as the integrations have them; their docstrings describe what they do.
    body_bytes_max: as the integrations have it. refused: for how long a dispatcher keeps what a key has caused.
    Raises `InvalidValue` for a function without a docstring, `ConfigurationError` if the outbox is not configured.
    """
    configuration = policy.outbox.configuration
    return Specification(
        routes=tuple(routes),
        key=KeyForm.of(policy),
        scope=None if scope is None else _described("scope", scope),
        compared=COMPARED if content is None else (_described("content", content),),
        body_bytes_max=body_bytes_max,
        in_flight=policy.in_flight,
        wait_seconds=policy.wait.total_seconds() if policy.in_flight == "wait" else 0.0,
        retry_seconds=policy.keep.total_seconds(),
        audit_seconds=max(policy.keep, configuration.audit).total_seconds(),
        refused_seconds=None if refused is None else refused.total_seconds(),
        replayed_header=REPLAYED,
        kept_headers=tuple(policy.kept_headers),
        problem_media_type=MEDIA_TYPE,
        refusals=tuple(refusals_of(policy)),
        status_url=configuration.status_url,
    )


def refusals_of(policy: Policy) -> list[Refusal]:
    """Every problem that this library answers with, by status."""
    found = [
        Refusal(
            refused.status,
            kind.name,
            type_uri(kind, policy.problem_types),
            kind.title,
            kind.remedy,
            kind.has_retry_after,
        )
        for refused, kind in KINDS.items()
    ]
    return sorted(found, key=lambda refusal: refusal.status)


def _described(name: str, function: Callable[..., Any]) -> str:
    """The first paragraph of its docstring, on one line and without its full stop."""
    paragraph = (getdoc(function) or "").partition("\n\n")[0]
    if not paragraph:
        raise InvalidValue(
            name, getattr(function, "__name__", function), "has no docstring, which the page quotes: write one"
        )
    return " ".join(paragraph.split()).rstrip(".")
