"""The measures of a dispatcher, with their names in Prometheus and in OpenTelemetry, and their labels.

The OpenTelemetry names are those of its messaging conventions where there is one; all others begin with `outbox.`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dispatchers.telemetry.events import Activity, Backlog, Levels
from outbox.metrics.measures import Gauge

MAX_NAMES = 100
"""How many destinations, and how many operations with their destinations, have series of their own."""

OTHER = "other"
"""The label of all further ones: destinations and operations are chosen by apps, and may be one for each customer."""

SEND_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""OpenTelemetry's bounds for messaging.client.operation.duration."""

DELAY_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600, 21600)


class Measure(NamedTuple):
    """A counter, or a histogram if it has bounds."""

    prometheus: str
    opentelemetry: str
    unit: str
    description: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


SENDS = Measure(
    "outbox_sends_total",
    "messaging.client.sent.messages",
    "{message}",
    "Sends that an adapter has answered, by result.",
    ("destination", "operation", "result"),
)
LOOKUPS = Measure(
    "outbox_lookups_total",
    "outbox.lookups",
    "{lookup}",
    "Status lookups that an adapter has answered, by result.",
    ("destination", "operation", "result"),
)
CLAIMED = Measure("outbox_claimed_total", "outbox.claimed", "{entry}", "Entries claimed.", ("destination",))
SETTLED = Measure(
    "outbox_settled_total",
    "outbox.settled",
    "{entry}",
    "Leases that ended with a transition.",
    ("destination", "transition"),
)
LOST = Measure(
    "outbox_leases_lost_total",
    "outbox.leases.lost",
    "{lease}",
    "Leases that another process took before the entry settled.",
    ("destination",),
)
BLOCKED = Measure(
    "outbox_loop_blocked_seconds_total",
    "outbox.loop.blocked",
    "s",
    "How long the event loop was blocked, by the operation whose send blocked it.",
    ("destination", "operation"),
)
SKIPPED = Measure(
    "outbox_schedule_instants_skipped_total",
    "outbox.schedule.instants.skipped",
    "{instant}",
    "Instants of a schedule that were missed and not enqueued.",
    ("schedule",),
)
SEND_DURATION = Measure(
    "outbox_send_duration_seconds",
    "messaging.client.operation.duration",
    "s",
    "From the call of the adapter to its answer, of sends.",
    ("destination",),
    SEND_SECONDS,
)
SEND_DELAY = Measure(
    "outbox_send_delay_seconds",
    "outbox.send.delay",
    "s",
    "From the enqueue, or the due time if that is later, to the first send.",
    ("destination",),
    DELAY_SECONDS,
)
MEASURES = (SENDS, LOOKUPS, CLAIMED, SETTLED, LOST, BLOCKED, SKIPPED, SEND_DURATION, SEND_DELAY)


