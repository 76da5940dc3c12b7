"""The inbox with the brokers themselves and their client libraries: executes the recipes of docs/inbox-recipes.md.

The tests of NATS and RabbitMQ skip where no server listens at localhost, and those of Redis without redis-server.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Message, Producer
from nats.errors import TimeoutError as NoMessage
from support.consumer import Billing, Crash, through_a_relay, until
from support.database import Database
from support.inbox_brokers import DecodingRedis, Kafka, Nats, RabbitMq, Redis, Sqs
from support.python_processes import PIPE, PythonProcess
from support.recipes import Pauses

import outbox
from outbox import inboxes

IDENTITY: inboxes.MessageIdentity = {"scope": "shop", "message_id": "evt_1"}
KILLED = -signal.SIGKILL


def only(kind: type) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("serving", [kind], indirect=True)


@pytest.fixture(scope="module", params=[Sqs, Kafka, RabbitMq, Nats, Redis, DecodingRedis])
def serving(request: pytest.FixtureRequest) -> Iterator[Callable[[Billing], Any]]:
    """Makes a queue, topic or stream of one test's own, at a server for all of them."""
    with request.param.serving() as server:
        yield lambda billing: request.param(server, billing.handle)


@pytest.fixture
def billing(postgresql: Database, ob: outbox.Outbox) -> Billing:
    return Billing(postgresql, ob)


@pytest.fixture
def broker(serving: Callable[[Billing], Any], billing: Billing) -> Iterator[Any]:
    with closing(serving(billing)) as broker:
        yield broker


def test_a_message_is_handled_and_acknowledged(broker: Any, billing: Billing) -> None:
    broker.send()

    until(lambda: billing.attempts, broker.step)

    assert broker.is_done
    assert billing.orders == ["evt_1"]


@pytest.mark.parametrize("died", ["at work", "after the commit"])
def test_what_a_dead_consumer_left_is_handled_once(broker: Any, billing: Billing, died: str) -> None:
    broker.send()
    billing.dies_at_work, billing.dies_after_its_commit = died == "at work", died != "at work"
    with pytest.raises(Crash):
        until(lambda: False, broker.step)

    broker.restart()
    until(lambda: billing.attempts == 2, broker.step)

    assert broker.is_done
    assert billing.orders == ["evt_1"]
    assert billing.duplicates == ([] if died == "at work" else ["evt_1"])


def test_an_event_that_the_producer_sends_twice_is_handled_once(broker: Any, billing: Billing) -> None:
    broker.send()
    broker.send()

    until(lambda: billing.attempts == 2, broker.step)

    assert broker.is_done
    assert billing.orders == billing.duplicates == ["evt_1"]


def test_a_message_in_flight_elsewhere_is_kept_until_it_is_committed(broker: Any, billing: Billing) -> None:
    elsewhere = ExitStack()
    elsewhere.enter_context(billing.elsewhere(IDENTITY))
    billing.before_attempt[broker.max_deliveries + 2] = elsewhere.close
    broker.send()

    until(lambda: billing.duplicates, broker.step)

    assert broker.is_done
    assert billing.orders == billing.duplicates == ["evt_1"]
    assert broker.parked == 0


def test_an_outage_of_the_database_is_no_failure_of_the_message(
    serving: Callable[[Billing], Any], postgresql: Database, ob: outbox.Outbox
) -> None:
    """After it the message may fail as often as before; and if it does not fail again, its work is done once."""
    with through_a_relay(postgresql, ob) as (billing, between), closing(serving(billing)) as broker:
        failures = broker.max_deliveries - 1
        ends = broker.max_deliveries + 2
        billing.before_attempt = {ends: between.accept, ends + failures: lambda: billing.poison.clear()}
        billing.poison = {"evt_1"}
        between.refuse()
        broker.send()

        until(lambda: billing.attempts == ends + failures, broker.step)

        assert broker.is_done
        assert billing.orders == ["evt_1"]
        assert billing.duplicates == []
        assert broker.parked == 0


