"""An outbox, a real broker and an inbox in another database: processes of both sides and servers of the broker are killed.

`python3 dev.py kills --broker NAME --messages 50000` is the long form.
"""

from pathlib import Path

import sqlalchemy as sa
from support.broker_pair import pair


def test_after_kills_everywhere_each_message_of_nats_is_applied_once(server_url: sa.URL, tmp_path: Path) -> None:
    finding = pair(server_url, "nats", 150, 3, tmp_path)

    assert finding.startswith("nats: 150 messages, 3 kills, each applied once")


def test_after_kills_everywhere_each_message_of_redis_is_applied_once(server_url: sa.URL, tmp_path: Path) -> None:
    finding = pair(server_url, "redis", 150, 3, tmp_path)

    assert finding.startswith("redis: 150 messages, 3 kills, each applied once")
