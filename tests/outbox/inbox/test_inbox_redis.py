"""The id of a message of Redis Streams. `tests/faults/test_broker_pairs.py` has the inbox with a real server."""

from typing import Any

import pytest

from outbox import inboxes
from outbox.errors import InvalidValue


@pytest.mark.parametrize("fields", [{b"event_id": b"evt_1"}, {"event_id": "evt_1"}])
def test_the_id_is_the_same_whether_redis_py_decodes_or_not(fields: dict[Any, Any]) -> None:
    assert inboxes.redis.by_event_id(fields, scope="shop") == {"scope": "shop", "message_id": "evt_1"}


def test_the_field_may_have_another_name() -> None:
    fields = {b"event_id": b"evt_1", b"id": b"evt_2"}

    assert inboxes.redis.by_event_id(fields, scope="shop", field="id")["message_id"] == "evt_2"


@pytest.mark.parametrize("fields", [{}, {b"event_id": b""}, {b"event_id": b"\xff"}])
def test_a_message_without_a_readable_id_is_refused(fields: dict[Any, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"event_id"):
        inboxes.redis.by_event_id(fields, scope="shop")
