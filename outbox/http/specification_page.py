"""The idempotency specification as a page in Markdown, for the clients of an API. Pure."""

from collections.abc import Iterable

from outbox.http.specification import Specification

UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))
SIZES = (("MiB", 1024 * 1024), ("KiB", 1024))


def page_of(it: Specification) -> str:
    """The page. Every number, name and rule of it comes from `it`."""
    sections = (_intro(it), _key(it), _scope(it), _same(it), _retry(it), _at_once(it), _retention(it), _accepted(it))
    return "\n\n".join(section for section in (*sections, _refusals(it)) if section) + "\n"


def _intro(it: Specification) -> str:
    routes = "".join(f"- `{route.method} {route.path}`\n" for route in it.routes)
    which = f"each of these requests:\n\n{routes}" if routes else "each request of an operation that takes it."
    return f"""# Idempotency

Send the header `{it.key.header}` with {which}
If a request gets no answer, or a 5xx answer, send it again with the same key. If the API executed the first request, it does \
not execute it again: the retry gets the answer of the first request."""


def _key(it: Specification) -> str:
    key = it.key
    string = 'a String of RFC 9651: visible ASCII and spaces in double quotes; write `\\"` for `"` and `\\\\` for `\\`'
    excluded = " ".join(f"`{char}`" for char in key.excluded)
    bare = [] if key.strict else [("or as", f"the key without quotes: visible ASCII except {excluded}")]
    rows = [
        ("header", f"`{key.header}`, once; required"),
        ("written as", string),
        *bare,
        ("length", f"{key.bytes_min} to {key.bytes_max} bytes, without the quotes"),
        ("example", f"`{key.header}: {key.example}`"),
    ]
    return f"""## The key

{_table(("", ""), rows)}

Create a new key for each new request. It must be hard to guess: use a random UUID, for example. Store the key before you \
send the request, and send the same key with each retry. Upper and lower case differ."""


def _scope(it: Specification) -> str:
    described = "" if it.scope is None else f": {it.scope}"
    return f"""## Whose key it is

A key belongs to the authenticated caller{described}. If two callers use the same key, their requests are independent. The \
API authenticates each retry too: a caller who has lost access gets no stored answer."""


def _same(it: Specification) -> str:
    compared = "\n".join(f"- {part}" for part in it.compared)
    return f"""## What is the same request

A retry must equal the first request in:

{compared}

Nothing else is compared, and no other header. The API refuses a request that differs with \
`{it.status_of("request-mismatch")}`, and executes nothing. A body may have {_size(it.body_bytes_max)} at most."""


def _retry(it: Specification) -> str:
    names = ", ".join(f"`{name}`" for name in it.kept_headers) or "none"
    return f"""## What a retry gets

A retry gets the status and the body of the first answer, byte for byte, with the header `{it.replayed_header}: true`. From \
the headers of the first answer it gets: {names}.

The API keeps answers with a status below 400, and errors that it chose to keep as the final answer. It does not keep any \
other error, and none of the refusals below: nothing was executed, and you can use the key again. One refusal is an exception: \
after `{it.status_of("request-mismatch")}` the key still belongs to the earlier request. After a 5xx answer, or without an \
answer, send the same request with the same key."""


def _at_once(it: Specification) -> str:
    first = "the API refuses the second"
    if it.in_flight == "wait":
        first = f"the second waits for the answer, for {_span(it.wait_seconds)} at most. After that the API refuses the second"
    return f"""## Two requests at the same time

If a second request with the same key arrives while the first is being processed, {first} with \
`{it.status_of("key-in-flight")}`. `Retry-After` says after how many seconds to send it again. The API never executes two \
requests with the same key at the same time."""


def _retention(it: Specification) -> str:
    until = "as long as the API remembers these effects"
    if it.refused_seconds is not None:
        until = f"until {_span(it.refused_seconds)} after the last of these effects has ended"
    rows = [
        ("a retry gets the first answer", f"for {_span(it.retry_seconds)}"),
        (
            f"after that, if the request had effects at other services, its key is refused with `{it.status_of('key-expired')}`",
            until,
        ),
        ("the record of the request is kept", f"for {_span(it.audit_seconds)} at least"),
    ]
    return f"""## For how long

{_table(("what", "how long"), rows)}

After that the API has forgotten the key, and executes a request with this key as a new one. So never use a key for a second \
request."""


def _accepted(it: Specification) -> str:
    if it.status_url is None:
        return ""
    return f"""## Accepted requests

`202` means that the request is accepted and still being processed. `Location` is the URL of its status, in the form \
`{it.status_url}`. `Retry-After` says when to request this URL. A retry gets the `202` until the request has its final answer; \
from then on it gets the final answer. The key of an open request does not expire."""


def _refusals(it: Specification) -> str:
    rows = [(str(one.status), f"`{one.type}`", one.title, one.remedy) for one in it.refusals]
    return f"""## Refusals

Refusals are problem documents of RFC 9457, `{it.problem_media_type}`. Programs distinguish them by `type`.

{_table(("status", "type", "title", "what to do"), rows)}"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def _span(seconds: float) -> str:
    """`24 hours`, `90 minutes`: in the largest unit that it is a whole number of, and two of it at least, or one."""
    for unit, size in UNITS:
        count, rest = divmod(seconds, size)
        if not rest and count and (count > 1 or unit != "day"):
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} seconds"


def _size(bytes_: int) -> str:
    for unit, size in SIZES:
        if bytes_ and not bytes_ % size:
            return f"{bytes_ // size} {unit}"
    return f"{bytes_} bytes"
