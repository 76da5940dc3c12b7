"""A span for each send, status lookup and callback, which leads back to that of the enqueue; the databases are real."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer, get_current_span
from support.database import Database
from support.entries import age, dispatcher, put, put_one, run_once, states
from support.lookups import QUIET, keyless

import outbox
from dispatchers import Deferred, Delivered, Delivery, Operations, Outcome, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.delivery import Answered
from dispatchers.telemetry.opentelemetry import trace
from dispatchers.telemetry.tracing import AttemptSpan
from outbox.errors import ConfigurationError
from outbox.metrics.opentelemetry import trace_headers


@pytest.fixture
def ob(tracer: Tracer) -> outbox.Outbox:
    keyring = outbox.Keyring({"k1": bytes(range(32))})
    return outbox.Outbox(keyring, env="test", trace_headers=partial(trace_headers, tracer=tracer))


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Iterator[Tracer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider.get_tracer("test")
    provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_each_attempt_is_a_consumer_span_linked_to_that_of_its_enqueue(
    database: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    service = MemoryAdapter([Deferred("later", after=timedelta(hours=1))])
    id = put_one(database, ob)

    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, trace=trace(tracer))
        age(database, timedelta(hours=2))

    enqueued, first, second = spans.get_finished_spans()
    for span in (first, second):
        assert (span.name, span.kind, span.parent) == ("send crm.upsert", SpanKind.CONSUMER, None)
        (link,) = span.links
        assert (link.context.trace_id, link.context.span_id) == (
            enqueued.get_span_context().trace_id,
            enqueued.get_span_context().span_id,
        )
    assert attributes(second) == {
        "messaging.system": "outbox",
        "messaging.destination.name": "crm",
        "messaging.operation.name": "send",
        "messaging.operation.type": "process",
        "messaging.message.id": str(id),
        "outbox.operation": "crm.upsert",
        "outbox.attempt": 1,
        "outbox.result": "delivered",
    }
    assert second.status.status_code == StatusCode.UNSET
    assert attributes(first)["error.type"] == attributes(first)["outbox.result"] == "deferred"
    assert first.status.status_code == StatusCode.ERROR


def test_a_status_lookup_is_a_span_of_its_own(database: Database, tracer: Tracer, spans: InMemorySpanExporter) -> None:
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    put_one(database, ob)
    service = keyless("answer")

    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, trace=trace(tracer))
        age(database, QUIET)

    sent, looked_up = spans.get_finished_spans()
    assert (looked_up.name, looked_up.status.status_code) == ("lookup crm.upsert", StatusCode.UNSET)
    assert [attributes(span)["outbox.result"] for span in (sent, looked_up)] == ["unknown", "found"]
    assert sent.links == ()  # it was enqueued outside any span


def test_the_span_is_current_in_async_and_in_sync_adapters(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    effects = Operations()

    @effects.operation("crm")
    async def send(delivery: Delivery) -> Outcome:
        tracer.start_span("async child").end()
        await asyncio.sleep(0)
        return Delivered()

    @effects.operation("mail")
    def send_mail(delivery: Delivery) -> Outcome:
        tracer.start_span("sync child").end()
        return Delivered()

    put_one(sqlite, ob)
    put_one(sqlite, ob, "mail.send")

    run_once(sqlite, ob, include=[effects], trace=trace(tracer))

    assert parent_of(spans, "async child") == "send crm.upsert"
    assert parent_of(spans, "sync child") == "send mail.send"


def parent_of(spans: InMemorySpanExporter, name: str) -> str | None:
    """The name of the span's parent."""
    (span,) = (span for span in spans.get_finished_spans() if span.name == name)
    by_id = {each.get_span_context().span_id: each.name for each in spans.get_finished_spans()}
    return by_id[span.parent.span_id] if span.parent else None


