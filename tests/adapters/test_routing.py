"""Routes and Operations: who serves what, and the declarations that are refused before anything is sent."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from dispatchers.delivery import NATIVE, Adapter, Delivered, Delivery, KeyFormat, Outcome
from dispatchers.operations import Operations
from dispatchers.pipeline.routing import Routes, check_adapter, merge
from dispatchers.time_limits import FOREVER
from outbox.errors import ConfigurationError, InvalidValue

SECOND = timedelta(seconds=1)
LEASE, MARGIN = 60 * SECOND, 5 * SECOND
INSTANT = timedelta(microseconds=1)

DEFAULTS: dict[str, Any] = {
    "window": None,
    "timeout": 30 * SECOND,
    "key_format": NATIVE,
    "replays_errors": "none",
    "at_least_once": False,
    "attempts_max": 20,
    "age_max": timedelta(days=3),
    "pinned": "",
}
"""What docs/states.md says of a declaration that is left out."""


class Sender(Adapter):
    """An adapter that declares what the test gives it and delivers."""

    def __init__(self, **declared: Any) -> None:
        for name, value in declared.items():
            setattr(self, name, value)

    async def send(self, delivery: Delivery) -> Outcome:
        return Delivered(delivery.operation)


class OnlyCharges(Sender):
    def serves(self, operation: str) -> bool:
        return operation.endswith(".charges.create")


def routes(**adapters: Adapter) -> Routes:
    """Written with `__` for the dots."""
    return routes_of({name.replace("__", "."): adapter for name, adapter in adapters.items()})


def routes_of(adapters: Mapping[str, Adapter]) -> Routes:
    return Routes(adapters, lease=LEASE, margin=MARGIN)


def delivery(operation: str = "mail.send") -> Delivery:
    return Delivery(
        id=UUID(int=1), operation=operation, body=b"{}", key="ck1_a", attempt=1, options={}, headers={}, deadline=0.0
    )


# --- which adapter serves an operation


@pytest.mark.parametrize(
    ("operation", "served_by"),
    [
        ("stripe", "stripe"),
        ("stripe.charges.create", "stripe"),
        ("stripe.refunds", "stripe.refunds"),
        ("stripe.refunds.create", "stripe.refunds"),
        ("stripe.refunds_x.create", "stripe"),
        ("stripe_x", "stripe_x"),
        ("stripe_x.refunds.create", "stripe_x"),
        ("stripe_y.refunds", None),
        ("strip", None),
        ("refunds", None),
        ("x.stripe", None),
    ],
)
def test_the_longest_dotted_prefix_wins(operation: str, served_by: str | None) -> None:
    routing = routes(stripe=Sender(), stripe__refunds=Sender(), stripe_x=Sender())

    found = routing.find(operation)

    assert (found and found.name) == served_by


def test_an_operation_that_its_adapter_does_not_serve_is_unserved() -> None:
    routing = routes(stripe=OnlyCharges())

    assert routing.find("stripe.charges.create") is not None
    assert routing.find("stripe.refunds.create") is None


def test_what_the_longest_prefix_does_not_serve_goes_to_no_shorter_one() -> None:
    routing = routes(stripe=Sender(), stripe__payments=OnlyCharges())

    assert routing.find("stripe.payments.create") is None


def test_each_first_word_is_a_destination() -> None:
    routing = routes(stripe__refunds=Sender(), stripe=Sender(), mail=Sender())

    assert routing.destinations == ["mail", "stripe"]


def test_a_name_that_no_operation_can_have_is_refused() -> None:
    with pytest.raises(InvalidValue, match="lower-case words joined by dots"):
        routes_of({"Stripe": Sender()})


def test_a_route_has_the_declaration_as_plain_values_with_the_margin() -> None:
    declared = {"window": FOREVER, "timeout": 7 * SECOND, "at_least_once": True, "attempts_max": 3, "age_max": LEASE}

    route = routes(mail=Sender(**declared)).find("mail.send")

    assert route is not None
    assert {name: getattr(route.memory, name) for name in declared} == declared
    assert route.memory.margin == MARGIN
    assert route.timeout_seconds == 7.0


@pytest.mark.parametrize(
    ("declared", "form"),
    [
        ({}, "native"),
        ({"key_format": KeyFormat(encoding="hex")}, "hex"),
        ({"key_format": KeyFormat(encoding="uuid", uuid_version=4)}, "uuid4"),
        ({"key_format": KeyFormat(encoding="uuid")}, "uuid8"),
        ({"pinned": "2026-01-28"}, "native 2026-01-28"),
        ({"key_format": KeyFormat(encoding="hex"), "pinned": "2026-01-28 acct_1"}, "hex 2026-01-28 acct_1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_form_names_all_that_must_not_change_between_two_attempts(declared: dict[str, Any], form: str) -> None:
    routing = routes(mail=Sender(**declared))

    assert routing.forms == {"mail": form}


def test_two_versions_of_a_uuid_are_two_forms() -> None:
    """One tag is another key under another version: a second attempt would not be deduplicated."""
    forms = {str(KeyFormat(encoding="uuid", uuid_version=version)) for version in (4, 5, 8)}

    assert len(forms) == 3


def test_an_adapter_under_two_names_is_closed_once() -> None:
    closed: list[str] = []

    class Closing(Sender):
        async def aclose(self) -> None:
            closed.append("closed")

    adapter = Closing()
    routing = routes(stripe=adapter, stripe__refunds=adapter, mail=Sender())

    async def close_all() -> None:
        for close in routing.closing():
            await close()

    asyncio.run(close_all())

    assert closed == ["closed"]


# --- all adapters together


def test_adapters_from_everywhere_are_put_together() -> None:
    stripe, mail = Sender(), Sender()

    assert merge({"stripe": stripe}, {"mail": mail}, {}) == {"stripe": stripe, "mail": mail}


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"operation 'mail' is registered twice: which adapter is meant\?"):
        merge({"mail": Sender()}, {"stripe": Sender()}, {"mail": Sender()})


def test_a_dispatcher_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a dispatcher needs an adapter"):
        merge({}, {})


# --- declarations under which the guarantees could not be kept


def check(adapter: Any) -> None:
    check_adapter("mail", adapter, lease=LEASE, margin=MARGIN)


@pytest.mark.parametrize("encoding", ["native", "uuid", "hex"])
@pytest.mark.parametrize("window", [None, FOREVER, timedelta(days=1)], ids=["no keys", "forever", "a day"])
def test_a_declaration_that_can_be_kept_is_taken(window: Any, encoding: Any) -> None:
    check(Sender(window=window, key_format=KeyFormat(encoding=encoding)))


def test_what_is_refused_names_the_operation_and_the_adapter() -> None:
    with pytest.raises(ConfigurationError, match=r"^the adapter of 'mail' \(Sender\): "):
        check(Sender(attempts_max=0))


@pytest.mark.parametrize(
    "declared",
    [{"timeout": 0 * SECOND}, {"timeout": -SECOND}, {"age_max": 0 * SECOND}, {"age_max": -SECOND}, {"attempts_max": 0}],
    ids=str,
)
def test_a_limit_that_allows_nothing_is_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"must be a positive timedelta, not|must be an int of at least 1, not 0"
    ):
        check(Sender(**declared))


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
        (KeyFormat(encoding="hex", chars_max=36), "hex keys have 64 characters, the service takes 36"),
        (KeyFormat(encoding="hex", chars_max=45), "hex keys have 64 characters, the service takes 45"),
        (KeyFormat(encoding="native", chars_max=35), "native keys have 36 characters, the service takes 35"),
        (KeyFormat(encoding="uuid", chars_max=32), "uuid keys have 36 characters, the service takes 32"),
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
        KeyFormat(chars_max=36),  # as Razorpay's payouts take them
        KeyFormat(encoding="uuid", chars_max=36, alphabet="[a-f0-9-]"),
        KeyFormat(chars_max=45),  # as Square takes them
        KeyFormat(encoding="hex", chars_max=64, alphabet="[a-f0-9]"),
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
        ({"chars_max": "36"}, "chars_max='36' must be an int of at least 1"),
        ({"chars_max": 0}, "chars_max=0 must be an int of at least 1"),
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
        {"age_max": 86_400.0},
        {"attempts_max": None},
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


# --- sync or async


def outcome_of(send: Callable[[Delivery], Any]) -> Any:
    """What a dispatcher gets of an operation with this function."""
    operations = Operations()
    operations.operation("mail")(send)
    route = routes_of(operations.adapters).find("mail.send")
    assert route is not None
    return asyncio.run(route.send(delivery()))


class AsyncCallable:
    async def __call__(self, delivery: Delivery) -> Outcome:
        return Delivered("async object")


class SyncCallable:
    def __call__(self, delivery: Delivery) -> Outcome:
        return Delivered("sync object")


async def send_async(delivery: Delivery, note: str = "async") -> Outcome:
    return Delivered(note)


def send_sync(delivery: Delivery, note: str = "sync") -> Outcome:
    return Delivered(note)


@functools.wraps(send_async)
def send_wrapped(delivery: Delivery) -> Any:
    return send_async(delivery, "in a plain wrapper")


@pytest.mark.parametrize(
    ("send", "note"),
    [
        (send_async, "async"),
        (send_sync, "sync"),
        (functools.partial(send_async, note="async partial"), "async partial"),
        (functools.partial(send_sync, note="sync partial"), "sync partial"),
        (AsyncCallable(), "async object"),
        (SyncCallable(), "sync object"),
    ],
    ids=["async", "sync", "async partial", "sync partial", "async object", "sync object"],
)
def test_whatever_can_be_called_can_send(send: Callable[[Delivery], Any], note: str) -> None:
    assert outcome_of(send) == Delivered(note)


def test_an_async_function_in_a_plain_wrapper_is_awaited() -> None:
    """Else its coroutine is taken for the answer: nothing is sent, and the entry is in doubt all the same."""
    outcome = outcome_of(send_wrapped)
    if inspect.iscoroutine(outcome):
        outcome.close()  # else its warning fails whatever test comes next

    assert outcome == Delivered("in a plain wrapper")


def test_a_sync_send_runs_on_a_thread_so_that_it_may_block() -> None:
    threads: list[int] = []

    outcome_of(lambda delivery: threads.append(threading.get_ident()))

    assert threads
    assert threads != [threading.get_ident()]


def test_an_async_send_runs_on_the_event_loop() -> None:
    threads: list[int] = []

    async def send(delivery: Delivery) -> None:
        threads.append(threading.get_ident())

    outcome_of(send)

    assert threads == [threading.get_ident()]


# --- the app's own operations


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_adapter_has_the_documented_default(name: str) -> None:
    assert getattr(Adapter, name) == DEFAULTS[name]


def test_an_operation_has_the_defaults_of_an_adapter() -> None:
    operations = Operations()

    operations.operation("mail")(send_async)

    declared = {name: getattr(operations.adapters["mail"], name) for name in DEFAULTS}
    assert declared == DEFAULTS


def test_an_operation_declares_what_it_was_given() -> None:
    operations = Operations()
    given = {
        "window": timedelta(days=1),
        "timeout": SECOND,
        "key_format": KeyFormat(encoding="hex"),
        "replays_errors": "all",
        "at_least_once": True,
        "attempts_max": 2,
        "age_max": LEASE,
        "pinned": "v2",
    }

    operations.operation("mail", **given)(send_async)  # type: ignore[arg-type]

    assert given.keys() == DEFAULTS.keys()
    assert {name: getattr(operations.adapters["mail"], name) for name in given} == given


def test_the_decorated_function_stays_what_it_was() -> None:
    operations = Operations()

    @operations.operation("mail")
    def send(delivery: Delivery) -> Outcome:
        return Delivered("called directly")

    assert send(delivery()) == Delivered("called directly")


def test_an_operation_serves_its_name_and_the_names_below_it() -> None:
    operations = Operations()
    operations.operation("mail")(send_async)
    operations.operation("mail.digest")(send_sync)

    routing = routes_of(operations.adapters)

    found = [routing.find(name) for name in ("mail", "mail.welcome", "mail.digest.weekly")]
    assert [route and route.name for route in found] == ["mail", "mail", "mail.digest"]


def test_an_operation_registered_twice_is_refused() -> None:
    operations = Operations()
    operations.operation("mail")(send_async)

    with pytest.raises(ConfigurationError, match="operation 'mail' is registered twice"):
        operations.operation("mail")


def test_one_decorator_cannot_register_two_functions() -> None:
    """The second would take the first one's place unseen."""
    register = Operations().operation("mail")
    register(send_async)

    with pytest.raises(ConfigurationError, match="operation 'mail' is registered twice"):
        register(send_sync)


