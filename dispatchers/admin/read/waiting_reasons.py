"""Why entries of a destination that are due are not claimed. Pure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dispatchers.admin.read.dispatchers import is_served, live, served_destinations, some_of
from dispatchers.flow_control.state import service_of
from dispatchers.store.records.heartbeats import DispatcherSeen

NO_DISPATCHER = "no dispatcher is live"
UNSERVED = "no live dispatcher serves it"
SUSPENDED = "sending is suspended"
NO_CALLBACK = "no live dispatcher has the callback"

_BUDGETS = {
    "callback_concurrency": "its callbacks take all that callback_concurrency={value} allows",
    "concurrency": "its concurrency is used up",
    "fleet": "the limits that all databases of the fleet share are used up",
    "max_in_flight": "max_in_flight={value} is used up",
}


def why_waiting(
    name: str,
    row: Any,
    now: datetime,
    dispatchers: Sequence[DispatcherSeen],
    suspended: str | None,
    *,
    permits_taken: int,
    operations: Collection[str] = (),
    are_sent: bool = True,
    callbacks: Collection[str] = (),
) -> str | None:
    """Why nothing is claimed for destination `name`, apart from a pause, a cooldown and the breaker; None if nothing is known.

    row: of the destination, or None. suspended: why sending is suspended, if it is. operations: of its first due entries, if its
    name does not show who serves it: `enqueue` may give an operation any destination. A budget counts only if it is used up in
    each live dispatcher that serves the destination, when it last reported. are_sent: False if it has only entries whose end is
    stored; they wait for nothing but their callbacks. callbacks: those that dispatchers without them have left to others.
    """
    if suspended is not None:
        return f"{SUSPENDED}: {suspended}"
    running = live(dispatchers)
    if not running:
        return NO_DISPATCHER
    serving = [each for each in running if not each.is_readable or _serves(each, name, operations)]
    if not serving:
        return UNSERVED
    if not are_sent and callbacks and all(each.is_readable for each in running):
        missing = sorted(set(callbacks).difference(*map(_callbacks, running)))
        if missing:
            return f"{NO_CALLBACK} {some_of(missing)}"
        serving = [each for each in serving if not _callbacks(each).isdisjoint(callbacks)]
    if are_sent and row is not None and row.max_permits is not None and permits_taken >= row.max_permits:
        return f"all {row.max_permits} permits of total_concurrency are in use"
    if are_sent and row is not None and _has_no_rate_left(row, now, name, serving):
        return f"its rate of {row.rate_per_second:g}/s is used up"
    settings = _BUDGETS.keys() if are_sent else ("callback_concurrency",)
    budgets = {each.name: list(_used_up(each, name, settings)) for each in serving}
    if not (budgets and all(budgets.values())):
        return None
    by_text: dict[str, list[str]] = {}
    for dispatcher, texts in budgets.items():
        for text in texts:
            by_text.setdefault(text, []).append(dispatcher)
    return "; ".join(f"{text} ({some_of(names)})" for text, names in by_text.items())


def _has_no_rate_left(row: Any, now: datetime, name: str, serving: Sequence[DispatcherSeen]) -> bool:
    """Whether a claim must wait for the rate: a burst of it may be used ahead of time."""
    if row.rate_at is None or row.rate_per_second is None:
        return False
    bursts = [_burst(each.settings.get("limits", {}), name) for each in serving]
    burst = max(filter(None, bursts), default=max(1, math.floor(row.rate_per_second)))
    return bool((row.rate_at - now).total_seconds() * row.rate_per_second > burst - 1)


def _burst(limits: Mapping[str, Mapping[str, Any]], name: str) -> int | None:
    return (limits.get(name) or limits.get(service_of(name)) or {}).get("burst")


def _serves(dispatcher: DispatcherSeen, name: str, operations: Collection[str]) -> bool:
    is_named = service_of(name) in served_destinations([dispatcher])
    return is_named or any(is_served(operation, [dispatcher]) for operation in operations)


def _callbacks(dispatcher: DispatcherSeen) -> set[str]:
    return set(dispatcher.settings.get("callbacks", ()))


def _used_up(dispatcher: DispatcherSeen, name: str, settings: Collection[str]) -> Iterator[str]:
    for setting, names in dispatcher.used_up.items():
        if setting in settings and (not names or name in names):
            yield _BUDGETS[setting].format(value=dispatcher.settings.get(setting))
