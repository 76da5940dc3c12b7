"""The trace context of an enqueue is stored with its entry, and never fails it."""

import json
import logging
from functools import partial

import pytest
from opentelemetry import baggage
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from support.database import REQUEST

import outbox
from outbox.errors import ConfigurationError
from outbox.metrics.opentelemetry import trace_headers

KEYRING = outbox.Keyring({"k1": bytes(range(32))})
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def tracing(read):
    return outbox.Outbox(KEYRING, env="test", trace_headers=read)


def stored(database):
    return [json.loads(row.headers) for row in database.entries]


def test_each_enqueue_is_a_span_whose_context_is_stored_without_baggage(database):
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")
    ob = tracing(partial(trace_headers, tracer=tracer))
    token = attach(baggage.set_baggage("customer", "ada"))

    with tracer.start_as_current_span("request") as request, database.begin() as session:
        first = ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        ob.enqueue(session, "crm.upsert", {}, parent="order:2", ordering_key="ada", destination="crm:eu")
    detach(token)

    made = spans.get_finished_spans()[:2]
    assert {json.loads(row.headers)["traceparent"] for row in database.entries} == {w3c(span) for span in made}
    assert [set(headers) for headers in stored(database)] == [{"traceparent"}] * 2
    assert {(span.name, span.kind) for span in made} == {("enqueue crm.upsert", SpanKind.PRODUCER)}
    assert {span.parent.span_id for span in made} == {request.get_span_context().span_id}
    assert dict(made[0].attributes) == {
        "messaging.system": "outbox",
        "messaging.destination.name": "crm",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
        "messaging.message.id": str(first.id),
        "outbox.operation": "crm.upsert",
    }
    assert made[1].attributes["messaging.destination.name"] == "crm:eu"


def w3c(span):
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_without_a_provider_the_context_of_the_current_span_is_stored(sqlite):
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span, sqlite.begin() as session:
        tracing(trace_headers).enqueue(session, "crm.upsert", {}, parent="order:1")

    assert stored(sqlite) == [{"traceparent": w3c(span)}]


def test_entries_of_one_transaction_keep_each_its_own_context(database):
    contexts = iter([{"traceparent": PARENT}, {}, {"traceparent": PARENT, "tracestate": "a=1"}])
    ob = tracing(lambda entry: next(contexts))

    with database.begin() as session:
        ids = [ob.enqueue(session, "crm.upsert", {}, parent=f"order:{n}").id for n in range(3)]

    by_id = {row.id: json.loads(row.headers) for row in database.entries}
    assert [by_id[id] for id in ids] == [{"traceparent": PARENT}, {}, {"traceparent": PARENT, "tracestate": "a=1"}]


def test_entries_of_a_request_store_the_context_too(database):
    ob = tracing(lambda entry: {"traceparent": PARENT})

    with database.begin() as session, ob.idempotent(session, "k", scope="ada", content=REQUEST) as claim:
        ob.enqueue(session, "crm.upsert", {})
        claim.respond(201, {})

    assert stored(database) == [{"traceparent": PARENT}]


def test_without_a_span_or_a_setting_no_headers_are_stored(database, ob):
    for each in (ob, tracing(trace_headers)):
        with database.begin() as session:
            each.enqueue(session, "crm.upsert", {}, parent=f"order:{id(each)}")

    assert stored(database) == [{}, {}]


@pytest.mark.parametrize(
    "headers",
    [
        {"baggage": "customer=ada", "authorization": "secret"},
        {"traceparent": "a\nb", "tracestate": "ä"},
        {"traceparent": 7, "tracestate": ""},
        {"tracestate": "x" * 513},
    ],
)
def test_what_is_no_trace_context_is_left_out(sqlite, headers):
    with sqlite.begin() as session:
        tracing(lambda entry: headers).enqueue(session, "crm.upsert", {}, parent="order:1")

    assert stored(sqlite) == [{}]


def test_a_function_that_raises_fails_no_enqueue_and_is_logged_once(sqlite, caplog):
    def read(entry):
        raise RuntimeError("a defect")

    ob = tracing(read)

    with caplog.at_level(logging.ERROR), sqlite.begin() as session:
        for number in range(3):
            ob.enqueue(session, "crm.upsert", {}, parent=f"order:{number}")

    assert stored(sqlite) == [{}, {}, {}]
    assert [record.getMessage() for record in caplog.records] == [
        "trace_headers= raised; enqueues are not affected, and its further errors are not logged"
    ]


async def _headers(entry): ...


@pytest.mark.parametrize("read", [_headers, {"traceparent": PARENT}])
def test_trace_headers_must_be_a_plain_function(read):
    with pytest.raises(ConfigurationError, match="trace_headers must be a plain function"):
        tracing(read)