@pytest.mark.parametrize("name", ["Mail", "mail.", ".mail", "mail send", "mail..send", "", "m" * 129, 7])
def test_a_malformed_name_is_refused_at_once(name: Any) -> None:
    with pytest.raises(InvalidValue):
        Operations().operation(name)


def test_an_unhashable_name_is_refused_like_any_other() -> None:
    with pytest.raises(InvalidValue) as refused:
        Operations().operation(["mail"])  # type: ignore[arg-type]

    assert str(refused.value) == "operation ['mail']: must be a str, not list"


@pytest.mark.parametrize("register", ["operation", "on_settled", "on_uncertain", "on_completed"])
def test_what_is_no_function_is_refused_where_it_is_registered(register: str) -> None:
    operations = Operations()

    with pytest.raises(ConfigurationError) as refused:
        getattr(operations, register)("mail.send")(5)

    assert str(refused.value) == (
        f"{register}('mail.send') registers a function, async or sync, not 5: write it as a decorator above a def"
    )
    assert not operations.adapters
    assert not operations.callbacks


def test_what_is_read_from_operations_does_not_change_them() -> None:
    operations = Operations()
    operations.operation("mail")(send_async)

    operations.adapters.clear()  # type: ignore[attr-defined]

    assert list(operations.adapters) == ["mail"]
