"""The Idempotency-Key header: from the lines that a server received to the key. Pure.

Sources: draft-ietf-httpapi-idempotency-key-header-07, section 2.1 (the key is a String); RFC 9651, sections 3.3 and 4.2
(what a String is); docs.stripe.com/api/idempotent_requests (255 characters, and clients that send no quotes).
"""

import re
from collections.abc import Sequence

from outbox.errors import KeyMalformed, KeyMissing
from outbox.keys import LIMITS

HEADER = "Idempotency-Key"
"""The header in which a client sends its key."""
EXAMPLE_KEY = '"8e03978e-40d5-43e8-bc93-6894a57f9324"'
EXAMPLE = f"{HEADER}: {EXAMPLE_KEY}"
_, MAX_KEY_BYTES = LIMITS["parent"]

# One character of a key, as it is written: within a String, and without quotes. What could be a list, a parameter or half a
# String is left out of the second: none of these is in a bare key by accident.
STRING_CHARACTER = r'(?:[ !#-\[\]-~]|\\["\\])'
BARE_CHARACTER = r"[!#-+\--:<-\[\]-~]"

# RFC 9651, section 4.2: what its parsing algorithms accept. Only `;`, a space or the end may follow a value, and none
# of these is within one that has no delimiters of its own: the expression can be read in one way only.
_STRING = f'"{STRING_CHARACTER}*"'
_NUMBER = r"-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})"
_TOKEN = r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*"
_BYTES = r":(?:(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2,3})?={0,2}|[A-Za-z0-9+/]{2,3}={0,2})?:"
_BOOLEAN = r"\?[01]"
_DATE = r"@-?[0-9]{1,15}"
_DISPLAY_STRING = r'%"(?:[ !#$&-~]|%[0-9a-f]{2})*"'
_VALUE = "|".join((_STRING, _NUMBER, _TOKEN, _BYTES, _BOOLEAN, _DATE, _DISPLAY_STRING))
_PARAMETERS = rf"(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:{_VALUE}))?)*"
_STRING_ITEM = re.compile(rf" *(?P<string>{_STRING})(?:{_PARAMETERS}) *")

_BARE = re.compile(f"{BARE_CHARACTER}+")
_BLANKS = " \t"  # RFC 9110, section 5.6.3: optional white space around a field's value


def parse_key(lines: Sequence[str], *, strict: bool = False, are_joined: bool = False) -> str:
    """The key in the values of the request's Idempotency-Key lines, one for each line that there is.

    A String (`"abc"`) is taken in both modes; its parameters must be well formed and mean nothing. Unless `strict`, so
    is the same key without quotes (`abc`), of visible ASCII characters without `"`, `,`, `;` and the backslash: both
    forms are one key.

    Raises `KeyMissing` if there is no line; `KeyMalformed` for two lines, also if a proxy has joined them by a comma,
    and for a value that is no key of 1 to 255 bytes. Two joined lines may equal one String: `"a` and `b"`.
    are_joined: the server joins lines, so that a comma is refused wherever it is.
    """
    if not lines:
        raise KeyMissing(f"the request has no {HEADER} header: send one, e.g. {EXAMPLE}, and repeat it with each retry")
    if len(lines) > 1:
        raise KeyMalformed(f"the request has {len(lines)} {HEADER} headers: send one")
    (line,) = lines
    if are_joined and "," in line:
        raise KeyMalformed(
            f"{_shown(line)} is not a key: it has a comma, and this server joins two headers by a comma; send one header, with"
            " a key that has no comma"
        )
    key = _string(line) if strict else _string_or_bare(line.strip(_BLANKS))
    if not 1 <= len(key) <= MAX_KEY_BYTES:  # ASCII: a character is a byte
        raise KeyMalformed(f"{_shown(line)} has a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are allowed")
    return key


def _string(line: str) -> str:
    found = _STRING_ITEM.fullmatch(line)
    if found is None:
        raise KeyMalformed(f"{_shown(line)} is not a String of RFC 9651: send the key in double quotes, e.g. {EXAMPLE}")
    key = found["string"][1:-1]
    return re.sub(r"\\(.)", r"\1", key) if "\\" in key else key


def _string_or_bare(line: str) -> str:
    if line.startswith('"'):
        return _string(line)
    if _BARE.fullmatch(line) is None:
        raise KeyMalformed(
            f"{_shown(line)} is not a key: send visible ASCII characters in double quotes, e.g. {EXAMPLE}"
        )
    return line


def _shown(line: str) -> str:
    shown = repr(line) if len(line) <= 80 else f"{line[:80]!r}... ({len(line)} characters)"
    return f"{HEADER} {shown}"
