"""The inbox with redis-py, on a Redis of the tests' own, by the recipe of docs/inbox-recipes.md. Skipped without redis-server."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from support.consumer import ORDER, Billing, Crash, through_a_relay, until
from support.database import Database
from support.recipes import Pauses, recipe_of
from support.redis_servers import Server, running_servers

import outbox
from outbox import inboxes
from outbox.errors import InvalidValue

IDENTITY: Any = {"scope": "shop", "message_id": "evt_1"}


class Consumer:
    """A stream of one test's own, and a process that runs the recipe."""

    def __init__(self, client: Any, billing: Billing) -> None:
        self.client = client
        self.stream = f"orders-{uuid4().hex[:8]}"
        self.recipe = recipe_of("Redis Streams, with redis-py", billing.handle)
        self.recipe.IDLE_SECONDS = 0  # what another process left is there at once
        client.xgroup_create(self.stream, self.recipe.GROUP, "0", mkstream=True)

    def send(self, id: str = "evt_1") -> None:
        self.client.xadd(self.stream, {"event_id": id, "payload": json.dumps(ORDER)})

    def step(self) -> None:
        self.recipe.step(self.client, self.stream, "one")

    @property
    def pending(self) -> list[int]:
        """How often each message was delivered that is not acknowledged."""
        found = self.client.xpending_range(self.stream, self.recipe.GROUP, "-", "+", 10)
        return [each["times_delivered"] for each in found]

    @property
    def is_done(self) -> bool:
        (group,) = self.client.xinfo_groups(self.stream)
        return group["lag"] == 0 and not group["pending"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_servers(tmp_path_factory.mktemp("redis"), 1) as (server,):
        yield server


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    with redis.Redis(port=server.port, decode_responses=request.param) as client:
        yield client


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def consumer(client: Any, billing: Billing) -> Consumer:
    return Consumer(client, billing)


def test_a_message_is_handled_and_acknowledged(consumer: Consumer, billing: Billing) -> None:
    consumer.send()

    until(lambda: consumer.is_done, consumer.step)

    assert billing.orders == ["evt_1"]


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_consumer_left_is_handled_once(consumer: Consumer, billing: Billing, died: str) -> None:
    consumer.send()
    billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
    with pytest.raises(Crash):
        until(lambda: False, consumer.step)

    until(lambda: consumer.is_done, consumer.step)

    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])


def test_an_event_that_is_added_twice_is_handled_once(consumer: Consumer, billing: Billing) -> None:
    consumer.send()
    consumer.send()

    until(lambda: consumer.is_done, consumer.step)

    assert billing.orders == billing.duplicates == ["evt_1"]


def test_poison_is_moved_and_the_messages_after_it_are_handled(consumer: Consumer, billing: Billing) -> None:
    billing.poison.add("evt_1")
    consumer.send("evt_1")
    consumer.send("evt_2")

    until(lambda: consumer.is_done, consumer.step)

    ((_, fields),) = consumer.client.xrange(f"{consumer.stream}-dead")
    assert inboxes.from_redis(fields, scope="shop") == IDENTITY
    assert billing.orders == ["evt_2"]
    assert billing.attempts == consumer.recipe.MAX_DELIVERIES + 1


def test_a_message_in_flight_elsewhere_is_kept_at_no_cost(consumer: Consumer, billing: Billing) -> None:
    consumer.send()
    deliveries: list[int] = []
    elsewhere = billing.elsewhere(IDENTITY)

    def meanwhile() -> None:
        deliveries.extend(consumer.pending)
        if len(deliveries) == 3:
            elsewhere.__exit__(None, None, None)

    consumer.recipe.time = Pauses(meanwhile)
    elsewhere.__enter__()
    consumer.step()

    assert deliveries == [1, 1, 1]
    assert consumer.is_done
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_an_outage_of_the_database_counts_as_no_delivery(client: Any, postgresql: Database, ob: outbox.Outbox) -> None:
    with through_a_relay(postgresql, ob) as (billing, between):
        consumer = Consumer(client, billing)
        pauses = Pauses(lambda: between.accept() if pauses.count > consumer.recipe.MAX_DELIVERIES else None)
        consumer.recipe.time = pauses
        consumer.send()
        between.refuse()

        consumer.step()

        assert pauses.count > consumer.recipe.MAX_DELIVERIES
        assert consumer.is_done
        assert billing.orders == ["evt_1"]


# --- the id


@pytest.mark.parametrize("fields", [{b"event_id": b"evt_1"}, {"event_id": "evt_1"}])
def test_the_id_is_the_same_whether_redis_py_decodes_or_not(fields: dict[Any, Any]) -> None:
    assert inboxes.from_redis(fields, scope="shop") == IDENTITY


def test_the_field_may_have_another_name() -> None:
    fields = {b"event_id": b"evt_1", b"id": b"evt_2"}

    assert inboxes.from_redis(fields, scope="shop", field="id")["message_id"] == "evt_2"


@pytest.mark.parametrize("fields", [{}, {b"event_id": b""}, {b"event_id": b"\xff"}])
def test_a_message_without_a_readable_id_is_refused(fields: dict[Any, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"event_id"):
        inboxes.from_redis(fields, scope="shop")
