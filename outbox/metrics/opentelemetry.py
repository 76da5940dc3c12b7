"""OpenTelemetry: a counter and a histogram of claims, gauges that read the database when they are collected, and a span for each
enqueue.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine

from outbox.default_outbox import default
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.metrics.gauges import check_engine, read_through
from outbox.metrics.measures import CLAIMS, GROUPS, LOCK_WAIT_SECONDS, LOCK_WAITS, Gauge
from outbox.observer import ObservedClaim, Observer
from outbox.startup_checks import AsyncEngineLike
from outbox.trace_headers import Enqueued

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
    from opentelemetry.trace import SpanKind, Tracer, get_tracer, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise missing("outbox.metrics.opentelemetry", "opentelemetry", error) from error


def observer(meter: Meter | None = None) -> Observer:
    """Return a function that counts claims, for `outbox.configure(observe=...)`.

    meter: by default the global provider's, named `outbox`.
    """
    meter = meter or get_meter("outbox")
    claims = meter.create_counter("outbox.idempotency.claims", "{claim}", CLAIMS)
    waits = meter.create_histogram(
        "outbox.idempotency.lock_wait", "s", LOCK_WAITS, explicit_bucket_boundaries_advisory=LOCK_WAIT_SECONDS
    )

    def observe(claim: ObservedClaim) -> None:
        claims.add(1, {"outcome": claim.outcome, "source": claim.source})
        if claim.waited is not None:
            waits.record(claim.waited.total_seconds())

    return observe


def register_gauges(engine: Engine | AsyncEngineLike, *, outbox: Outbox = default, meter: Meter | None = None) -> None:
    """Read the age of open requests and the tables' sizes at each collection.

    engine: an Engine or an AsyncEngine. Its role needs SELECT on the records. Each of the five gauges uses one connection for
        one short transaction that only reads: from the Engine's pool, or, for an AsyncEngine, a new connection. OpenTelemetry
        logs what the database raises, and continues. Raises `ConfigurationError` if `engine` is not an engine.
    """
    check_engine(engine)
    meter = meter or get_meter("outbox")

    def register(gauge: Gauge, read: Callable[..., Any]) -> None:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            found = read_through(engine, lambda connection: read(connection, outbox.configuration.tables))
            for labels, value in gauge.values(found):
                if value is not None:
                    yield Observation(value, dict(zip(gauge.labels, labels, strict=True)))

        meter.create_observable_gauge(gauge.opentelemetry, [observe], gauge.unit, gauge.description)

    for read, gauges in GROUPS.items():
        for gauge in gauges:
            register(gauge, read)


# --- traces

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = get_tracer("outbox")  # of the global provider, also if the app sets that later


def trace_headers(entry: Enqueued, tracer: Tracer = _TRACER) -> Mapping[str, str]:
    """Make a producer span of the enqueue, and return its W3C headers: what `outbox.configure(trace_headers=...)` takes.

    tracer: by default the global provider's, named `outbox`; give another one with `functools.partial`. The current span is the
        parent. The span ends at once, before the commit: a transaction that rolls back leaves a span without a send.
    """
    attributes = {
        "messaging.system": "outbox",
        "messaging.destination.name": entry.destination,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
        "messaging.message.id": str(entry.id),
        "outbox.operation": entry.operation,
    }
    span = tracer.start_span(f"enqueue {entry.operation}", kind=SpanKind.PRODUCER, attributes=attributes)
    span.end()
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, set_span_in_context(span))
    return headers