def test_the_headers_of_a_send_name_its_own_span_as_the_parent(
    database: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    service = MemoryAdapter()
    put_one(database, ob)

    run_once(database, ob, adapters={"crm": service}, trace=trace(tracer))

    _, sent = spans.get_finished_spans()
    context = sent.get_span_context()
    assert [dict(delivery.headers) for delivery in service.deliveries] == [
        {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    ]


def test_without_a_trace_the_headers_of_the_enqueue_go_out(
    database: Database, ob: outbox.Outbox, spans: InMemorySpanExporter
) -> None:
    service = MemoryAdapter()
    put_one(database, ob)

    run_once(database, ob, adapters={"crm": service})

    (enqueued,) = spans.get_finished_spans()
    ((sent,),) = [[delivery.headers["traceparent"].split("-")[2] for delivery in service.deliveries]]
    assert sent == f"{enqueued.get_span_context().span_id:016x}"


# --- callbacks


def settling(settled: Callable[[Any, Any], Any]) -> Operations:
    effects = Operations()
    effects.on_settled("crm.upsert")(settled)
    return effects


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_callback_is_a_span_within_that_of_its_attempt(
    postgresql: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter, kind: str
) -> None:
    async def settled_async(session: Any, settlement: Any) -> None:
        ob.enqueue(session, "mail.send", {})

    def settled(session: Any, settlement: Any) -> None:
        ob.enqueue(session, "mail.send", {})

    id = put_one(postgresql, ob)
    target = postgresql.async_engine() if kind == "async" else postgresql
    effects = settling(settled_async if kind == "async" else settled)

    run_once(target, ob, adapters={"crm": MemoryAdapter()}, include=[effects], trace=trace(tracer))

    (span,) = (span for span in spans.get_finished_spans() if span.name == "callback crm.upsert")
    assert (span.kind, span.status.status_code, span.links) == (SpanKind.INTERNAL, StatusCode.UNSET, ())
    assert attributes(span) == {
        "messaging.system": "outbox",
        "messaging.destination.name": "crm",
        "messaging.message.id": str(id),
        "outbox.operation": "crm.upsert",
        "outbox.result": "settled",
    }
    assert parent_of(spans, "callback crm.upsert") == "send crm.upsert"
    assert parent_of(spans, "enqueue mail.send") == "callback crm.upsert"


def test_a_callback_that_is_called_again_links_to_the_enqueue(
    database: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    calls = iter([RuntimeError("later"), None])

    def settled(session: Any, settlement: Any) -> None:
        if (error := next(calls)) is not None:
            raise error

    put_one(database, ob)
    for _ in range(2):
        run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[settling(settled)], trace=trace(tracer))
        age(database, timedelta(minutes=1))

    enqueued, _, failed, settled_span = spans.get_finished_spans()
    assert [attributes(span)["outbox.result"] for span in (failed, settled_span)] == ["failed", "settled"]
    assert failed.status.status_code == StatusCode.ERROR
    assert settled_span.parent is None
    assert [link.context.span_id for link in settled_span.links] == [enqueued.get_span_context().span_id]


def test_the_span_of_an_attempt_is_forgotten_when_it_has_ended(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer
) -> None:
    put(sqlite, ob, count=5)
    working = dispatcher(sqlite, ob, adapters={"crm": MemoryAdapter()}, trace=trace(tracer))

    asyncio.run(working.run_once())

    assert states(sqlite) == {"delivered": 5}
    assert working._activity.trace is not None
    assert working._activity.trace._contexts == {}


# --- what goes wrong


def test_a_send_that_is_cut_short_ends_its_span(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    class Hanging(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            begun.set()
            await asyncio.Event().wait()
            return Delivered()

    begun = asyncio.Event()
    put_one(sqlite, ob)
    asyncio.run(_abandoned(sqlite, ob, Hanging(), tracer, begun))

    _, span = spans.get_finished_spans()
    assert attributes(span)["outbox.result"] == "cut_short"


async def _abandoned(
    database: Database, ob: outbox.Outbox, adapter: MemoryAdapter, tracer: Tracer, begun: asyncio.Event
) -> None:
    working = dispatcher(database, ob, adapters={"crm": adapter}, trace=trace(tracer))
    running = asyncio.ensure_future(working.run_once())
    await asyncio.wait_for(begun.wait(), 60)
    await working.abandon()
    await running
    await working.close()


def test_each_entry_of_a_batch_has_a_span_and_none_is_current(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    current: list[bool] = []
    sent: list[Delivery] = []

    class Broker(MemoryAdapter):
        async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
            current.append(get_current_span().get_span_context().is_valid)
            sent.extend(deliveries)

            async def answer() -> None:
                answered(1, Delivered())

            await asyncio.create_task(answer())  # a broker's answers arrive in a task of the client
            answered(0, Rejected("no"))
            raise OSError("the connection is lost")

    put(sqlite, ob, count=3)
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        run_once(sqlite, ob, adapters={"crm": Broker()}, trace=trace(tracer))

    *enqueued, first, second, third = spans.get_finished_spans()
    assert [attributes(span)["outbox.result"] for span in (first, second, third)] == [
        "delivered",
        "rejected",
        "unknown",
    ]
    assert len({link.context.span_id for span in (first, second, third) for link in span.links}) == len(enqueued) == 3
    assert [delivery.headers["traceparent"].split("-")[2] for delivery in (sent[1], sent[0], sent[2])] == [
        format(span.get_span_context().span_id, "016x") for span in (first, second, third)
    ]
    assert current == [False]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_batch_that_is_abandoned_cuts_its_spans_short(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    begun = asyncio.Event()

    class Hanging(MemoryAdapter):
        async def send_batch(self, deliveries: Sequence[Delivery], answered: Answered) -> None:
            begun.set()
            await asyncio.Event().wait()

    put(sqlite, ob, count=2)
    asyncio.run(_abandoned(sqlite, ob, Hanging(), tracer, begun))

    *_, first, second = spans.get_finished_spans()
    assert [attributes(span)["outbox.result"] for span in (first, second)] == ["cut_short"] * 2


class Raising:
    """A trace with a defect in one of its functions, or one that makes no spans."""

    def __init__(self, raises_at: str) -> None:
        self._raises_at = raises_at

    def attempt(self, delivery: Delivery, destination: str, is_lookup: bool) -> Any:
        self._raise_at("attempt")
        headers: Any = 7 if self._raises_at == "headers" else {}
        return None if self._raises_at == "no span" else AttemptSpan(end=self._end, headers=headers, context=1)

    def callback(self, entry: Any, context: Any) -> Any:
        self._raise_at("callback")
        return None if self._raises_at == "no span" else self._end

    def _end(self, result: str | None) -> None:
        self._raise_at("end")

    def _raise_at(self, where: str) -> None:
        if where == self._raises_at:
            raise RuntimeError("a defect of the trace")


@pytest.mark.parametrize("raises_at", ["attempt", "headers", "end", "callback", "no span"])
def test_a_trace_that_raises_is_logged_once_and_fails_no_send(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, raises_at: str
) -> None:
    put(sqlite, ob, count=3)
    effects = settling(lambda session, settlement: None)

    with caplog.at_level(logging.ERROR):
        adapters = {"crm": MemoryAdapter()}
        assert run_once(sqlite, ob, adapters=adapters, include=[effects], trace=Raising(raises_at)) == 3

    assert states(sqlite) == {"delivered": 3}
    text = "trace= raised; sending is not affected, and its further errors are not logged"
    assert [record.getMessage() for record in caplog.records] == ([] if raises_at == "no span" else [text])


@pytest.mark.parametrize("given", [lambda delivery, destination, is_lookup: None, "opentelemetry", Raising])
def test_a_trace_must_be_an_object_with_both_functions(ob: outbox.Outbox, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"trace must be an object with attempt\(\) and callback\(\)"):
        dispatcher("sqlite://", ob, adapters={"crm": MemoryAdapter()}, trace=given)
