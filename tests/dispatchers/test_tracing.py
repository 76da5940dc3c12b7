"""A span for each send and status lookup, which links to that of the enqueue; the databases are real."""

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
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
from dispatchers import Deferred, Delivered, Delivery, Operations, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.telemetry.opentelemetry import trace
from outbox.errors import ConfigurationError
from outbox.metrics.opentelemetry import trace_headers


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", trace_headers=trace_headers)


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
    with tracer.start_as_current_span("request") as request:
        id = put_one(database, ob)

    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, trace=trace(tracer))
        age(database, timedelta(hours=2))

    first, second = [span for span in spans.get_finished_spans() if span.name != "request"]
    for span in (first, second):
        assert (span.name, span.kind, span.parent) == ("send crm.upsert", SpanKind.CONSUMER, None)
        (link,) = span.links
        assert (link.context.trace_id, link.context.span_id) == (
            request.get_span_context().trace_id,
            request.get_span_context().span_id,
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


def test_a_status_lookup_is_a_span_of_its_own(
    database: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    put_one(database, ob)
    service = keyless("answer")

    for _ in range(2):
        run_once(database, ob, adapters={"crm": service}, trace=trace(tracer))
        age(database, QUIET)

    sent, looked_up = spans.get_finished_spans()
    assert (looked_up.name, looked_up.status.status_code) == ("lookup crm.upsert", StatusCode.UNSET)
    assert [attributes(span)["outbox.result"] for span in (sent, looked_up)] == ["unknown", "found"]
    assert sent.links == ()  # it was enqueued outside any span


def test_the_span_is_current_in_async_and_in_sync_adapters_and_not_after(
    sqlite: Database, ob: outbox.Outbox, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    effects, after = Operations(), list[bool]()

    @effects.operation("crm")
    async def send(delivery: Delivery) -> Outcome:
        tracer.start_span("async child").end()
        await asyncio.sleep(0)
        return Delivered()

    @effects.operation("mail")
    def send_mail(delivery: Delivery) -> Outcome:
        tracer.start_span("sync child").end()
        return Delivered()

    @effects.on_settled("crm.upsert")
    def settled(session: Any, settlement: Any) -> None:
        after.append(get_current_span().get_span_context().is_valid)

    put_one(sqlite, ob)
    put_one(sqlite, ob, "mail.send")

    run_once(sqlite, ob, include=[effects], trace=trace(tracer))

    by_name = {span.name: span for span in spans.get_finished_spans()}
    for child, parent in (("async child", "send crm.upsert"), ("sync child", "send mail.send")):
        found = by_name[child].parent
        assert found is not None
        assert found.span_id == by_name[parent].get_span_context().span_id
    assert after == [False]


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

    async def main() -> None:
        working = dispatcher(sqlite, ob, adapters={"crm": Hanging()}, trace=trace(tracer))
        running = asyncio.ensure_future(working.run_once())
        await asyncio.wait_for(begun.wait(), 20)
        await working.abandon()
        await running
        await working.close()

    asyncio.run(main())

    (span,) = spans.get_finished_spans()
    assert attributes(span)["outbox.result"] == "cut_short"


@pytest.mark.parametrize("raises_at", ["begin", "end", "no function"])
def test_a_trace_that_raises_is_logged_once_and_fails_no_send(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture, raises_at: str
) -> None:
    def end(result: str | None) -> None:
        raise RuntimeError("a defect of the trace")

    def begin(delivery: Delivery, destination: str, is_lookup: bool) -> Any:
        if raises_at == "begin":
            raise RuntimeError("a defect of the trace")
        return end if raises_at == "end" else None

    put(sqlite, ob, count=3)

    with caplog.at_level(logging.ERROR):
        assert run_once(sqlite, ob, adapters={"crm": MemoryAdapter()}, trace=begin) == 3

    assert states(sqlite) == {"delivered": 3}
    text = "trace= raised; sending is not affected, and its further errors are not logged"
    assert [record.getMessage() for record in caplog.records] == ([] if raises_at == "no function" else [text])


async def _begin(delivery: Delivery, destination: str, is_lookup: bool) -> None: ...


@pytest.mark.parametrize("given", [_begin, "opentelemetry"])
def test_a_trace_must_be_a_plain_function(ob: outbox.Outbox, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="trace must be a plain function"):
        dispatcher("sqlite://", ob, adapters={"crm": MemoryAdapter()}, trace=given)
