"""How long a message is known, and what its next delivery is after that."""

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from support.consumer import Consumer
from support.database import ALL, TABLES

pytestmark = [pytest.mark.as_app, pytest.mark.on_mariadb]

A_MOMENT = timedelta(minutes=1)


@pytest.fixture(params=["sync", "async"])
def consumer(request, database, ob):
    return Consumer(database, ob, is_async=request.param == "async")


def test_a_message_is_known_for_longer_than_any_queue_keeps_it(consumer, database):
    consumer.consume()

    (record,) = database.records
    assert abs(record.replay_until - datetime.now(UTC) - timedelta(days=35)) < A_MOMENT
    assert record.keep_until - record.replay_until < A_MOMENT


def test_a_message_may_be_known_for_longer(consumer, database):
    consumer.consume(retention=timedelta(days=365))

    (record,) = database.records
    assert abs(record.keep_until - datetime.now(UTC) - timedelta(days=365)) < A_MOMENT


def test_past_its_time_a_message_is_a_duplicate_while_effects_are_known(consumer, database):
    consumer.consume()
    database.age_records(timedelta(days=36))

    assert consumer.consume().duplicate
    assert database.counts() == ALL


def test_a_tombstone_makes_a_duplicate_too(consumer, database):
    consumer.consume()
    (record,) = database.records
    kept = {name: value for name, value in record._asdict().items() if name in TABLES.tombstone.c}
    database.execute(sa.delete(TABLES.record))
    database.execute(sa.insert(TABLES.tombstone).values(**kept, forget_at=datetime.now(UTC) + timedelta(days=1)))

    assert consumer.consume().duplicate


def test_past_its_time_a_message_that_caused_nothing_is_handled_again(consumer, database):
    consumer.consume(lambda session, message: None)
    database.age_records(timedelta(days=36))

    assert not consumer.consume(lambda session, message: None).duplicate
