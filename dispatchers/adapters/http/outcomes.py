"""The outcome of an HTTP answer, or of its absence: one row for each status, one for each exception of httpx."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias, assert_never

import httpx

from dispatchers.adapters.causes import nothing_sent
from dispatchers.adapters.http.meanings import Meaning
from dispatchers.adapters.http_client.belonging import without_answer
from dispatchers.adapters.http_client.transport import NEVER_SENT, Answer
from dispatchers.adapters.retry_after import retry_after
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown

Reading: TypeAlias = Meaning | Callable[[Answer], Outcome]

MAX_REMEMBERED_BYTES: Final = 8 * 1024  # of an answer: written again as JSON, it may grow, and 64 KiB can be stored

STATUSES: Final[Mapping[int, Meaning]] = {
    # Refused for what was asked, as RFC 9110 (15.5) and RFC 6585 define them: nothing was executed.
    **dict.fromkeys((400, 402, 404, 405, 410, 411, 412, 413, 414, 415, 422, 428, 431), "rejected"),
    # Refused for who asked, or how often: the effect is still wanted.
    **dict.fromkeys((401, 403, 407, 429), "deferred"),
}
"""What a status means unless the service documents otherwise. 2xx is delivered, all else unknown: 406 may come after the
work, a proxy's 503 too, and a 409 can be anything. Source: docs/adapter-contract.md, "When Deferred, when Unknown"."""

OF_ALL: Final = frozenset((401, 403, 407, 429, 503))
"""The statuses that speak of us or of the service, not of one request: the whole destination waits. Of 503 only with a
Retry-After: without one it may be any failure. Source: RFC 9110, 15.5 and 15.6.4; RFC 6585, 4."""

EXCEPTIONS: Final[Mapping[type[Exception], Literal["deferred", "unknown"]]] = {
    **dict.fromkeys(
        (
            *(httpx.HTTPError, httpx.RequestError, httpx.HTTPStatusError, httpx.TransportError, httpx.TimeoutException),
            *(httpx.ReadTimeout, httpx.WriteTimeout, httpx.NetworkError, httpx.ReadError, httpx.WriteError),
            *(httpx.CloseError, httpx.ProtocolError, httpx.LocalProtocolError, httpx.RemoteProtocolError),
            *(httpx.DecodingError, httpx.TooManyRedirects, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError),
            *(httpx.StreamConsumed, httpx.StreamClosed, httpx.ResponseNotRead, httpx.RequestNotRead),
        ),
        "unknown",
    ),
    **dict.fromkeys(NEVER_SENT, "deferred"),
}
"""One row for each exception of httpx; a test holds it complete."""

FOREIGN: Final = tuple(EXCEPTIONS)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


JSON: Final = json.JSONDecoder(parse_constant=_no_number)  # `json.loads` with an argument makes one at each call


def outcome_of_error(error: Exception) -> Outcome:
    """What a send without an answer means: an exception without a row of its own has that of its nearest ancestor."""
    meaning = next((EXCEPTIONS[cls] for cls in type(error).__mro__ if cls in EXCEPTIONS), "unknown")
    if meaning == "deferred":
        return Deferred(nothing_sent(error))
    return Unknown(without_answer(error))


def meaning_of(status: int) -> Meaning:
    return "delivered" if 200 <= status < 300 else STATUSES.get(status, "unknown")


def outcome_of(
    answer: Answer,
    meaning: Meaning,
    *,
    result: Any,
    repeated: bool,
    errors_are_stored: bool,
    error: Mapping[str, Any] | None = None,
) -> Outcome:
    """The outcome for `meaning`. result: the stored result of a success.

    repeated: the service says that it repeats an earlier answer.
    errors_are_stored: the service repeats errors for a key. A repeated error then proves that no earlier attempt succeeded.
    error: what is stored of an error besides its status; it may contain no data of a customer.
    """
    if meaning == "delivered":
        return Delivered(result, replayed=repeated)
    stored = errors_are_stored and repeated
    reason, after = _reason(answer, error or {}), retry_after(answer.headers)
    match meaning:
        case "rejected" | "conclusive":
            result = {"status": answer.status, **(error or {})}
            return Rejected(reason, conclusive=stored or meaning == "conclusive", result=result)
        case "key_conflict":
            return KeyConflict(reason)
        case "deferred":
            return Deferred(reason, after=after, cooldown=answer.status in OF_ALL)
        case "in_progress":
            return InProgress(after)
        case "unknown" | "final":
            cooldown = answer.status in OF_ALL and after is not None
            return Unknown(reason, after=after, final=stored or meaning == "final", cooldown=cooldown)
        case _:
            assert_never(meaning)


def is_replayed(answer: Answer) -> bool:
    """Whether the service reports that it repeats an earlier answer."""
    return answer.headers.get("idempotent-replayed", "").strip().lower() == "true"


def remembered(answer: Answer) -> dict[str, Any]:
    """The status, and the body if it is JSON that can be stored; `unparsed` for another or an incomplete body."""
    fields: dict[str, Any] = {"status": answer.status}
    if answer.whole and not answer.body:
        return fields
    try:
        if answer.whole and len(answer.body) <= MAX_REMEMBERED_BYTES:
            return fields | {"body": JSON.decode(answer.body.removeprefix(BOM_UTF8).decode())}
    except (ValueError, RecursionError):
        pass
    return fields | {"unparsed": True}


def _reason(answer: Answer, error: Mapping[str, Any]) -> str:
    """The status, and the names of the error: a body may quote the request."""
    if 300 <= answer.status < 400:
        return f"HTTP {answer.status}: redirects are not followed"
    return " ".join([f"HTTP {answer.status}", *map(str, error.values())])
