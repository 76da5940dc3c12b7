"""The inbox with events that the cloudevents package wrote and read, over HTTP's and Kafka's bindings: docs/inbox-recipes.md."""

from typing import Any

import pytest
from cloudevents.core.bindings import http, kafka
from cloudevents.core.v1.event import CloudEvent
from cloudevents.v1.conversion import to_structured
from cloudevents.v1.http import CloudEvent as CloudEventOfRelease1
from cloudevents.v1.http import from_http
from hypothesis import example, given
from hypothesis import strategies as st
from support.consumer import Billing
from support.database import Database

import outbox
from outbox import inboxes
from outbox.inboxes import MessageIdentity

pytestmark = pytest.mark.as_app

ATTRIBUTES = {"id": "evt_1", "source": "/shop/orders", "type": "test.order.placed"}
IDENTITY = {"scope": "cloudevents:shop:/shop/orders", "message_id": "evt_1"}


def event(**changed: str) -> CloudEvent:
    return CloudEvent(ATTRIBUTES | {"datacontenttype": "application/json"} | changed, {"amount": 2000})


def identify(received: Any, sender: str = "shop") -> MessageIdentity:
    return inboxes.from_cloudevents(received, sender=sender)


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


def test_an_event_is_the_same_in_every_encoding_and_over_every_transport() -> None:
    """Redelivered over another transport, it would otherwise be handled twice."""
    sent = event()
    release_1 = CloudEventOfRelease1(ATTRIBUTES, {"amount": 2000})

    received = [
        http.from_http_event(http.to_binary_event(sent)),
        http.from_http_event(http.to_structured_event(sent)),
        kafka.from_kafka_event(kafka.to_binary_event(sent)),
        kafka.from_kafka_event(kafka.to_structured_event(sent)),
        from_http(*to_structured(release_1)),
        ATTRIBUTES,
    ]

    assert [identify(each) for each in received] == [IDENTITY] * len(received)


def test_source_and_id_are_distinguished_wherever_their_boundary_is() -> None:
    assert identify(event(source="/a", id="b/c")) != identify(event(source="/a/b", id="c"))


texts = st.text(":%a", min_size=1, max_size=3) | st.text(min_size=1, max_size=300).filter(lambda text: "\0" not in text)


@given(st.tuples(texts, texts), st.tuples(texts, texts))
@example(("a:b", "c"), ("a", "b:c"))
def test_two_senders_or_sources_never_meet_however_they_are_named(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    def scope(sender: str, source: str) -> str:
        return identify({"id": "evt_1", "source": source}, sender)["scope"]

    assert (scope(*first) == scope(*second)) == (first == second)


@pytest.mark.parametrize("length", [238, 239, 5000])
def test_a_source_of_any_length_is_handled_once(billing: Billing, length: int) -> None:
    for source in ("/" * length, "/" * length, "/" * (length - 1) + "é"):
        billing.handle(identify(event(source=source)))

    assert billing.orders == ["evt_1"] * 2
    assert billing.duplicates == ["evt_1"]