class Names:
    """Bounds the number of series: what comes after the first `max_names` is counted under `other`."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._destinations: set[str] = set()
        self._operations: set[tuple[str, str]] = set()

    def destination(self, name: str) -> str:
        return name if self._is_known(self._destinations, name) else OTHER

    def operation(self, destination: str, operation: str) -> tuple[str, str]:
        """The labels of both. The pairs are bounded, as each destination may have operations of its own."""
        pair = self.destination(destination), operation
        return pair if self._is_known(self._operations, pair) else (pair[0], OTHER)

    def _is_known(self, known: set[Any], name: Any) -> bool:
        if name not in known:
            if len(known) >= self._max_names:
                return False
            known.add(name)
        return True


Sample = tuple[Measure, tuple[str, ...], float]
"""What a counter counts, or what a histogram records, with the values of the labels."""


def counts(activity: Activity, names: Names) -> Iterator[Sample]:
    counted: Counter[tuple[Measure, tuple[str, ...]]] = Counter()
    for attempt in activity.attempts:
        labels = *names.operation(attempt.destination, attempt.operation), attempt.result
        counted[LOOKUPS if attempt.is_lookup else SENDS, labels] += 1
    for name, count in activity.claims.items():
        counted[CLAIMED, (names.destination(name),)] += count
    for (name, transition), count in activity.settlements.items():
        counted[SETTLED, (names.destination(name), transition)] += count
    for name, count in activity.lost_leases.items():
        counted[LOST, (names.destination(name),)] += count
    yield from ((measure, labels, count) for (measure, labels), count in counted.items())
    for sending, seconds in activity.blocked_seconds.items():
        yield BLOCKED, names.operation(*sending), seconds
    for schedule, count in activity.skipped_instants.items():
        yield SKIPPED, (schedule,), count


def durations(activity: Activity, names: Names) -> Iterator[Sample]:
    for attempt in activity.attempts:
        if not attempt.is_lookup:
            labels = (names.destination(attempt.destination),)
            yield SEND_DURATION, labels, attempt.seconds
            if attempt.delay_seconds is not None:
                yield SEND_DELAY, labels, attempt.delay_seconds


# --- gauges: the values of the last event of a kind

Values = Callable[[Any], Iterable[tuple[tuple[str, ...], float]]]


def _by_destination(field: str) -> Values:
    return lambda event: [((name,), value) for name, value in getattr(event, field).items()]


def _alone(field: str) -> Values:
    return lambda event: [((), float(getattr(event, field)))]


GAUGES: Mapping[type, tuple[Gauge, ...]] = {
    Levels: (
        Gauge(
            "outbox_sends_in_flight",
            "outbox.sends.in_flight",
            "{message}",
            "Sends and status lookups under way.",
            ("destination",),
            _by_destination("in_flight"),
        ),
        Gauge(
            "outbox_send_permits",
            "outbox.send.permits",
            "{message}",
            "How many of them may be under way.",
            ("destination",),
            _by_destination("permits"),
        ),
        Gauge(
            "outbox_claimed_ahead",
            "outbox.claimed_ahead",
            "{entry}",
            "Claimed entries that wait for a permit.",
            ("destination",),
            _by_destination("claimed_ahead"),
        ),
        Gauge(
            "outbox_destination_throttled",
            "outbox.destination.throttled",
            "1",
            "1 for a destination for which nothing is claimed; absent for all others.",
            ("destination", "reason"),
            lambda levels: [((name, reason), 1) for name, reason in levels.throttled.items()],
        ),
        Gauge(
            "outbox_callbacks_waiting",
            "outbox.callbacks.waiting",
            "{entry}",
            "Entries that wait for their callback.",
            (),
            _alone("callbacks_waiting"),
        ),
        Gauge(
            "outbox_unsettled",
            "outbox.unsettled",
            "{entry}",
            "Outcomes that the database has not taken yet.",
            (),
            _alone("unsettled"),
        ),
        Gauge(
            "outbox_sending_suspended",
            "outbox.sending.suspended",
            "1",
            "1 while sending is suspended after a failover or a restore.",
            (),
            _alone("suspended"),
        ),
        Gauge(
            "outbox_database_served",
            "outbox.database.served",
            "1",
            "1 while the database is served; 0 while it does not answer, or is refused.",
            (),
            _alone("served"),
        ),
    ),
    Backlog: (
        Gauge(
            "outbox_entries",
            "outbox.entries",
            "{entry}",
            "Entries that have not ended; of a long queue at least so many.",
            ("destination", "state"),
            lambda backlog: backlog.entries.items(),
        ),
        Gauge(
            "outbox_oldest_due_seconds",
            "outbox.oldest_due",
            "s",
            "How long the oldest due entry has waited for a claim; absent if there is none.",
            ("destination",),
            _by_destination("oldest_due_seconds"),
        ),
        Gauge(
            "outbox_blocked_groups",
            "outbox.blocked_groups",
            "{group}",
            "Ordering groups that an operator must release.",
            (),
            _alone("blocked_groups"),
        ),
        Gauge(
            "outbox_schedule_lag_seconds",
            "outbox.schedule.lag",
            "s",
            "For how long a schedule has been due; 0 if it is not due.",
            ("schedule",),
            _by_destination("schedule_lag_seconds"),
        ),
    ),
}
"""The gauges, by the event that brings their values."""


def values_of(gauge: Gauge, event: Any, names: Names) -> Mapping[tuple[str, ...], float]:
    """The gauge's values by their labels. Under `other`, ages count as the oldest and all other values are added up."""
    found: dict[tuple[str, ...], float] = {}
    for labels, value in gauge.values(event):
        if value is None:
            continue
        if gauge.labels:
            labels = names.destination(labels[0]), *labels[1:]
        before = found.get(labels, 0)
        found[labels] = max(before, value) if gauge.unit == "s" else before + value
    return found
