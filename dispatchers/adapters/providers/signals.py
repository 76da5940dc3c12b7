"""The signals in a service's answers: a status, members of the JSON, and headers. Pure."""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from dispatchers.adapters.providers.json_paths import PATH, holds
from outbox.errors import ConfigurationError

UNREADABLE: Final = object()
"""The body of an answer that is not JSON, or broke off."""


@dataclass(frozen=True, slots=True)
class Signal:
    """An answer is one if it has the status, every member of `body`, and every header.

    status: None for any status. body: members that the JSON must have, nested: {"errors": [{"code": "in_use"}]} needs one such
    item, and the name "*" is that of any member. headers: names in any case, and their values.
    """

    status: int | None
    _: KW_ONLY
    body: Mapping[str, Any] | None = field(default=None, hash=False)
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.status is not None and not (isinstance(self.status, int) and 200 <= self.status <= 599):
            raise ConfigurationError(f"Signal({self.status!r}): the status must be from 200 to 599, or None")

    def is_in(self, status: int, headers: Mapping[str, str], body: Any) -> bool:
        """headers: names in lower case. body: parsed."""
        return (
            self.status in (None, status)
            and (self.body is None or holds(body, self.body))
            and all(headers.get(name.lower()) == value for name, value in self.headers.items())
        )


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The answer of a service that refuses a key which it has executed: this means delivered, except `after_errors`.

    signal: how the answer is known. id: the path of the existing object's id in its JSON; None if the answer does not name it.
    after_errors: the service refuses the key after an error too, so the refusal proves no delivery.
    """

    signal: Signal
    id: str | None = None
    after_errors: bool = False

    def __post_init__(self) -> None:
        if self.id is not None and not PATH.fullmatch(self.id):
            raise ConfigurationError(
                f"Duplicate: id={self.id!r} must be names joined by dots, such as 'error.links.id'"
            )


def parsed(body: bytes, *, whole: bool) -> Any:
    """The JSON of a body, or `UNREADABLE`."""
    if not whole:
        return UNREADABLE
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return UNREADABLE
