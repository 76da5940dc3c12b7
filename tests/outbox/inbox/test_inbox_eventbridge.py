"""The id of an event of EventBridge. `tests/adapters/test_aws_adapters.py` has an event that came over a bus."""

from typing import Any

import pytest

from outbox import inboxes
from outbox.errors import InvalidValue


def test_the_id_is_the_producer_s_and_not_eventbridge_s() -> None:
    event = {"id": "6a7e8feb-b491", "detail": {"metadata": {"event_id": "evt_1"}, "data": {"event_id": "other"}}}

    assert inboxes.from_eventbridge(event, scope="shop") == {"scope": "shop", "message_id": "evt_1"}


@pytest.mark.parametrize(
    "detail", [None, [], {}, {"metadata": "evt_1"}, {"metadata": {}}, {"metadata": {"event_id": 7}}]
)
def test_an_event_without_a_readable_id_is_refused(detail: Any) -> None:
    with pytest.raises(InvalidValue, match=r"detail\.metadata\.event_id"):
        inboxes.from_eventbridge({"id": "6a7e8feb-b491", "detail": detail}, scope="shop")
