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
A request that got no answer, or one that cannot be trusted, can then be sent again without being carried out twice: the \
retry gets the answer of the first."""


def _key(it: Specification) -> str:
    key = it.key
    string = 'a String of RFC 9651: in double quotes; visible ASCII and spaces; `\\"` and `\\\\` for `"` and `\\`'
    excluded = " ".join(f"`{char}`" for char in key.excluded)
    bare = [] if key.strict else [("or as", f"the same key without quotes: visible ASCII but {excluded}")]
    rows = [
        ("header", f"`{key.header}`, once; required"),
        ("written as", string),
        *bare,
        ("length", f"{key.bytes_min} to {key.bytes_max} bytes, quotes not counted"),
        ("example", f"`{key.header}: {key.example}`"),
    ]
    return f"""## The key

{_table(("", ""), rows)}

Make a new key for each new request, one that cannot be guessed, such as a random UUID; store it before you send; and send \
it unchanged with each retry. Upper and lower case differ."""


def _scope(it: Specification) -> str:
    described = "" if it.scope is None else f": {it.scope}"
    return f"""## Whose key it is

Keys belong to the caller, as authenticated{described}. Equal keys of two callers never meet. Who is calling is checked for \
each retry, too: without access there is no replay."""


def _same(it: Specification) -> str:
    compared = "\n".join(f"- {part}" for part in it.compared)
    return f"""## What is the same request

A retry must equal the first request in:

{compared}

Nothing else is compared, and no other header. A request that differs is refused with `{it.status_of("request-mismatch")}`, \
and nothing of it is carried out. A body has {_size(it.body_bytes_max)} at most."""


def _retry(it: Specification) -> str:
    names = ", ".join(f"`{name}`" for name in it.kept_headers) or "none"
    return f"""## What a retry gets

The same status, the same body, byte for byte, and `{it.replayed_header}: true`. Of the first answer's headers it has: {names}.

Answers below 400 are kept, and so are the errors that are this API's last word on a request. Any other error, each of those \
below among them, is not kept: nothing was carried out, and the key can be used again; but for the refusals with \
`{it.status_of("request-mismatch")}`, whose key is an earlier request's. After an answer of 5xx, or none, send the same request \
with the same key."""


def _at_once(it: Specification) -> str:
    waits = "is"
    if it.in_flight == "wait":
        waits = f"waits for its answer for {_span(it.wait_seconds)} at most. After that it is"
    return f"""## Two at once

A request whose key another one holds that is not finished yet {waits} refused with `{it.status_of("key-in-flight")}`, and \
`Retry-After` says in how many seconds to ask again. It is never carried out beside the other."""


def _retention(it: Specification) -> str:
    until = "for as long as they are remembered"
    if it.refused_seconds is not None:
        until = f"until {_span(it.refused_seconds)} after the last of them ended"
    rows = [
        ("a retry gets the first answer", f"for {_span(it.retry_seconds)}"),
        (f"then a key whose request had effects elsewhere is refused: `{it.status_of('key-expired')}`", until),
        ("the record of the request is kept", f"for {_span(it.audit_seconds)} at least"),
    ]
    return f"""## For how long

{_table(("what", "how long"), rows)}

After that a key is free, and a request with it is a new one: never use a key again."""


def _accepted(it: Specification) -> str:
    if it.status_url is None:
        return ""
    return f"""## Accepted requests

`202` says that a request is accepted and still being processed. `Location` is the URL of its status, of the form \
`{it.status_url}`; `Retry-After` says when to ask there. A retry gets the `202` until the request has its final answer, and \
that one from then on. An open request's key does not expire."""


def _refusals(it: Specification) -> str:
    rows = [(str(one.status), f"`{one.type}`", one.title, one.remedy) for one in it.refusals]
    return f"""## Refusals

They are problem documents of RFC 9457, `{it.problem_media_type}`; programs tell them apart by `type`.

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
