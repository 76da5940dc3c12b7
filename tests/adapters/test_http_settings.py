"""HttpAdapter's settings: which are refused at the start, and what they declare to a dispatcher."""

from datetime import timedelta
from typing import Any

import pytest

from dispatchers import FOREVER, Dispatcher, KeyFormat
from dispatchers.adapters import HttpAdapter
from dispatchers.time_limits import RetryPolicy
from outbox import Outbox
from outbox.errors import ConfigurationError

ONE_OF = (
    "HttpAdapter needs either base_url='https://...' or origins=['https://...'], and not both. With base_url, the urls"
    " of payloads are paths below it. With origins, they are absolute urls to one of these origins"
)
NO_URL = "must be http:// or https:// and a host, percent-encoded (it is not shown)"
ADA = "https://ada:s3cret@crm.test"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, ONE_OF),
        ({"base_url": "https://a.test", "origins": ["https://a.test"]}, ONE_OF),
        ({"base_url": ""}, f"base_url {NO_URL}"),
        ({"base_url": "crm.test/s3cret"}, f"base_url {NO_URL}"),
        ({"base_url": "ftp://crm.test"}, f"base_url {NO_URL}"),
        ({"base_url": "https://crm.test:99999"}, f"base_url {NO_URL}"),
        ({"base_url": "https://crm..test"}, f"base_url {NO_URL}"),
        ({"base_url": "https://crm.test/a b"}, f"base_url {NO_URL}"),
        ({"base_url": 7}, f"base_url {NO_URL}"),
        ({"base_url": ADA}, "base_url must hold no credentials: give them as headers={'Authorization': ...}"),
        ({"base_url": "https://crm.test/?a=1"}, "base_url must have no query, and no '.' or '..' between its slashes"),
        ({"base_url": "https://crm.test/../a"}, "base_url must have no query, and no '.' or '..' between its slashes"),
        ({"origins": "https://crm.test"}, f"origins {NO_URL}"),
        ({"origins": [ADA]}, "origins must hold no credentials: give them as headers={'Authorization': ...}"),
        (
            {"origins": ["https://crm.test/v2"]},
            "origins: each is a scheme and a host, such as 'https://crm.example.com', without a path",
        ),
        (
            {"base_url": "https://a.test", "headers": {"Authorization": "s3cret\n"}},
            "headers: the value of 'Authorization' must be printable ASCII, and must not begin or end with a space",
        ),
        (
            {"base_url": "https://a.test", "headers": {"idempotency-key": "s3cret"}},
            "headers must not set 'idempotency-key': only the adapter sets this header",
        ),
        (
            {"base_url": "https://a.test", "key_header": "Authorization"},
            "key_header must not set 'Authorization': only the adapter sets this header",
        ),
        (
            {"base_url": "https://a.test", "key_header": "a b"},
            "key_header: a header's name must consist of letters, digits and -, without spaces",
        ),
        (
            {"base_url": "https://a.test", "key_header": None, "window": timedelta(days=7)},
            "window=datetime.timedelta(days=7) needs a key_header: without one the service remembers no key",
        ),
    ],
)
def test_settings_that_can_send_nothing_are_refused_without_the_secret(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        HttpAdapter(**settings)

    assert str(refusal.value) == text


def test_of_a_service_nothing_is_taken_for_granted() -> None:
    crm = HttpAdapter(base_url="https://crm.test")

    assert (crm.window, crm.at_least_once, crm.replays_errors, crm.pinned) == (None, False, "none", "")


def test_where_a_key_is_remembered_is_pinned_and_nothing_secret_of_it() -> None:
    crm = HttpAdapter(base_url="https://crm.test:8443/s3cret", window=FOREVER, pinned="account 7")

    assert crm.pinned == "https://crm.test:8443 key in Idempotency-Key account 7"
    assert repr(crm) == "HttpAdapter(https://crm.test:8443 key in Idempotency-Key, window=<Forever.FOREVER: 'forever'>)"


def test_a_dispatcher_takes_it_with_every_declaration(ob: Outbox) -> None:
    crm = HttpAdapter(
        origins=["https://a.test", "https://b.test"],
        window=timedelta(days=7),
        timeout=timedelta(seconds=10),
        key_format=KeyFormat(encoding="hex", max_chars=64),
        replays_errors="2xx",
        retry=RetryPolicy(max_attempts=3),
    )

    Dispatcher("sqlite://", adapters={"crm": crm}, outbox=ob)

    assert (crm.retry, crm.timeout) == (RetryPolicy(max_attempts=3), timedelta(seconds=10))
    assert (crm.key_format.encoding, crm.replays_errors) == ("hex", "2xx")
