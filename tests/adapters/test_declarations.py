"""An adapter's declarations: their defaults, and those that are refused before anything is sent."""

import inspect
from datetime import timedelta
from typing import Any

import pytest
from support.routing import DEFAULTS, LEASE, MARGIN, SECOND, Sender, routes_of

import dispatchers.adapters
from dispatchers.delivery import Adapter, Delivered, Delivery, KeyFormat, Outcome
from dispatchers.pipeline.routing import check_adapter
from dispatchers.time_limits import FOREVER, RetryPolicy
from outbox.errors import ConfigurationError

INSTANT = timedelta(microseconds=1)


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_adapter_has_the_documented_default(name: str) -> None:
    assert getattr(Adapter, name) == DEFAULTS[name]


@pytest.mark.parametrize("name", dispatchers.adapters.__all__)
def test_every_setting_of_an_adapter_is_given_by_its_name(name: str) -> None:
    parameters = inspect.signature(getattr(dispatchers.adapters, name)).parameters.values()

    by_place = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]

    assert by_place == {"MemoryAdapter": ["answer"], "AwsAdapter": ["service", "operation"]}.get(name, [])


def check(adapter: Any) -> None:
    check_adapter("mail", adapter, lease=LEASE, margin=MARGIN)


@pytest.mark.parametrize("encoding", ["native", "uuid", "hex"])
@pytest.mark.parametrize("window", [None, FOREVER, timedelta(days=1)], ids=["no keys", "forever", "a day"])
def test_a_declaration_that_can_be_kept_is_taken(window: Any, encoding: Any) -> None:
    check(Sender(window=window, key_format=KeyFormat(encoding=encoding)))


def test_what_is_refused_names_the_operation_and_the_adapter() -> None:
    with pytest.raises(ConfigurationError, match=r"^the adapter of 'mail' \(Sender\): "):
        check(Sender(timeout=0 * SECOND))


@pytest.mark.parametrize(
    "timeout",
    [0 * SECOND, -SECOND],
    ids=str,
)
def test_a_timeout_that_allows_nothing_is_refused(timeout: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="its timeout must be a positive timedelta, not"):
        check(Sender(timeout=timeout))


