"""Traces of sends and status lookups: `Dispatcher(trace=...)`. The spans of OpenTelemetry are made by its binding."""

import logging
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from dispatchers.delivery import Delivery
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.observer")

End: TypeAlias = Callable[[str | None], object]
"""Called when the attempt has ended, with its result as in `events.Attempt`; None if it was cut short."""

Trace: TypeAlias = Callable[[Delivery, str, bool], End]
"""Called before each send and lookup, in its task: with the delivery, the destination, and whether it is a lookup."""


class GuardedTrace:
    """An app's `trace`, by which no send fails: its first exception is logged, and none gets out."""

    def __init__(self, trace: Trace) -> None:
        if not callable(trace) or iscoroutinefunction(trace):
            raise ConfigurationError(
                f"trace must be a plain function of delivery, destination and is_lookup, not {trace!r}: each send calls it"
            )
        self._trace = trace
        self._has_failed = False

    def begin(self, delivery: Delivery, destination: str, *, is_lookup: bool) -> End:
        end = self._guarded(self._trace, delivery, destination, is_lookup)
        return lambda result: self._guarded(end, result) if callable(end) else None

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.exception("trace= raised; sending is not affected, and its further errors are not logged")
            return None
