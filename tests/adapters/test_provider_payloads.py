"""What a profile accepts at the enqueue can be sent, and what it refuses is never sent: for any JSON and every operation."""

import json
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatchers import Delivery
from dispatchers.adapters.http.request import Malformed
from dispatchers.adapters.providers import PROVIDERS
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.conformance_providers import GIVEN_WINDOW, Offer
from outbox.errors import InvalidValue

OFFERS = [Offer(profile, name) for profile in PROVIDERS.values() for name in profile.operations]
UNPUBLISHED = {each.profile.name for each in OFFERS if each.has_key and each.profile.window_of(each.operation) is None}
QUERIES = ["mutation M($input: I!) { m(input: $input) }", "mutation($key: String!) { m @idempotent(key: $key) { a } }"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["id/ü", "..", *QUERIES]),
)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[Offer, Any]:
    """An operation, and JSON that has the names of its ids and of its key here and there."""
    offer = draw(st.sampled_from(OFFERS))
    path = getattr(offer.profile.place_of(offer.operation), "path", "a")
    names = st.sampled_from(["a", "query", "variables", *path.split("."), *offer.profile.ids_of(offer.operation)])
    inner = st.recursive(
        LEAVES,
        lambda each: st.one_of(st.lists(each, max_size=2), st.dictionaries(names, each, max_size=4)),
        max_leaves=8,
    )
    return offer, draw(st.one_of(st.dictionaries(names, inner, max_size=6), inner))


@given(payloads())
@settings(deadline=None)
def test_what_the_enqueue_accepts_can_be_sent(drawn: tuple[Offer, Any]) -> None:
    offer, payload = drawn
    delivery = Delivery(ENTRY, str(offer), json.dumps(payload).encode(), "ck1_a", 1, {}, {}, 0.0)

    assert accepts(offer, payload) == is_made(adapter_of(offer.profile.name), delivery)


@cache
def adapter_of(name: str) -> Any:
    profile = PROVIDERS[name]
    window = {"window": GIVEN_WINDOW} if name in UNPUBLISHED else {}
    return profile(**dict.fromkeys(profile.settings(), "fake_setting"), **window)


def accepts(offer: Offer, payload: Any) -> bool:
    try:
        offer.profile.check(offer.name, payload)
    except InvalidValue:
        return False
    return True


def is_made(adapter: Any, delivery: Delivery) -> bool:
    try:
        return adapter._request(delivery) is not None
    except Malformed:
        return False