def test_poison_is_parked_and_handled_once_when_it_is_redriven(broker: Any, billing: Billing) -> None:
    """The messages after it are handled meanwhile. Its id is that of the event, also in the redrive."""
    billing.poison = {"evt_1"}
    broker.send("evt_1")
    broker.send("evt_2")
    until(lambda: broker.parked and billing.orders, broker.step)
    assert billing.attempts == broker.max_deliveries + 1
    assert billing.orders == ["evt_2"]

    billing.poison.clear()
    broker.redrive()
    broker.send("evt_1")
    until(lambda: billing.duplicates, broker.step)

    assert billing.orders == ["evt_1", "evt_2"]
    assert billing.duplicates == ["evt_1"]


# --- SQS


@only(Sqs)
def test_no_other_consumer_of_sqs_gets_a_message_that_is_kept(broker: Sqs, billing: Billing) -> None:
    """For longer than the recipe keeps the messages at a time."""
    elsewhere, received = ExitStack(), list[Any]()
    elsewhere.enter_context(billing.elsewhere(IDENTITY))

    def meanwhile() -> None:
        time.sleep(0.6)
        received.extend(broker.receive())

    broker.recipe.time = Pauses(meanwhile)
    broker.recipe.VISIBILITY_SECONDS = 2
    billing.before_attempt[6] = elsewhere.close
    broker.send("evt_1")
    broker.send("evt_2")

    broker.step()

    assert received == []
    assert billing.orders == ["evt_1", "evt_2"]


@only(Sqs)
def test_by_sqs_own_id_a_redelivery_is_a_duplicate_and_a_redrive_is_not(broker: Sqs) -> None:
    broker.send(event_id=None)
    delivered = [broker.receive()[0] for _ in range(broker.max_deliveries)]
    assert broker.receive() == []
    broker.redrive()
    (redriven,) = broker.receive()

    first, *others = (inboxes.from_sqs_message_id(each, queue=broker.url) for each in delivered)
    assert others == [first, first]
    assert first["scope"] == f"sqs:{broker.url}"
    assert inboxes.from_sqs_message_id(redriven, queue=broker.url) != first


@only(Sqs)
def test_a_consumer_killed_at_any_moment_leaves_work_that_is_done_once(
    broker: Sqs, billing: Billing, postgresql: Database
) -> None:
    broker.limit_deliveries(1000)  # until the database has noticed that a consumer is dead, its message is in flight
    left: list[tuple[int, bool]] = []
    command = [str(postgresql.url.render_as_string(hide_password=False)), broker.server, broker.url]
    with crashing_consumer(*command) as ended_at_moment:
        moment, ended = 0, KILLED
        while ended == KILLED:
            moment += 1
            broker.send(f"evt_{moment}")
            ended = ended_at_moment(moment)
            left.append((billing.orders.count(f"evt_{moment}"), broker.is_done))
            until(lambda: broker.is_done, broker.step, max_seconds=60)
            assert billing.orders.count(f"evt_{moment}") == 1

    # nothing done; done and not acknowledged; done and acknowledged: in this order, each of them at some moment
    assert [key for key, _ in groupby(left)] == [(0, False), (1, False), (1, True)]
    assert len(left) > 15
    assert len(postgresql.queue) == moment


@contextmanager
def crashing_consumer(*arguments: str) -> Iterator[Callable[[int], int]]:
    """The process of crashing_consumer.py: kills a consumer at a moment, and returns how it ended."""
    tests = Path(__file__).parents[2]
    with PythonProcess(
        tests / "support" / "apps" / "crashing_consumer.py",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ended_at_moment(moment: int) -> int:
            print(moment, file=process.stdin, flush=True)
            return int(process.stdout.readline())  # type: ignore[union-attr]

        yield ended_at_moment


# --- Kafka


@only(Kafka)
def test_a_message_that_cannot_be_parked_is_not_acknowledged(broker: Kafka, billing: Billing) -> None:
    broker.producer = Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 100, "log_level": 0})
    billing.poison = {"evt_1"}
    broker.cluster.producer.produce(broker.name, b"{}", partition=0, headers=[("event_id", b"evt_1")])

    with pytest.raises(KafkaException, match="_MSG_TIMED_OUT"):
        until(lambda: False, broker.step)

    assert broker.committed < 0


