"""What the library must reach, as data, and whether a report meets it."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Report, Series

DEFAULT, TUNED, TWO = "outbox, default settings", "outbox, 1000 concurrent", "outbox, 1000 concurrent, two processes"
ALONE = "without"
IN_FLIGHT: Mapping[str, Sequence[tuple[int, float, float | None]]] = {
    "HTTP": ((10, 0.65, 0.65), (100, 0.65, 0.8), (1000, 0.65, 0.65)),
    "HTTP over TLS": ((10, 0.65, None), (100, 0.65, None), (1000, 0.65, None)),
    "Stripe": ((10, 0.7, 0.7), (100, 0.7, 0.8), (1000, 0.7, 0.7)),
}
"""How many sends are in flight, and the least rate of the adapter and of the dispatcher over the bare client."""


@dataclass(frozen=True)
class Goal:
    """A metric of a side, or its ratio over another side of the same case: at least `least`, or at most `most`."""

    part: str
    side: str
    metric: str
    over: str | None = None
    least: float | None = None
    most: float | None = None
    case: str = ""

    @property
    def limit(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def _drain() -> Iterator[Goal]:
    yield Goal("drain", DEFAULT, "per_second", TUNED, least=0.8)
    yield Goal("drain", TUNED, "per_second", "PGQueuer", least=2.5)
    yield Goal("drain", TUNED, "cpu_us", "PGQueuer", most=0.45)
    yield Goal("drain", TUNED, "wal_bytes", "PGQueuer", most=0.25)
    yield Goal("drain", TUNED, "per_second", "graphile-worker", least=1.2)
    yield Goal("drain", TUNED, "per_second", "pg-boss", least=1)
    yield Goal("drain", TUNED, "per_second", "Procrastinate", least=15)
    yield Goal("drain", TUNED, "per_second", "DBOS", least=15)
    yield Goal("drain", TUNED, "per_second", "server-side limit", least=0.35)
    yield Goal("drain", TWO, "per_second", TUNED, least=1.6)


def _latency() -> Iterator[Goal]:
    for side in ("psycopg", "asyncpg", "two dispatchers", "in one process"):
        for metric, most in (("p50_ms", 2.5), ("p99_ms", 10)):
            yield Goal("latency", side, metric, most=most)
            yield Goal("latency", side, metric, "PGQueuer", most=1)
    for side in ("psycopg", "asyncpg"):
        for metric, times in (("client_us", 1.2), ("server_us", 1.2), ("p50_ms", 1), ("p99_ms", 1)):
            yield Goal("latency", side, metric, "PGQueuer", most=times, case="trickle")
        yield Goal("latency", side, "p50_ms", most=2.5, case="trickle")
        yield Goal("latency", side, "p99_ms", most=10, case="trickle")
    yield Goal("latency", "with hints", "per_second", "without hints", least=0.97, case="cost of hints")


def _sends() -> Iterator[Goal]:
    for scenario, bare, adapter, most in (
        ("HTTP", "bare aiohttp", "HttpAdapter", 2.5),
        ("HTTP over TLS", "bare aiohttp", "HttpAdapter", 2.5),
        ("Stripe", "bare stripe SDK over aiohttp", "StripeAdapter", None),
    ):
        for in_flight, of_adapter, of_dispatcher in IN_FLIGHT[scenario]:
            case = f"{scenario}, {in_flight} in flight"
            for side, least in ((adapter, of_adapter), (f"{adapter} in a dispatcher", of_dispatcher)):
                if least is None:
                    continue
                yield Goal("sends", side, "per_second", bare, least=least, case=case)
                if most is not None:
                    yield Goal("sends", side, "client_us", bare, most=most, case=case)
    for side in ("a profile", "a profile with the key in the body"):
        yield Goal("sends", side, "client_us", "HttpAdapter", most=1.05, case="HTTP, 100 in flight")


def _relay() -> Iterator[Goal]:
    yield Goal("relay", "NATS JetStream", "per_second", "no-op", least=0.6)


def _enqueue() -> Iterator[Goal]:
    for side, most in (("1 entry", 1.35), ("10 entries", 1.7), ("100 entries", 4.2)):
        yield Goal("enqueue", side, "cpu_us", "no entry", most=most, case="transaction")
    yield Goal("enqueue", "an entry", "wal_bytes", most=2000, case="WAL after a checkpoint")


def _requests() -> Iterator[Goal]:
    for clients in (1, 16):
        yield Goal("requests", "claimed", "cpu_us", "plain", most=1.3, case=f"clients: {clients}")
        yield Goal("requests", "replayed", "cpu_us", "claimed", most=0.5, case=f"clients: {clients}")


def _scale() -> Iterator[Goal]:
    for case, side, least in (
        ("xmin", "beside an old xmin horizon", 0.9),
        ("hanging", "beside a hanging destination", 0.95),
        ("hanging", "after minutes", 0.95),
        ("pending", "many pending", 0.9),
        ("kept", "many kept", 0.9),
        ("kept, long after a checkpoint", "many kept", 0.9),
        ("destinations", "many destinations", 0.9),
        ("retention", "beside retention", 0.8),
    ):
        yield Goal("scale", side, "per_second", ALONE, least=least, case=case)
    yield Goal("scale", "at the end", "memory_mb", "after a tenth", most=1.1, case="memory")
    yield Goal("scale", "idle", "cpu_percent", most=0.5, case="idle")
    yield Goal("scale", "idle", "queries_per_second", most=1, case="idle")
    yield Goal("scale", "started", "first_send_ms", most=1000, case="start")


PAGES = (
    *("uncertain", "overview", "entries", "destinations", "ordering groups", "requests", "dispatchers"),
    *("schedules", "tables", "audit log", "proposals"),
    *("find", "uncertain, filtered", "entries, filtered", "entries, of a parent", "entries, failed", "find, by a key"),
    *("find, nothing", "requests, filtered", "ordering groups, all", "ordering group", "entry"),
)


def _dashboard() -> Iterator[Goal]:
    for page in PAGES:
        yield Goal("dashboard", page, "p95_ms", most=300, case="pages")
    yield Goal("dashboard", "beside a dashboard", "per_second", ALONE, least=0.97, case="drain")


GOALS = (*_drain(), *_latency(), *_sends(), *_relay(), *_enqueue(), *_requests(), *_scale(), *_dashboard())


@dataclass(frozen=True)
class Verdict:
    """value: the median, or the median of the rounds' ratios."""

    goal: Goal
    value: float

    @property
    def is_met(self) -> bool:
        return self.goal.is_met(self.value)

    @property
    def word(self) -> str:
        return "met" if self.is_met else "MISSED"


def judge(report: Report, goals: Iterable[Goal] = GOALS) -> list[Verdict]:
    """A verdict on each goal whose figures the report has."""
    found = ((goal, value_of(report, goal)) for goal in goals)
    return [Verdict(goal, value) for goal, value in found if value is not None]


def value_of(report: Report, goal: Goal) -> float | None:
    its = report.find(goal.part, goal.case, goal.side, goal.metric)
    if its is None:
        return None
    if goal.over is None:
        return its.median
    other = report.find(goal.part, goal.case, goal.over, goal.metric)
    return None if other is None else ratio(its, other)


def ratio(its: Series, other: Series) -> float:
    """Of each round on its own, so that a machine whose speed drifts drifts for both."""
    return statistics.median(a / b for a, b in zip(its.values, other.values, strict=True))
