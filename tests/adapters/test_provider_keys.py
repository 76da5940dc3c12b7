"""The key of a profile's operation reaches the service, or the profile or the payload is refused."""

from datetime import date

import pytest

from dispatchers.adapters.providers import GraphQLArgument, Mark, NoKey, Post, Profile, twilio
from outbox.errors import ConfigurationError


def test_a_mark_that_a_form_has_no_place_for_is_refused() -> None:
    """It would be Python's text of an object, which no search finds."""
    with pytest.raises(ConfigurationError, match="no nested members"):
        Profile(
            name="pay",
            title="Pay",
            as_of=date(2026, 11, 1),
            sources=("https://pay.example.com/docs",),
            base_url="https://pay.example.com",
            key=NoKey(mark=Mark("tags[]", {"name": "key", "value": "{key}"})),
            stores="nothing",
            operations={"pay": Post("/pay", content="form")},
        )


@pytest.mark.parametrize(
    "query",
    [
        "mutation M($input: I!) { pay(input: {}) { id } } # (input: $input)",
        'mutation M($input: I!) { pay(note: "(input: $input)") { id } }',
        'mutation M($input: I!) { pay(note: """say "(input: $input)" \\""" """) { id } }',
    ],
)
def test_a_query_that_only_mentions_the_key_is_refused(query: str) -> None:
    place = GraphQLArgument("input.key", used_as="(input: $input)")

    assert not place.is_read_by(query)
    assert place.is_read_by(query + '\n{ pay(note: "", x: "#") pay(input: $input) }')


def test_a_tuple_is_a_list_for_the_check_at_the_enqueue() -> None:
    """As the enqueue writes it."""
    twilio.check("messages.create", {"To": "+1", "MediaUrl": ("https://a.test", "https://b.test")})
