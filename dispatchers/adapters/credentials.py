"""The credentials of one adapter. Removes them from outcomes, because services quote them in their answers. Pure."""

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote, unquote_plus

from dispatchers.delivery import MAX_RESULT_BYTES, Finding, Outcome

Sanitized = TypeVar("Sanitized", bound=Outcome | Finding)

HIDDEN: Final = "(hidden: it quotes the adapter's credentials)"
CHARS_MIN: Final = 8  # a shorter value may occur in answers by accident
SEGMENT_CHARS_MIN: Final = 16  # of a URL's path, if it has no letters or no digits: "notifications" is no secret
MAX_READINGS: Final = 20  # of one text: two encodings, up to three times each
ENCODED: Final = re.compile(r"[\\%&]")  # every encoded text has one of these: see `_decoded`
PUBLIC_HEADERS: Final = frozenset({"accept", "accept-charset", "accept-language", "user-agent"})


class Credentials:
    """Values of at least 8 characters that must not be stored. The repr shows none of them."""

    def __init__(self, values: Iterable[str]) -> None:
        kept = {value for value in values if len(value) >= CHARS_MIN}
        needles = {needle for value in kept for needle in _written(value) if len(needle) >= CHARS_MIN}
        needles = {needle.casefold() for needle in needles}  # some services write everything in capitals
        # A text with one of the others contains a shorter one too: "Bearer abc123" and "abc123", in each encoding.
        self._needles = [each for each in needles if not any(other in each for other in needles - {each})]

    def __repr__(self) -> str:
        return "Credentials()"

    def removed_from(self, outcome: Sanitized) -> Sanitized:
        """The outcome or finding without credentials in its result and reason, in any encoding."""
        changed = {}
        for name in ("result", "reason"):
            value = getattr(outcome, name, None)
            if value is not None and (kept := self.hidden(value)) is not value:
                changed[name] = kept
        return replace(outcome, **changed) if changed else outcome

    def hidden(self, value: Any) -> Any:
        """A JSON value, in which each text with a credential is replaced. A value without one is returned itself.

        It checks the value in its stored form: parsed and serialized again.
        """
        try:
            text = json.dumps(value)
            if not ENCODED.search(text) and not self._is_in(text):
                return value
            stored = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            return value
        if len(text) > MAX_RESULT_BYTES:  # such a value is not stored
            return value
        # First check the value as one text: nearly all answers have no credential, and are decoded only once.
        return self._hidden_in(stored) if self._is_quoted_in("\n".join(_texts(stored))) else value

    def _hidden_in(self, value: Any) -> Any:
        match value:
            case dict():
                return {self._hidden_in(name): self._hidden_in(each) for name, each in value.items()}
            case list():
                return [self._hidden_in(each) for each in value]
            case str():
                return HIDDEN if self._is_quoted_in(value) else value
            case _:
                return HIDDEN if self._is_quoted_in(str(value)) else value

    def _is_quoted_in(self, text: str) -> bool:
        return any(self._is_in(reading) for reading in _readings(text))

    def _is_in(self, text: str) -> bool:
        text = text.casefold()
        for needle in self._needles:  # noqa: SIM110  # `any` takes three times as long
            if needle in text:
                return True
        return False


def credentials_of(headers: Mapping[str, str], urls: Iterable[str | None] = ()) -> Credentials:
    """The credentials in an adapter's headers and in the paths of its URLs."""
    values = [
        each for name, value in headers.items() if name.lower() not in PUBLIC_HEADERS for each in _in_header(value)
    ]
    return Credentials([*values, *(each for url in urls if url for each in _in_path(url))])


def _in_header(value: str) -> Iterator[str]:
    """The value, each word of it (a token follows its scheme, "Bearer"), a cookie's value, and the decoded text of Basic."""
    yield value
    for word in re.split(r"[\s;,]+", value):
        yield word
        yield word.partition("=")[2]
        if value.lower().startswith("basic "):
            decoded = _basic(word)
            yield decoded  # user:password
            yield decoded.partition(":")[2]


def _basic(word: str) -> str:
    try:
        return base64.b64decode(word, validate=True).decode(errors="replace")
    except ValueError:
        return ""


def _in_path(url: str) -> Iterator[str]:
    """The segments of the URL's path that look like secrets, as in webhooks, and those that follow each other as one text: some
    webhooks divide the secret into short segments.
    """
    segments = re.sub(r"^[^:/]+://[^/]*", "", url).partition("?")[0].split("/")
    for is_secret, run in groupby(segments, _looks_secret):
        if is_secret:
            found = list(run)
            for part in {*found, "/".join(found)}:
                yield part
                yield unquote(part)


def _looks_secret(segment: str) -> bool:
    if re.fullmatch(r"v\d+(\.\d+)*", segment, re.I):  # a version of an API
        return False
    is_mixed = re.search(r"[A-Za-z]", segment) and re.search(r"\d", segment)
    return bool(is_mixed) or len(segment) >= SEGMENT_CHARS_MIN


def _texts(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, each in value.items():
                yield name
                yield from _texts(each)
        case list():
            for each in value:
                yield from _texts(each)
        case _:
            yield str(value)


# --- the encodings of a credential, and of a text


def _written(value: str) -> Iterator[str]:
    """The value, and the parts of its base64 and hex forms that appear wherever the value is in an encoded text."""
    yield value
    for text in {value, json.dumps(value)[1:-1], value.replace("/", "\\/"), quote(value, safe="")}:
        data = text.encode()
        yield data.hex()
        for before in range(3):
            # Three bytes make four characters. Characters that also depend on the bytes before or after the value are cut off.
            whole = base64.b64encode(bytes(before) + data).decode().rstrip("=")
            part = whole[(0, 2, 3)[before] : len(whole) - bool((before + len(data)) % 3)]
            yield part
            yield part.translate(_URL_SAFE)


_URL_SAFE: Final = str.maketrans("+/", "-_")


def _readings(text: str) -> Iterator[str]:
    """The text, and its decoded forms, by all encodings and up to three times."""
    seen = {text}
    current = [text]
    while current:
        yield from current
        found = [reading for each in current for reading in _decoded(each) if reading not in seen]
        current = list(dict.fromkeys(found)) if len(seen) < MAX_READINGS else []
        seen.update(current)


def _decoded(text: str) -> Iterator[str]:
    if "\\" in text:  # a JSON string inside the text: PHP writes \\/ for a slash, others write \\u003d
        yield re.sub(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", _unescaped, text)
    if "%" in text:
        yield unquote(text)
        yield unquote_plus(text)
    if "&" in text:
        yield html.unescape(text)


def _unescaped(found: re.Match[str]) -> str:
    return found[3] or chr(int(found[1] or found[2], 16))
