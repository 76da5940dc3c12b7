"""OpenTelemetry: counters and histograms of what a dispatcher does, gauges of its last reports, and a span for each attempt."""

from collections.abc import Iterable, Mapping
from typing import Any

from dispatchers.delivery import Delivery
from dispatchers.telemetry.events import Activity, Event, Observer, Observers
from dispatchers.telemetry.measures import (
    GAUGES,
    MAX_NAMES,
    MEASURES,
    SEND_DURATION,
    SENDS,
    Names,
    counts,
    durations,
    values_of,
)
from dispatchers.telemetry.tracing import AttemptSpan, End, Trace
from dispatchers.transitions import ClaimedEntry
from outbox.extras import missing
from outbox.metrics.measures import Gauge

try:
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise missing("dispatchers.telemetry.opentelemetry", "opentelemetry", error) from error

SYSTEM = {"messaging.system": "outbox"}
SENDING = {"messaging.operation.name": "send", "messaging.operation.type": "send"}
SUCCESSES = ("delivered", "replayed")
ATTRIBUTES = {"destination": "messaging.destination.name"} | {
    label: f"outbox.{label}"
    for label in ("database", "operation", "result", "transition", "state", "reason", "schedule")
}
"""The attribute of each label."""


def observer(meter: Meter | None = None, *, max_names: int = MAX_NAMES) -> Observer:
    """Export to `meter`: what `Dispatcher(observe=...)` takes. By default the global provider's, named `outbox`.

    max_names: how many destinations, and how many operations, have series of their own; all others are counted under `other`.
    """
    return _Exporter(meter, max_names, ()).of()


def observers(meter: Meter | None = None, *, max_names: int = MAX_NAMES) -> Observers:
    """Export to `meter`, with the attribute `outbox.database`: what `Fleet(observe=...)` takes. See `observer`."""
    return _Exporter(meter, max_names, ("database",))


class _Exporter:
    """first: the labels before those of each metric."""

    def __init__(self, meter: Meter | None, max_names: int, first: tuple[str, ...]) -> None:
        meter = meter or get_meter("outbox")
        self._first = first
        self._names = Names(max_names)
        self._last: dict[tuple[str, ...], dict[type, Event]] = {}
        self._instruments: dict[str, Any] = {
            measure.opentelemetry: meter.create_histogram(
                measure.opentelemetry,
                measure.unit,
                measure.description,
                explicit_bucket_boundaries_advisory=measure.bounds,
            )
            if measure.bounds
            else meter.create_counter(measure.opentelemetry, measure.unit, measure.description)
            for measure in MEASURES
        }
        names = Names(max_names)
        for kind, gauges in GAUGES.items():
            for gauge in gauges:
                self._register(meter, kind, gauge, names)

    def of(self, *first: str) -> Observer:
        last, common = self._last.setdefault(first, {}), _attributes(self._first, first)

        def observe(event: Event) -> None:
            if not isinstance(event, Activity):
                last[type(event)] = event
                return
            for measure, labels, count in counts(event, self._names):
                attributes = common | _attributes(measure.labels, labels)
                if measure is SENDS:
                    attributes |= SENDING if labels[-1] in SUCCESSES else SENDING | {"error.type": labels[-1]}
                self._instruments[measure.opentelemetry].add(count, attributes)
            for measure, labels, seconds in durations(event, self._names):
                sending = SENDING if measure is SEND_DURATION else {}
                attributes = common | _attributes(measure.labels, labels) | sending
                self._instruments[measure.opentelemetry].record(seconds, attributes)

        return observe

    def forget(self, *first: str) -> None:
        """Show no gauges of it any more."""
        self._last.pop(first, None)

    def _register(self, meter: Meter, kind: type, gauge: Gauge, names: Names) -> None:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            for first, last in list(self._last.items()):
                if kind in last:
                    common = _attributes(self._first, first)
                    for labels, value in values_of(gauge, last[kind], names).items():
                        yield Observation(value, common | _attributes(gauge.labels, labels))

        meter.create_observable_gauge(gauge.opentelemetry, [observe], gauge.unit, gauge.description)


def _attributes(labels: tuple[str, ...], values: tuple[str, ...]) -> dict[str, str]:
    return SYSTEM | {ATTRIBUTES[label]: value for label, value in zip(labels, values, strict=True)}


# --- traces

PROCESSING = {"messaging.operation.type": "process"}
DONE = (*SUCCESSES, "found", "absent", "settled")
"""The results that are no errors."""
_PROPAGATOR = TraceContextTextMapPropagator()


def trace(tracer: Tracer | None = None) -> Trace:
    """Make a span for each send, status lookup and callback: what `Dispatcher(trace=...)` takes.

    tracer: by default the global provider's, named `outbox`.

    The span is current while the adapter or the callback works, unless the adapter sends entries in batches. The span of an
    attempt begins a trace of its own, as the send may come days after the enqueue, and links to the span whose headers are stored
    with the entry. The span of a callback is its child. If the callback is called again later, its span begins a trace of its own
    too, with the same link.
    """
    return _Spans(tracer or get_tracer("outbox"))


class _Spans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def attempt(self, delivery: Delivery, destination: str, is_lookup: bool) -> AttemptSpan:
        name = "lookup" if is_lookup else "send"
        attributes = _attributes(("destination", "operation"), (destination, delivery.operation)) | PROCESSING
        span = self._tracer.start_span(
            f"{name} {delivery.operation}",
            Context(),
            SpanKind.CONSUMER,
            {
                **attributes,
                "messaging.operation.name": name,
                "messaging.message.id": str(delivery.id),
                "outbox.attempt": delivery.attempt,
            },
            _links(delivery.headers),
        )
        context = set_span_in_context(span, Context())
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, context)
        return AttemptSpan(end=_current_until_end(span), headers=headers, context=context)

    def callback(self, entry: ClaimedEntry, context: Any) -> End:
        span = self._tracer.start_span(
            f"callback {entry.operation}",
            context or Context(),
            SpanKind.INTERNAL,
            {
                **_attributes(("destination", "operation"), (entry.destination, entry.operation)),
                "messaging.message.id": str(entry.id),
            },
            [] if context else _links(entry.headers),
        )
        return _current_until_end(span)


def _links(headers: Mapping[str, str]) -> list[Link]:
    """A link to the span of the enqueue, if its headers are stored."""
    enqueued = get_current_span(_PROPAGATOR.extract(headers, Context())).get_span_context()
    return [Link(enqueued)] if enqueued.is_valid else []


def _current_until_end(span: Span) -> End:
    """Make the span current in this task, until what is returned is called."""
    token = attach(set_span_in_context(span))

    def end(result: str | None) -> None:
        detach(token)
        result = result or "cut_short"
        span.set_attribute("outbox.result", result)
        if result not in DONE:
            span.set_attribute("error.type", result)
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    return end
