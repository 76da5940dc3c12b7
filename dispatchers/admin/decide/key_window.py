"""How long the service remembers an entry's key, by what the live dispatchers declare in their heartbeats. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from dispatchers.admin.read.dispatchers import live
from dispatchers.names import prefixes
from dispatchers.store.records.heartbeats import DispatcherSeen
from dispatchers.time_limits import CENTURY, FOREVER, Memory, Window, last_safe_send


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWindow:
    """Whether the service still remembers the key under which an entry may have been sent.

    kind: `open` until `closes_at`, then `closed`; `forever`; `no_keys` for a service that keeps none; `unsent` if no attempt
        under the present key is in doubt; `unknown` if no live dispatcher serves the operation.
    closes_at: from then on no dispatcher sends the entry under this key: the window, less the timeout and the clock-skew margin.
    closes_before_next: whether it closes before the dispatchers' next step with the entry, or no step is planned.
    """

    kind: Literal["open", "closed", "forever", "no_keys", "unsent", "unknown"]
    closes_at: datetime | None = None
    closes_before_next: bool = False


def memory_of(operation: str, dispatchers: Collection[DispatcherSeen]) -> Memory | None:
    """What the live dispatchers declare of an operation; None if none serves it.

    Of several that differ, the shortest window counts, and one with a status lookup is enough.
    """
    found = [memory for each in live(dispatchers) if (memory := _memory(operation, each.settings)) is not None]
    if not found:
        return None
    shortest = min(found, key=_remembers)
    return replace(shortest, can_look_up=any(memory.can_look_up for memory in found))


def _remembers(memory: Memory) -> timedelta:
    if memory.window is None:
        return timedelta(0)
    return CENTURY if memory.window is FOREVER else min(memory.window, CENTURY) - memory.timeout - memory.margin


def _memory(operation: str, settings: Mapping[str, Any]) -> Memory | None:
    registered = settings.get("operations", {})  # none of a release whose heartbeat this one cannot read
    name = next((name for name in prefixes(operation) if name in registered), None)
    if name is None:
        return None
    declared = registered[name]
    lease, margin = timedelta(seconds=settings["lease"]), timedelta(seconds=settings["margin"])
    return Memory(
        window=_window(declared["window"]),
        timeout=timedelta(seconds=declared["timeout"]),
        at_least_once=declared.get("at_least_once", False),
        max_attempts=declared["max_attempts"],
        max_age=timedelta(seconds=declared["max_age"]),
        margin=margin,
        fencing_delay=lease + margin,
        can_look_up=declared.get("can_look_up", False),
        form=declared.get("form", ""),
    )


def _window(declared: Any) -> Window:
    if declared is None:
        return None
    return FOREVER if declared == "forever" else timedelta(seconds=declared)


def key_window(
    memory: Memory | None, in_doubt_since: datetime | None, next_at: datetime | None, now: datetime
) -> KeyWindow:
    """The window of an entry's key. next_at: when the dispatchers do something with the entry next; None for never."""
    if memory is None:
        return KeyWindow(kind="unknown")
    if memory.window is None:
        return KeyWindow(kind="no_keys")
    if memory.window is FOREVER:
        return KeyWindow(kind="forever")
    closes_at = last_safe_send(in_doubt_since, memory)
    if closes_at is None:
        return KeyWindow(kind="unsent")
    if closes_at <= now:
        return KeyWindow(kind="closed", closes_at=closes_at)
    return KeyWindow(kind="open", closes_at=closes_at, closes_before_next=next_at is None or next_at >= closes_at)
