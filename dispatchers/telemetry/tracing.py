"""Traces of sends, status lookups and callbacks: `Dispatcher(trace=...)`. The spans of OpenTelemetry are made by its binding."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from dispatchers.delivery import Delivery
from dispatchers.transitions import ClaimedEntry, Lease
from outbox.errors import ConfigurationError
from outbox.trace_headers import of_trace

log = logging.getLogger("outbox.observer")

End: TypeAlias = Callable[[str | None], object]
"""Called when what was traced has ended, with its result; None if it was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """The span of one send or status lookup.

    end: called with the result as in `events.Attempt`. headers: the W3C headers that go out with the attempt.
    context: what `Trace.callback` gets, if a callback follows.
    """

    end: End
    headers: Mapping[str, str] = field(default_factory=dict)
    context: Any = None


class Trace(Protocol):
    """What `Dispatcher(trace=...)` takes. It must not block."""

    def attempt(self, delivery: Delivery, destination: str, is_lookup: bool) -> AttemptSpan:
        """Begin the span of a send or status lookup. Called before the adapter, in the task of the attempt.

        For entries that the adapter sends together, this method and the span's end are called in a context of each entry
        (`contextvars`), so that no span is current in the adapter.
        """
        ...

    def callback(self, entry: ClaimedEntry, context: Any) -> End:
        """Begin the span of the transaction in which the callback of `entry` runs, and the entry settles.

        context: of the attempt's span; None if the callback is called again, in a later claim.
        The end gets `settled`, `failed`, `lost` (another process has the entry) or `postponed` (it is tried again soon).
        """
        ...


class GuardedTrace:
    """Calls an app's `trace`. An exception in it fails no send: the first one is logged."""

    def __init__(self, trace: Trace) -> None:
        if isinstance(trace, type) or not all(callable(getattr(trace, name, None)) for name in ("attempt", "callback")):
            raise ConfigurationError(
                f"trace must be an object with attempt() and callback(), as dispatchers.telemetry.tracing.Trace, not {trace!r}"
            )
        self._trace = trace
        self._has_failed = False
        self._contexts: dict[Lease, Any] = {}

    def attempt(self, delivery: Delivery, entry: ClaimedEntry, *, is_lookup: bool) -> tuple[Delivery, End]:
        """The delivery with the headers that go out with it, and the end of the span."""
        span = self._guarded(self._trace.attempt, delivery, entry.destination, is_lookup)
        if not isinstance(span, AttemptSpan):
            return delivery, _nothing
        headers = self._guarded(of_trace, span.headers)
        if span.context is not None:
            self._contexts[entry.lease] = span.context
        return delivery._replace(headers=headers) if headers else delivery, self._guarding(span.end)

    def context_of(self, entry: ClaimedEntry) -> Any:
        """The context of the attempt that has just ended, which is forgotten. To be called once for each entry."""
        return self._contexts.pop(entry.lease, None)

    def callback(self, entry: ClaimedEntry, context: Any) -> End:
        return self._guarding(self._guarded(self._trace.callback, entry, context))

    def _guarding(self, end: Any) -> End:
        return (lambda result: self._guarded(end, result)) if callable(end) else _nothing

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("trace= raised; sending is not affected, and its further errors are not logged")
            return None


def _nothing(result: str | None) -> None:
    """The end of what is not traced."""