@only(Kafka)
def test_by_offset_a_redelivery_is_a_duplicate_and_an_equal_event_is_not(broker: Kafka) -> None:
    def by_offset(message: Message, topic_id: str = "topic-id-1") -> inboxes.MessageIdentity:
        return inboxes.from_kafka_offset(message, cluster=broker.cluster.id, topic_id=topic_id)

    broker.send(event_id=None)
    broker.send(event_id=None)

    identities, again = ([*map(by_offset, broker.read(broker.name))] for _ in range(2))

    assert identities == again
    assert identities[0]["scope"] == f"kafka:{broker.cluster.id}:topic-id-1"
    assert [identity["message_id"].split(":")[:2] for identity in identities] == [["0", "0"], ["0", "1"]]
    assert by_offset(broker.read(broker.name)[0], "made-again") != identities[0]


# --- NATS


@only(Nats)
def test_no_other_consumer_of_nats_gets_a_message_that_is_kept(broker: Nats, billing: Billing) -> None:
    """For longer than the server waits for an acknowledgement."""
    elsewhere, found = ExitStack(), list[Any]()
    elsewhere.enter_context(billing.elsewhere(IDENTITY))
    broker.redeliver_after(1)
    billing.before_attempt[25] = elsewhere.close  # after 24 pauses of 0.1 s
    broker.send()

    async def consume_twice() -> None:
        working = asyncio.create_task(broker.recipe.step(broker.js, broker.subscription))
        await asyncio.to_thread(until, lambda: billing.attempts, lambda: time.sleep(0.01))
        with suppress(NoMessage):
            found.extend(await broker.subscription.fetch(1, timeout=1.5))
        await working

    broker.run(consume_twice())

    assert found == []
    assert broker.is_done
    assert billing.duplicates == ["evt_1"]


@only(Nats)
def test_the_event_loop_runs_while_a_message_is_handled(broker: Nats, billing: Billing) -> None:
    noticed = threading.Event()
    billing.before_attempt[1] = lambda: noticed.wait(10)
    broker.send()

    async def notice() -> None:
        working = asyncio.create_task(broker.recipe.step(broker.js, broker.subscription))
        await asyncio.to_thread(until, lambda: billing.attempts, lambda: time.sleep(0.01))
        assert not working.done()
        noticed.set()
        await working

    broker.run(notice())

    assert billing.orders == ["evt_1"]


@only(Nats)
def test_a_redrive_under_the_streams_own_message_id_is_dropped_by_it(broker: Nats) -> None:
    """Why the recipe gives the event's id a header of its own."""
    _, again = (broker.run(broker.stream.send(**{"Nats-Msg-Id": "evt_1"})) for _ in range(2))

    assert again.duplicate


@only(Nats)
def test_by_sequence_a_redelivery_is_a_duplicate_and_another_is_not(broker: Nats, billing: Billing) -> None:
    broker.identify_by(inboxes.from_nats_sequence)
    broker.send()
    broker.send()
    billing.dies_after_its_commit = True
    with pytest.raises(Crash):
        broker.step()

    broker.restart()
    until(lambda: billing.attempts == 3, broker.step)

    assert numbers(billing.orders) == ["1", "2"]
    assert numbers(billing.duplicates) == ["1"]


@only(Nats)
def test_by_sequence_a_stream_that_was_made_again_has_no_duplicates(broker: Nats, billing: Billing) -> None:
    """A running consumer does not notice: its subscription works on, and the sequences begin again at 1."""
    broker.identify_by(inboxes.from_nats_sequence)
    for attempts in (1, 2):
        broker.send()
        until(lambda attempts=attempts: billing.attempts == attempts, broker.step)
        broker.run(broker.stream.delete())
        broker.run(broker.stream.create())
        broker.redeliver_after(30)

    assert numbers(billing.orders) == ["1", "1"]
    assert billing.duplicates == []


@only(Nats)
def test_by_sequence_a_stream_that_was_restored_repeats_what_it_had(broker: Nats, billing: Billing) -> None:
    """The stream keeps the time of its creation, and counts on from the last message of the backup."""
    broker.identify_by(inboxes.from_nats_sequence)
    broker.send()
    backup = broker.run(broker.stream.back_up())
    broker.send()
    until(lambda: billing.attempts == 2, broker.step)

    broker.run(broker.stream.restore(backup))
    broker.redeliver_after(30)
    broker.send()
    until(lambda: billing.attempts == 4, broker.step)

    assert sorted(numbers(billing.orders)) == ["1", "2", "2"]
    assert numbers(billing.duplicates) == ["1"]


def numbers(ids: list[str]) -> list[str]:
    """The sequences of a stream, of ids that have a time too."""
    return [id.partition(":")[0] for id in ids]
