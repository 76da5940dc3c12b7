"""The window of a key, by what live dispatchers declare."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatchers.admin.decide.key_window import key_window, memory_of
from dispatchers.store.records.heartbeats import DispatcherSeen
from dispatchers.time_limits import FOREVER, Memory

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
DECLARED = {
    "window": 86400.0,
    "timeout": 30.0,
    "max_attempts": 20,
    "max_age": 259200.0,
    "at_least_once": False,
    "can_look_up": False,
    "form": "native",
}


def seen(operations: dict[str, Any], *, is_live: bool = True) -> DispatcherSeen:
    settings = {"lease": 60.0, "margin": 5.0, "operations": operations}
    return DispatcherSeen(
        host="web-1",
        pid=1,
        version="1",
        since=NOW,
        seen_at=NOW,
        is_live=is_live,
        in_flight=0,
        settings_digest="",
        operations=sorted(operations),
        settings=settings,
        is_readable=True,
    )


def test_the_longest_registered_prefix_declares_the_memory() -> None:
    dispatchers = [seen({"stripe": DECLARED, "stripe.refunds": DECLARED | {"window": 3600.0}})]

    found = memory_of("stripe.refunds.create", dispatchers)

    assert found is not None
    assert (found.window, found.fencing_delay) == (HOUR, timedelta(seconds=65))
    assert memory_of("crm.upsert", dispatchers) is None


def test_of_differing_dispatchers_the_shortest_window_counts() -> None:
    dispatchers = [
        seen({"crm": DECLARED | {"window": "forever"}}),
        seen({"crm": DECLARED | {"can_look_up": True}}),
        seen({"crm": DECLARED | {"window": 60.0}}, is_live=False),
    ]

    found = memory_of("crm", dispatchers)

    assert found is not None
    assert (found.window, found.can_look_up) == (DAY, True)


@pytest.mark.parametrize(
    ("memory", "since", "next_at", "expected"),
    [
        (None, NOW, None, ("unknown", False)),
        (Memory(window=None), NOW, None, ("no_keys", False)),
        (Memory(window=FOREVER), NOW, None, ("forever", False)),
        (Memory(window=DAY), None, None, ("unsent", False)),
        (Memory(window=DAY), NOW - 2 * DAY, None, ("closed", False)),
        (Memory(window=DAY), NOW - HOUR, NOW + HOUR, ("open", False)),
        (Memory(window=DAY), NOW - HOUR, NOW + DAY, ("open", True)),
        (Memory(window=DAY), NOW - HOUR, None, ("open", True)),
    ],
)
def test_the_window_warns_if_it_closes_before_the_next_step(
    memory: Memory | None, since: datetime | None, next_at: datetime | None, expected: Any
) -> None:
    found = key_window(memory, since, next_at, NOW)

    assert (found.kind, found.closes_before_next) == expected


def test_the_window_ends_earlier_by_the_timeout_and_the_margin() -> None:
    found = key_window(Memory(window=DAY), NOW, None, NOW)

    assert found.closes_at == NOW + DAY - timedelta(seconds=35)
