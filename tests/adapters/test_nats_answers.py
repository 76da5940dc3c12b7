"""What the answers of a JetStream server mean to the NatsAdapter, without a server."""

import pytest

from dispatchers import Deferred, Delivered, Unknown
from dispatchers.adapters.brokers.nats_answers import answer_reader

ACCOUNT_LIMITS, SERVER_LIMITS = 10002, 10023


@pytest.mark.parametrize("code", [ACCOUNT_LIMITS, SERVER_LIMITS])
@pytest.mark.parametrize(("replicas", "outcome"), [(1, Deferred), (3, Unknown), (None, Unknown)])
def test_a_server_without_room_leaves_doubt_only_with_replicas(code: int, replicas: int | None, outcome: type) -> None:
    data = b'{"error":{"code":503,"err_code":%d,"description":"no room"},"stream":"ORDERS","seq":0}' % code

    found = answer_reader("ORDERS", replicas)(None, data)

    assert isinstance(found, outcome)
    assert isinstance(found, Deferred | Unknown)
    assert found.cooldown


def test_a_subject_that_is_full_pauses_no_other_subject() -> None:
    data = (
        b'{"error":{"err_code":10077,"description":"maximum messages per subject exceeded"},"stream":"ORDERS","seq":0}'
    )

    assert answer_reader("ORDERS", 1)(None, data) == Deferred("JetStream error 10077: the stream is full")


def test_an_answer_with_too_many_digits_leaves_the_message_in_doubt() -> None:
    data = b'{"stream":"ORDERS","seq":%s}' % (b"7" * 5_000)

    assert answer_reader("ORDERS", 3)(None, data) == Unknown("the answer is no PubAck")


def test_an_answer_of_a_stream_with_a_similar_name_confirms_nothing() -> None:
    """In a regular expression `A+` is also `AA`."""
    read = answer_reader("A+", 3)

    assert read(None, b'{"stream":"A+","seq":7}') == Delivered({"stream": "A+", "seq": 7})
    assert isinstance(read(None, b'{"stream":"AA","seq":7}'), Unknown)
