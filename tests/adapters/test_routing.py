"""Routes: who serves what, and how a send is called."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.routing import LEASE, MARGIN, SECOND, Sender, delivery, routes, routes_of, send_async, send_sync

from dispatchers.delivery import Delivered, Delivery, KeyFormat, Outcome
from dispatchers.operations import Operations
from dispatchers.pipeline.routing import merge
from dispatchers.time_limits import FOREVER, RetryPolicy
from outbox.errors import ConfigurationError, InvalidValue


class OnlyCharges(Sender):
    def serves(self, operation: str) -> bool:
        return operation.endswith(".charges.create")


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
    limits = {"max_attempts": 3, "max_age": LEASE}
    declared = {"window": FOREVER, "timeout": 7 * SECOND, "at_least_once": True}

    route = routes(mail=Sender(**declared, retry=RetryPolicy(**limits))).find("mail.send")

    assert route is not None
    assert {name: getattr(route.memory, name) for name in declared | limits} == declared | limits
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
    with pytest.raises(ConfigurationError, match=r"operation 'mail' is registered twice: register one adapter"):
        merge({"mail": Sender()}, {"stripe": Sender()}, {"mail": Sender()})


def test_a_dispatcher_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a dispatcher needs an adapter"):
        merge({}, {})


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
