"""Operations: what a decorated function declares and serves, and what is refused where it is registered."""

import asyncio
import re
import smtplib
from datetime import timedelta
from typing import Any

import httpx
import pytest
import requests
from support.routing import DEFAULTS, LEASE, SECOND, delivery, routes_of, send_async, send_sync

from dispatchers.delivery import Deferred, Delivered, Delivery, KeyFormat, Outcome, Unknown
from dispatchers.operations import Operations
from dispatchers.sanitize import storable
from dispatchers.time_limits import RetryPolicy
from outbox.errors import ConfigurationError, InvalidValue


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
        "retry": RetryPolicy(max_attempts=2, max_age=LEASE),
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


# --- exceptions after which nothing was sent


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("raised", "is_deferred"), [(ConnectionRefusedError, True), (ConnectionResetError, False)])
def test_only_a_declared_exception_means_that_nothing_was_sent(
    raised: type[Exception], is_deferred: bool, is_async: bool
) -> None:
    operations = Operations()

    def send(delivery: Delivery) -> Outcome:
        raise raised

    async def send_on_loop(delivery: Delivery) -> Outcome:
        raise raised

    operations.operation("mail", deferred_on=(ConnectionRefusedError,))(send_on_loop if is_async else send)
    sending = operations.adapters["mail"].send(delivery())

    if is_deferred:
        outcome = asyncio.run(sending)
        assert outcome == Deferred("raised ConnectionRefusedError, so nothing was sent")
    else:
        with pytest.raises(raised):
            asyncio.run(sending)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            (OSError,),
            "deferred_on has OSError, which covers ConnectionResetError too: after it the service may have executed",
        ),
        ((Exception,), "deferred_on has Exception, which covers ConnectionResetError too"),
        ((requests.ConnectionError,), "deferred_on has ConnectionError, which covers ConnectionError too"),
        ((httpx.TransportError,), "deferred_on has TransportError, which covers ReadError too"),
        ((smtplib.SMTPServerDisconnected,), "deferred_on has SMTPServerDisconnected, which covers"),
        ((ExceptionGroup,), "deferred_on has ExceptionGroup, which covers ExceptionGroup too"),
        ((ConnectionRefusedError, TimeoutError), "deferred_on has TimeoutError, which covers TimeoutError too"),
        (ConnectionRefusedError, "deferred_on must be a tuple of exception classes, such as"),
        (("ConnectionRefusedError",), "deferred_on must be a tuple of exception classes, such as"),
        ((KeyboardInterrupt,), "deferred_on must be a tuple of exception classes, such as"),
    ],
)
def test_an_exception_that_leaves_a_doubt_cannot_be_declared(given: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        Operations().operation("mail", deferred_on=given)


def test_a_function_without_an_outcome_is_an_error_of_types() -> None:
    operations = Operations()

    @operations.operation("mail")  # type: ignore[type-var]
    def send(delivery: Delivery) -> None:
        """Its `return` is missing."""

    assert storable(send(delivery())) == Unknown("the adapter answered with None: is its `return` missing?")
