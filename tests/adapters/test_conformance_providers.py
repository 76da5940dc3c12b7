"""Every profile in the suite for profiles, with its generated fake."""

from datetime import date, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatchers.adapters.providers import PROVIDERS, Profile
from dispatchers.adapters.providers.auth import basic, bearer, in_header
from dispatchers.adapters.providers.key_places import (
    BodyField,
    GraphQLArgument,
    Header,
    Mark,
    NaturalKey,
    NoKey,
    QueryField,
)
from dispatchers.adapters.providers.operations import Patch, Post, Put
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.delivery import KeyFormat
from dispatchers.testing.conformance_providers import Offer, ProviderSuite, stated_by
from dispatchers.testing.service_faults import ServiceFault
from dispatchers.time_limits import FOREVER


class TestProviders(ProviderSuite):
    profiles = tuple(PROVIDERS.values())


# --- random profiles

DAY = timedelta(days=1)
FORMS = st.sampled_from(
    [
        KeyFormat(),
        KeyFormat(max_chars=36),
        KeyFormat(encoding="uuid", max_chars=36),
        KeyFormat(encoding="uuid", uuid_version=4, alphabet="[0-9a-f-]"),
        KeyFormat(encoding="hex", max_chars=64, alphabet="[0-9a-f]"),
    ]
)
PLACES = st.one_of(
    st.builds(Header, st.sampled_from(["Idempotency-Key", "X-Request-Id"]), FORMS),
    st.builds(BodyField, st.sampled_from(["idempotency_key", "options.key"]), FORMS),
    st.builds(QueryField, st.just("key"), FORMS),
    st.builds(GraphQLArgument, st.just("input.key"), FORMS, used_as=st.just("(input: $input)")),
    st.builds(NaturalKey, st.just("the external id")),
    st.builds(NoKey, mark=st.sampled_from([None, Mark("meta.key"), Mark("tags[]", {"name": "key", "value": "{key}"})])),
)
SIGNALS = st.sampled_from([409, 422]).flatmap(
    lambda status: st.one_of(st.none(), st.just(Signal(status, body={"error": {"code": "it"}})))
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any profile that is valid: each place, window, store and comparison."""
    place = draw(PLACES)
    is_keyed = not isinstance(place, NoKey | NaturalKey)
    stores: Any = draw(st.sampled_from(["all", "2xx", "success", "current_state", "duplicate_refused"]))
    stores = stores if is_keyed else "nothing"
    duplicate = Duplicate(
        Signal(418, body={"code": "done"}), draw(st.sampled_from([None, "links.id"])), after_errors=draw(st.booleans())
    )
    in_flight = draw(SIGNALS)
    return Profile(
        name="any",
        title="Any",
        as_of=date(2026, 11, 1),
        sources=("https://any.example.com",),
        base_url=draw(st.sampled_from(["https://any.example.com", "https://{shop}.any.example.com/v1/{shop}"])),
        auth=draw(st.sampled_from([bearer(), basic("{user}", "{password}"), in_header("X-Api-Key")])),
        key=place,
        window=draw(st.sampled_from([timedelta(minutes=10), DAY, 30 * DAY, FOREVER, None])) if is_keyed else None,
        window_from=draw(st.sampled_from(["first_attempt", "first_finished"])),
        stores=stores,
        compares=draw(st.sampled_from(["parameters", "body", "nothing", "unknown"])),
        scope=draw(st.sampled_from(["account", "api_key", "region", "endpoint", "unknown"])),
        in_flight=in_flight,
        mismatch=None if in_flight is not None else draw(SIGNALS),
        duplicate=duplicate if stores == "duplicate_refused" else None,
        operations={
            "things.create": draw(st.sampled_from([Post, Put]))("/things"),
            "things.change": Patch("/things/{thing}", success=204),
        },
        result=draw(st.sampled_from([(), ("id",), ("data[].id", "data[].state.name")])),
    )


EVERY = sorted(name for name in vars(ProviderSuite) if name.startswith("test_"))


@given(profiles(), st.sampled_from(["things.create", "things.change"]), st.data())
@settings(deadline=None)
def test_the_suite_holds_for_any_valid_profile(profile: Profile, name: str, data: st.DataObject) -> None:
    suite, offer = ProviderSuite(), Offer(profile, name)

    for each in data.draw(st.lists(st.sampled_from(EVERY), min_size=2, max_size=3, unique=True)):
        test = getattr(suite, each)
        if each == "test_an_answer_has_the_meaning_that_is_stated":
            for stated in stated_by(profile):
                test(stated)
        elif each == "test_a_lost_answer_is_one_effect":
            test(offer, fault=ServiceFault.LOSE_RESPONSE)
        else:
            test(offer)
