"""Values that must show nowhere, and a search for them in every form in which a database or a service quotes what it was sent."""

import base64
import html
import json
import pickle
import traceback
from urllib.parse import quote, quote_plus

CANARY = "4111/private+card=7"
"""As a payload: short enough for PostgreSQL to quote all of it, with the characters that each encoding writes otherwise."""


def forms(secret: str | bytes) -> set[str]:
    """How `secret` is written by PostgreSQL, Python, PHP, JSON, HTML, URLs, and in base64."""
    data = secret.encode() if isinstance(secret, str) else secret
    written = {data.hex()[:24], base64.b64encode(data).decode().rstrip("="), repr(data)[2:-1]}
    if isinstance(secret, str):
        written |= {secret, json.dumps(secret)[1:-1], secret.replace("/", "\\/"), html.escape(secret)}
        written |= {quote(secret, safe=""), quote_plus(secret), secret.replace("=", "\\u003d").replace("+", "\\u002b")}
    return written


def leaks(text: str, *secrets: str | bytes) -> list[str]:
    """The forms of the secrets that `text` contains."""
    return [form for secret in secrets for form in sorted(forms(secret)) if form in text]


def shown(error: BaseException) -> str:
    """All that a log, an error tracker or another process gets of `error` and its whole chain, handled or not."""
    texts = ["".join(traceback.format_exception(error))]
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        texts += [repr(each), str(each), str(getattr(each, "params", None)), str(vars(each))]
        chain += [each.__cause__, each.__context__, getattr(each, "orig", None)]
    return "\n".join([*texts, repr(pickle.dumps(error))])
