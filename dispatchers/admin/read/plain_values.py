"""Values as operators read and write them: JSON documents, instants, spans of time, positions in a list and lists of ids.

The command line and the dashboard share these forms.
"""

import dataclasses
import json
import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

Id = TypeVar("Id", UUID, int)

MAX_BIGINT = 2**63 - 1
MAX_DEPTH = 100
MAX_SPAN = timedelta(days=36525)  # a century: no instant that it leads to is before the first year
SPAN = re.compile(r"(\d{1,6})([smhdw])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def plain(value: Any) -> Any:
    """`value` as JSON takes it: dataclasses as objects, instants in ISO 8601 with a Z, ids as text."""
    match value:
        case datetime():
            return instant(value)
        case UUID() | date() | Place():
            return str(value)
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case _ if dataclasses.is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            return value


def shown_json(text: str) -> Any:
    """The stored JSON, as `parsed_or_text`. Of an encrypted value only the name of its key."""
    from outbox.encryption import is_sealed_json, key_id_of

    return f"encrypted with key {key_id_of(text)}" if is_sealed_json(text) else parsed_or_text(text)


def parsed_or_text(document: str) -> Any:
    """The JSON document; its text if it is nested deeper than `MAX_DEPTH`, which neither `plain` nor every client can read."""
    try:
        value = json.loads(document)
    except RecursionError:
        return document
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return value
    return document


def _inner(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
        case _:
            return ()


def instant(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def span(length: timedelta) -> str:
    """`length` in its largest unit: 45s, 12m, 3h, 5d."""
    seconds = int(abs(length).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def parse_since(text: str) -> timedelta | datetime:
    """A span back from now (`90s`, `15m`, `2h`, `7d`, `4w`); or an instant in ISO 8601, by default UTC. Raises `ValueError`."""
    try:
        if found := SPAN.fullmatch(text):
            length = timedelta(**{UNITS[found[2]]: int(found[1])})
            if length > MAX_SPAN:
                raise ValueError("too long")
            return length
        parsed = datetime.fromisoformat(text)
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is neither a span such as 15m, 2h or 7d nor an instant such as 2026-01-31T12:00Z"
        ) from None


@dataclass(frozen=True, slots=True)
class Place(Generic[Id]):
    """Where a page of a list ended: what the list is ordered by, and the row's id. A page prints its text: `<instant>,<id>`."""

    at: datetime
    id: Id

    def __str__(self) -> str:
        return f"{instant(self.at)},{self.id}"

    @classmethod
    def parse(cls, text: str, id_of: Callable[[str], Id]) -> "Place[Id]":
        """The place that a page printed. id_of: `UUID` or `int`. Raises `ValueError`."""
        at, _, id_text = text.partition(",")
        try:
            id = id_of(id_text)
            if isinstance(id, int) and abs(id) > MAX_BIGINT:
                raise ValueError("no row has this number")
            return cls(datetime.fromisoformat(at).astimezone(UTC), id)
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is not a cursor: pass the one that the previous page printed") from None


def ids_text(ids: Iterable[UUID]) -> str:
    """Ids in 22 characters each, for `parse_ids`."""
    return urlsafe_b64encode(b"".join(id.bytes for id in ids)).decode()


def parse_ids(text: str) -> tuple[UUID, ...]:
    """The ids that `ids_text` wrote. Raises `ValueError`."""
    try:
        packed = b64decode(text, altchars=b"-_", validate=True)
        return tuple(UUID(bytes=packed[start : start + 16]) for start in range(0, len(packed), 16))
    except ValueError:
        raise ValueError(f"{text[:40]!r} has no entries: pass those of the previous answer") from None
