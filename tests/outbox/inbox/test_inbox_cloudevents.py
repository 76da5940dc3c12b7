"""The inbox with events that the cloudevents package wrote and read, over HTTP's and Kafka's bindings: docs/inbox-recipes.md."""

from typing import Any

import pytest
from cloudevents.core.bindings import http, kafka
from cloudevents.core.v1.event import CloudEvent
from cloudevents.v1.conversion import to_structured
from cloudevents.v1.http import CloudEvent as CloudEventOfRelease1
from cloudevents.v1.http import from_http
from hypothesis import given
from hypothesis import strategies as st
from support.consumer import Billing, Poison
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


def test_an_event_that_comes_over_two_transports_is_handled_once(billing: Billing) -> None:
    billing.handle(identify(http.from_http_event(http.to_structured_event(event()))))
    billing.handle(identify(kafka.from_kafka_event(kafka.to_binary_event(event()))))

    assert billing.orders == billing.duplicates == ["evt_1"]


@pytest.mark.parametrize("changed", [{"id": "evt_2"}, {"source": "/shop/returns"}])
def test_another_id_or_another_source_is_another_event(billing: Billing, changed: dict[str, str]) -> None:
    billing.handle(identify(event()))
    billing.handle(identify(event(**changed)))

    assert len(billing.orders) == 2
    assert billing.duplicates == []


def test_source_and_id_are_distinguished_wherever_their_boundary_is() -> None:
    assert identify(event(source="/a", id="b/c")) != identify(event(source="/a/b", id="c"))


def test_a_poison_event_is_handled_once_when_it_comes_again(billing: Billing) -> None:
    billing.poison = {"evt_1"}
    with pytest.raises(Poison):
        billing.handle(identify(event()))
    assert billing.nothing_is_stored

    billing.poison.clear()
    billing.handle(identify(event()))
    billing.handle(identify(event()))

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_event_in_flight_elsewhere_is_refused(billing: Billing) -> None:
    with billing.elsewhere(identify(event())), pytest.raises(outbox.KeyInFlight):
        billing.handle(identify(event()))

    billing.handle(identify(event()))
    assert billing.orders == billing.duplicates == ["evt_1"]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"id": "evt_1"}, "attribute 'source' None: is missing or empty: the producer must set it"),
        ({"source": "/shop"}, "attribute 'id' None: is missing or empty: the producer must set it"),
    ],
)
def test_an_event_without_source_or_id_is_refused(attributes: dict[str, str], text: str) -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        identify(attributes)

    assert str(caught.value) == text


texts = st.text(min_size=1, max_size=300).filter(lambda text: "\0" not in text)


@given(st.tuples(texts, texts), st.tuples(texts, texts))
def test_two_senders_or_sources_never_meet_however_they_are_named(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    def scope(sender: str, source: str) -> str:
        return identify({"id": "evt_1", "source": source}, sender)["scope"]

    assert (scope(*first) == scope(*second)) == (first == second)


def test_a_sender_cannot_use_up_the_ids_of_another(billing: Billing) -> None:
    billing.handle(identify(event(), sender="partner-1"))
    billing.handle(identify(event(), sender="partner-2"))

    assert billing.orders == ["evt_1"] * 2


@pytest.mark.parametrize("length", [243, 244, 5000])
def test_a_source_of_any_length_is_handled_once(billing: Billing, length: int) -> None:
    for source in ("/" * length, "/" * length, "/" * (length - 1) + "é"):
        billing.handle(identify(event(source=source)))

    assert billing.orders == ["evt_1"] * 2
    assert billing.duplicates == ["evt_1"]


def test_an_event_of_no_sender_is_refused() -> None:
    with pytest.raises(outbox.InvalidValue) as caught:
        identify(ATTRIBUTES, sender="")

    assert str(caught.value) == (
        "sender '': must be a str that is not empty: who sent the event, as authenticated, or one name for all senders that"
        " trust each other"
    )
