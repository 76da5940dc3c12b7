"""The part of an answer that is kept, and the answers that are sent: the first time, and for a retry. Pure."""

from collections.abc import Collection, Iterable
from enum import Enum, auto

from outbox.errors import ClaimError
from outbox.requests.responses import WITHOUT_CONTENT, Response

REPLAYED = "Idempotent-Replayed"
"""The header that marks a replay, under Stripe's name for it: docs.stripe.com/api/idempotent_requests."""

KEPT_HEADERS = (
    *("Content-Type", "Content-Encoding", "Content-Language", "Content-Location", "Content-Disposition"),
    *("ETag", "Last-Modified", "Link", "Location"),
)
"""What is kept of an answer's headers: what says something of the answer, and nothing of the connection or the caller."""

# Of one connection or one caller (RFC 9110, section 7.6.1; RFC 6265): they are the server's to write, never a record's.
NEVER_REPLAYED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "date", "server", "set-cookie", "set-cookie2", "www-authenticate"),
    }
)


# What an app's middleware adds to every answer, for the browser that asks now: CORS and the like (fetch.spec.whatwg.org,
# section 3.3), and what protects a page. They are of this exchange, so a replay has this exchange's.
ADDED_PREFIXES = ("access-control-", "cross-origin-", "content-security-policy")
ADDED_HEADERS = frozenset(
    {
        *("vary", "timing-allow-origin", "strict-transport-security", "x-content-type-options", "x-frame-options"),
        *("referrer-policy", "permissions-policy"),
    }
)


class Verdict(Enum):
    """What happens to the transaction of a request that was answered."""

    KEEP_SENT = auto()
    KEEP_CHOSEN = auto()
    UNDO = auto()


def judge(chosen: Response | None, status: int) -> Verdict:
    """What happens to the transaction, given what `claim.respond` or `reject` chose and the status that the app sends.

    An answer below 400 is kept. One from 400 on is kept only if it was chosen: an error that no one chose rolls back and frees
    the key. Raises `ClaimError` if one answer was chosen and another, a good one, is sent.
    """
    if chosen is not None and chosen.status == status:
        return Verdict.KEEP_CHOSEN
    if status >= 400:
        return Verdict.UNDO
    if chosen is None:
        return Verdict.KEEP_SENT
    raise ClaimError(
        f"the handler stored an answer with status {chosen.status}, but returned one with status {status}: return what"
        " claim.respond() or claim.reject() returned, converted to a response of the framework"
    )


def kept_headers(answer: Response, allowed: Collection[str]) -> dict[str, str]:
    """The headers of `answer` that are allowed, those of one name joined (RFC 9110, section 5.2)."""
    names = {name.lower(): name for name in allowed}
    kept: dict[str, str] = {}
    for name, value in answer.headers.lines:
        known = names.get(name.lower())
        if known is not None:
            value = value.strip(" \t")  # RFC 9110, section 5.5: no part of the value
            kept[known] = f"{kept[known]}, {value}" if known in kept else value
    return kept


def as_it_travels(sent: Response) -> Response:
    """`sent` as the client gets it: without a body where its status has none."""
    if sent.status not in WITHOUT_CONTENT or not sent.body:
        return sent
    headers = [
        (name, value) for name, value in sent.headers.lines if name.lower() not in ("content-length", "content-type")
    ]
    return Response(sent.status, b"", headers)


def first_answer(chosen: Response, sent: Response) -> Response:
    """`chosen` as the first client gets it: with what else the app sends, its cookies for one."""
    replaced = {"content-length", *(name.lower() for name in chosen.headers)}
    others = [(name, value) for name, value in sent.headers.lines if name.lower() not in replaced]
    return _answer(chosen, others)


def with_added(answer: Response, sent: Iterable[tuple[str, str]]) -> Response:
    """`answer` in place of what an app has sent, with what the app's middleware adds to each of its answers."""
    own = {name.lower() for name, _ in answer.headers.lines}
    added = [(name, value) for name, value in sent if _is_added(name.lower()) and name.lower() not in own]
    return Response(answer.status, answer.body, (*answer.headers.lines, *added))


def _is_added(name: str) -> bool:
    return name in ADDED_HEADERS or name.startswith(ADDED_PREFIXES)


def plain_answer(kept: Response) -> Response:
    """`kept`, and nothing else."""
    return _answer(kept, [])


def replay(kept: Response) -> Response:
    """`kept` as a retry gets it: the same status and bytes, and the replay header."""
    return _answer(kept, [(REPLAYED, "true")])


def _answer(kept: Response, others: list[tuple[str, str]]) -> Response:
    headers = [(name, value) for name, value in kept.headers.lines if name.lower() not in NEVER_REPLAYED]
    return Response(kept.status, kept.body, (*headers, *others))
