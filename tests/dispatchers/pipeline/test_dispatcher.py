"""The dispatcher on a real database: what it sends, and the entry's state after it."""

import asyncio
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import (
    HOUR,
    age,
    dispatcher,
    put,
    put_one,
    queue_row,
    reasons,
    run_once,
    settlement_row,
    state,
    states,
)

import outbox
from dispatchers import Deferred, Delivered, Delivery, Dispatcher, Operations, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter

pytestmark = pytest.mark.sends_hints

SLOW = Unknown("no answer")


class Misbehaving(MemoryAdapter):
    """Executes the first send, then does something unexpected; later sends are answered."""

    def __init__(self, misbehave: Callable[[], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._misbehave = misbehave

    async def send(self, delivery: Delivery) -> Outcome:
        outcome = await super().send(delivery)
        if len(self.deliveries) > 1:
            return outcome
        answer = self._misbehave()
        return await answer if asyncio.iscoroutine(answer) else answer


def raising(error: BaseException) -> Callable[[], Any]:
    def misbehave() -> None:
        raise error

    return misbehave


# --- what is sent


def test_run_once_sends_what_is_due_and_says_how_many_it_settled(database: Database, ob: outbox.Outbox) -> None:
    ids = put(database, ob, count=3)
    adapter = MemoryAdapter()

    settled = run_once(database, ob, adapters={"crm": adapter})

    assert settled == 3
    assert {delivery.id for delivery in adapter.deliveries} == set(ids)
    assert states(database) == {"delivered": 3}
    assert run_once(database, ob, adapters={"crm": adapter}) == 0


def test_what_the_service_answered_is_in_the_status(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, parent="invoice:42")

    run_once(database, ob, adapters={"crm": MemoryAdapter([Delivered({"id": "c_1"})])})

    with database.begin() as session:
        (status,) = ob.status(session, "invoice:42")
    assert (status.state, status.result, status.attempts) == ("delivered", {"id": "c_1"}, 1)


def test_a_delivery_is_what_was_enqueued(database: Database, ob: outbox.Outbox) -> None:
    options = {"account": "acct_1"}
    given = {"payload": {"b": 1, "a": "é"}, "options": options, "discriminator": "1", "ordering_key": "customer:ada"}
    id = put_one(database, ob, parent="invoice:42", **given)
    adapter = MemoryAdapter()

    run_once(database, ob, adapters={"crm": adapter})

    (delivery,) = adapter.deliveries
    assert (delivery.id, delivery.operation, delivery.attempt) == (id, "crm.upsert", 1)
    assert delivery.payload_json == database.entries[0].payload
    assert (delivery.payload, delivery.options, delivery.headers) == ({"b": 1, "a": "é"}, options, {})
    assert delivery.key == ob.child_key("invoice:42", "crm.upsert", "1")
    assert delivery.ordering_key == "customer:ada"


def test_an_operation_may_be_async_or_sync(database: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    threads = []

    @effects.operation("crm.upsert")
    async def upsert(delivery: Delivery) -> Outcome:
        threads.append(threading.current_thread())
        return Delivered("async")

    @effects.operation("mail")
    def send(delivery: Delivery) -> Outcome:
        threads.append(threading.current_thread())
        return Delivered("sync")

    first, second = put_one(database, ob), put_one(database, ob, "mail.send")

    assert run_once(database, ob, include=[effects]) == 2

    assert settlement_row(database, first).result == '"async"'
    assert settlement_row(database, second).result == '"sync"'
    assert threads.count(threading.main_thread()) == 1


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["url", "text", "engine", "async engine"])
def test_a_target_is_a_url_or_an_engine_of_either_kind(database: Database, ob: outbox.Outbox, kind: str) -> None:
    target = {
        "url": lambda: database.url,
        "text": lambda: database.url.render_as_string(hide_password=False),
        "engine": lambda: database.engine,
        "async engine": database.async_engine,
    }[kind]()
    put(database, ob, count=10)
    adapter = MemoryAdapter([SLOW])

    async def main() -> int:
        working = dispatcher(target, ob, adapters={"crm": adapter})
        await working.check()
        settled = await working.run_once()
        await working.close()
        return settled

    assert asyncio.run(main()) == 10

    assert states(database) == {"delivered": 9, "retry": 1}


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("hunter2", "this text, which is not shown because it may be a password"),
        ("postgresql+nodriver://shop:hunter2@host/shop", "postgresql+nodriver://..."),
        ("sqlite://:hunter2:x", "sqlite://..."),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(ob: outbox.Outbox, target: str, shown: str) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        Dispatcher(target, adapters={"crm": MemoryAdapter()}, outbox=ob)

    assert str(refused.value) == (
        f"a dispatcher needs a SQLAlchemy URL of a known driver, such as postgresql+psycopg://user@host/name, not {shown}"
    )


def test_what_is_due_later_waits_and_so_does_what_came_due_again(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, due=HOUR)
    adapter = MemoryAdapter([Deferred("busy", after=timedelta(0))] * 5)

    assert run_once(database, ob, adapters={"crm": adapter}) == 0

    age(database, 2 * HOUR)
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert len(adapter.deliveries) == 1


# --- what is not sent


def test_an_operation_that_no_adapter_serves_waits_uncounted_and_is_logged(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    id = put_one(database, ob, payload={"card": "4242"})

    assert run_once(database, ob, adapters={"mail": MemoryAdapter()}) == 0

    row = queue_row(database, id)
    assert (row.state, row.deliveries, row.attempts, row.maybe_sent) == ("pending", 0, 0, False)
    assert reasons(database, id) == []
    assert f"entry {id} (crm.upsert) waits: no adapter of this dispatcher serves it" in caplog.text
    assert "4242" not in caplog.text
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 1


# --- attempts whose outcome is unknown


class Timeout(BaseException):
    """As gevent's."""


@pytest.mark.parametrize(
    "misbehave",
    [
        raising(ValueError("a bug")),
        raising(BaseExceptionGroup("many", [SystemExit(1)])),
        raising(asyncio.CancelledError()),
        raising(Timeout()),
        lambda: None,
        lambda: "delivered",
        lambda: Delivered,
        lambda: asyncio.sleep(10),
    ],
    ids=["raises", "raises a group", "is cancelled inside", "raises no Exception", "None", "text", "a class", "hangs"],
)
def test_whatever_an_adapter_does_the_next_attempt_has_the_same_key(
    database: Database, ob: outbox.Outbox, misbehave: Callable[[], Any]
) -> None:
    id = put_one(database, ob)
    adapter = Misbehaving(misbehave, timeout=timedelta(milliseconds=200))

    assert run_once(database, ob, adapters={"crm": adapter}) == 1

    row = queue_row(database, id)
    assert (row.state, row.attempts, row.maybe_sent, row.lease_token) == ("retry", 1, True, None)
    assert row.in_doubt_since is not None
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": adapter}) == 1
    assert [delivery.attempt for delivery in adapter.deliveries] == [1, 2]
    assert len({delivery.key for delivery in adapter.deliveries}) == len(adapter.effects) == 1
    assert state(database, id) == "delivered"


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("outcome", "becomes"),
    [
        (Delivered({"at": datetime(2026, 1, 1, tzinfo=UTC)}), "delivered"),
        (Delivered({"amount": float("nan")}), "delivered"),
        (Delivered("a\0b"), "delivered"),
        (Delivered({("a", 1): 2}), "delivered"),
        (Rejected("no\0such\0thing"), "failed"),
        (Rejected("half a \ud83d"), "failed"),
        (Rejected(404), "failed"),  # type: ignore[arg-type]
        (Unknown("half a \ud83d"), "retry"),
        (Deferred("busy", after=5), "retry"),  # type: ignore[arg-type]
    ],
    ids=[
        "datetime",
        "not a number",
        "NUL in it",
        "odd key",
        "NUL",
        "surrogate",
        "number",
        "surrogate, unknown",
        "number of seconds",
    ],
)
def test_an_answer_that_the_database_cannot_store_delays_no_other_entry(
    database: Database, ob: outbox.Outbox, outcome: Outcome, becomes: str
) -> None:
    odd, sound = put_one(database, ob, destination="a"), put_one(database, ob, destination="b")
    adapter = MemoryAdapter(lambda delivery: outcome if delivery.id == odd else Delivered())

    assert run_once(database, ob, adapters={"crm": adapter}) == 2

    assert state(database, sound) == "delivered"
    assert state(database, odd) == becomes
    ended = settlement_row(database, odd)
    if ended is not None and ended.result is not None:
        json.loads(ended.result, parse_constant=pytest.fail)


@pytest.mark.parametrize("grace", [timedelta(seconds=-1), 30])
def test_a_grace_that_is_none_is_refused_at_the_start_and_not_at_sigterm(grace: Any) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        Dispatcher("sqlite://", adapters={"crm": MemoryAdapter()}, grace=grace)

    assert str(refused.value) == f"grace must be a timedelta of 0 s or more, not {grace!r}"


@pytest.mark.parametrize("name", ["concurrency", "max_in_flight", "callback_concurrency"])
@pytest.mark.parametrize("value", ["5", 2.5, True, 0], ids=repr)
def test_a_number_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    """As from `os.environ`, whose values are text."""
    with pytest.raises(outbox.ConfigurationError) as refused:
        Dispatcher("sqlite://", adapters={"crm": MemoryAdapter()}, **{name: value})

    assert str(refused.value) == f"{name} must be an int of at least 1, not {value!r}"


@pytest.mark.parametrize("given", [Operations(), [MemoryAdapter()], "effects"])
def test_what_is_included_are_operations_in_a_list(given: Any) -> None:
    with pytest.raises(outbox.ConfigurationError) as refused:
        Dispatcher("sqlite://", include=given)

    assert str(refused.value) == f"include must be a list of dispatchers.Operations, such as [effects], not {given!r}"


def test_a_setting_that_does_not_exist_is_refused_with_those_that_do() -> None:
    misspelt: dict[str, Any] = {"leese": timedelta(seconds=60)}
    with pytest.raises(TypeError, match="a dispatcher has no setting 'leese'; its settings are lease, margin, "):
        Dispatcher("sqlite://", **misspelt)


@pytest.mark.parametrize("setting", ["lease", "margin", "poll"])
@pytest.mark.parametrize("span", [timedelta(0), timedelta(seconds=-5), 5])
def test_a_span_that_would_weaken_an_invariant_is_refused(setting: str, span: Any) -> None:
    settings: Any = {"adapters": {"crm": MemoryAdapter()}, setting: span}

    with pytest.raises(outbox.ConfigurationError, match=f"{setting} must be a positive timedelta, not "):
        Dispatcher("sqlite://", **settings)