@pytest.mark.parametrize(
    "limit",
    [
        *({"max_age": 0 * SECOND}, {"max_age": -SECOND}, {"max_age": 86_400.0}),
        *({"max_attempts": 0}, {"max_attempts": None}, {"max_attempts": 2.5}),
    ],
    ids=str,
)
def test_a_retry_policy_that_allows_nothing_is_refused(limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a positive timedelta$|must be an int of at least 1$"):
        RetryPolicy(**limit)


def test_a_timeout_that_could_outlive_the_lease_is_refused() -> None:
    check(Sender(timeout=LEASE - MARGIN - INSTANT))

    with pytest.raises(ConfigurationError, match="do not fit into the lease") as refused:
        check(Sender(timeout=LEASE - MARGIN))

    assert "its timeout 0:00:55 and the margin 0:00:05 do not fit into the lease 0:01:00" in str(refused.value)
    assert "shorten the timeout or give Dispatcher(lease=...)" in str(refused.value)


@pytest.mark.parametrize("window", [LEASE + 30 * SECOND + MARGIN, SECOND, 0 * SECOND, -SECOND], ids=str)
def test_a_window_too_short_for_a_second_attempt_is_refused(window: timedelta) -> None:
    check(Sender(window=LEASE + 30 * SECOND + MARGIN + INSTANT))

    with pytest.raises(ConfigurationError, match="is not longer than lease, timeout and margin together") as refused:
        check(Sender(window=window))

    assert f"its window {window} is not longer than lease, timeout and margin together (0:01:35)" in str(refused.value)
    assert "the service may forget a key before a second attempt" in str(refused.value)


@pytest.mark.parametrize(
    ("key_format", "problem"),
    [
        (KeyFormat(encoding="hex", max_chars=36), "hex keys have 64 characters, the service takes 36"),
        (KeyFormat(encoding="hex", max_chars=45), "hex keys have 64 characters, the service takes 45"),
        (KeyFormat(encoding="native", max_chars=35), "native keys have 36 characters, the service takes 35"),
        (KeyFormat(encoding="uuid", max_chars=32), "uuid keys have 36 characters, the service takes 32"),
        (KeyFormat(alphabet="[A-Za-z0-9]"), "native keys contain '-_', the service takes [A-Za-z0-9]"),
        (KeyFormat(alphabet="[A-Za-z0-9-]"), "native keys contain '_', the service takes [A-Za-z0-9-]"),
        (KeyFormat(encoding="uuid", alphabet="[a-f0-9]"), "uuid keys contain '-', the service takes [a-f0-9]"),
        (KeyFormat(encoding="hex", alphabet="[A-F0-9]"), "hex keys contain 'abcdef', the service takes [A-F0-9]"),
    ],
    ids=str,
)
def test_a_key_that_the_service_would_not_take_is_refused(key_format: KeyFormat, problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check(Sender(key_format=key_format))

    assert str(refused.value).endswith(f"no child key fits its key format: {problem}")


@pytest.mark.parametrize(
    "key_format",
    [
        KeyFormat(max_chars=36),  # as Razorpay's payouts take them
        KeyFormat(encoding="uuid", max_chars=36, alphabet="[a-f0-9-]"),
        KeyFormat(max_chars=45),  # as Square takes them
        KeyFormat(encoding="hex", max_chars=64, alphabet="[a-f0-9]"),
    ],
    ids=str,
)
def test_a_key_that_just_fits_is_taken(key_format: KeyFormat) -> None:
    check(Sender(key_format=key_format))


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"encoding": "x"}, "encoding='x' must be one of 'native', 'uuid', 'hex'"),
        ({"encoding": ["hex"]}, "encoding=['hex'] must be one of 'native', 'uuid', 'hex'"),
        ({"max_chars": "36"}, "max_chars='36' must be an int of at least 1"),
        ({"max_chars": 0}, "max_chars=0 must be an int of at least 1"),
        ({"uuid_version": 7}, "uuid_version=7 must be one of 4, 5, 8"),
        ({"alphabet": "[a-"}, "alphabet='[a-' must be a regular expression: unterminated character set at position 0"),
        ({"alphabet": 5}, "alphabet=5 must be a regular expression: first argument must be string or compiled pattern"),
    ],
)
def test_a_key_format_that_there_is_not_is_refused(declared: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        KeyFormat(**declared)

    assert str(refused.value) == text


def test_the_name_of_an_encoding_is_no_key_format() -> None:
    with pytest.raises(ConfigurationError) as refused:
        check(Sender(key_format="uuid"))

    assert str(refused.value).endswith(": its key_format must be a KeyFormat(encoding=...), not 'uuid'")


def test_a_pin_that_the_column_could_not_hold_is_refused() -> None:
    check(Sender(pinned="p" * 240))

    with pytest.raises(ConfigurationError, match="`pinned` and the key format together are longer than 255 characters"):
        check(Sender(pinned="p" * 250))


def test_an_adapter_without_send_is_refused() -> None:
    class Silent:
        """Has the attributes, and sends nothing."""

    with pytest.raises(ConfigurationError, match=r"has no send\(delivery\)"):
        check(Silent())


def test_a_class_is_no_adapter() -> None:
    with pytest.raises(ConfigurationError) as refused:
        routes_of({"crm": Sender})  # type: ignore[dict-item]

    assert str(refused.value) == "the adapter of 'crm' is the class Sender: give an instance of it"


def test_an_adapter_that_inherits_everything_and_forgets_send_is_refused() -> None:
    """`Adapter.send` is only a shape: it would answer None to every delivery, and leave every entry in doubt."""

    class Misspelt(Adapter):
        async def sent(self, delivery: Delivery) -> Outcome:
            return Delivered()

    with pytest.raises(ConfigurationError, match=r"has no send\(delivery\)"):
        check(Misspelt())  # type: ignore[abstract]


@pytest.mark.parametrize(
    "declared",
    [
        {"window": 86_400},
        {"timeout": 30},
        {"retry": 5},
        {"retry": {"max_attempts": 5}},
        {"at_least_once": "no"},
        {"failure_blocks_group": 0},
    ],
    ids=lambda declared: next(iter(declared)),
)
def test_a_declaration_of_the_wrong_type_is_refused_at_the_start(declared: dict[str, Any]) -> None:
    """Found later, it would be an error after the send: no outcome, a lease that runs out, and so on without end."""
    with pytest.raises(ConfigurationError):
        check(Sender(**declared))


@pytest.mark.parametrize(
    "adapters", [{"mail": Sender(timeout=LEASE)}, {"mail": Sender(), "stripe": Sender(window=SECOND)}]
)
def test_every_adapter_is_checked_when_the_routes_are_made(adapters: dict[str, Adapter]) -> None:
    with pytest.raises(ConfigurationError):
        routes_of(adapters)
