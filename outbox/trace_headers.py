"""The trace context of an enqueue, stored with its entry: `outbox.configure(trace_headers=...)`."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Final, NamedTuple
from uuid import UUID

from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.observer")

NAMES: Final = ("traceparent", "tracestate")
"""W3C Trace Context. Nothing else is stored: baggage may hold personal data."""

MAX_CHARS: Final = 512
NO_HEADERS: Final = "{}"


class Enqueued(NamedTuple):
    """The entry that an enqueue adds: the argument of `outbox.configure(trace_headers=...)`."""

    id: UUID
    operation: str
    destination: str


TraceHeaders = Callable[[Enqueued], Mapping[str, str]]


@dataclass(slots=True)
class GuardedTraceHeaders:
    """Calls an app's function. An exception in it fails no enqueue: the first one is logged."""

    read: TraceHeaders
    _has_failed: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.read) or iscoroutinefunction(self.read):
            raise ConfigurationError(
                f"trace_headers must be a plain function that returns headers, not {self.read!r}: each enqueue calls it"
            )

    def stored(self, entry: Enqueued) -> str:
        """The headers as JSON, without those that are not part of the trace context, or not printable."""
        try:
            headers = of_trace(self.read(entry))
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("trace_headers= raised; enqueues are not affected, and its further errors are not logged")
            return NO_HEADERS
        return json.dumps(headers) if headers else NO_HEADERS


def of_trace(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of the trace context, without those that are not printable."""
    return {name: headers[name] for name in NAMES if name in headers and _is_printable(headers[name])}


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARS and value.isascii() and value.isprintable()
