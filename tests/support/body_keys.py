"""What the tests of keys that are the body's own share: a window, an edge of it, and a clock that a test sets."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox import BodyKey
from outbox.requests.body_key import BodyRequest

SECOND = timedelta(seconds=1)
WINDOW = timedelta(minutes=10)
EDGE = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)  # where one span of ten minutes ends and the next begins
BODY = BodyKey(WINDOW)


def at(monkeypatch: pytest.MonkeyPatch, instant: datetime) -> None:
    """As if the database's clock stood at `instant` when a key is chosen."""
    derive = BodyRequest.keys
    monkeypatch.setattr(BodyRequest, "keys", lambda self, _: derive(self, instant))
