"""The trace context of an enqueue, stored with its entry: `outbox.configure(trace_headers=...)`."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Final

from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.observer")

NAMES: Final = ("traceparent", "tracestate")
"""W3C Trace Context. Nothing else is stored: baggage may hold personal data."""

CHARS_MAX: Final = 512
NO_HEADERS: Final = "{}"

TraceHeaders = Callable[[], Mapping[str, str]]


@dataclass(slots=True)
class GuardedTraceHeaders:
    """An app's function, by which no enqueue fails: its first exception is logged, and none gets out."""

    read: TraceHeaders
    _has_failed: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.read) or iscoroutinefunction(self.read):
            raise ConfigurationError(
                f"trace_headers must be a plain function that returns headers, not {self.read!r}: each enqueue calls it"
            )

    def stored(self) -> str:
        """The headers as JSON, without those that are none of the trace context, or not printable."""
        try:
            found = self.read()
            headers = {name: found[name] for name in NAMES if name in found and _is_printable(found[name])}
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("trace_headers= raised; enqueues are not affected, and its further errors are not logged")
            return NO_HEADERS
        return json.dumps(headers) if headers else NO_HEADERS


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= CHARS_MAX and value.isascii() and value.isprintable()
