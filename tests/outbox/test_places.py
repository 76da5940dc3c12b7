"""Where a database is, as errors show it: enough to find the wrong one, and no password."""

import pytest
import sqlalchemy as sa

from outbox.sql.connections.places import place_of


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql+psycopg://shop:hunter2@db.internal:5433/orders", "'orders' at db.internal:5433"),
        ("postgresql+psycopg://shop:hunter2@db.internal/orders?password=hunter2", "'orders' at db.internal"),
        ("postgresql+asyncpg://shop:hunter2@/orders?host=/var/run&port=5433", "'orders' at /var/run:5433"),
        ("postgresql+psycopg://@/orders?host=one&host=two", "'orders' at one,two"),
        ("postgresql+psycopg://?password=hunter2", "'(default)'"),
        ("sqlite:////srv/shop.db", "'/srv/shop.db'"),
        ("sqlite://", "':memory:'"),
    ],
)
def test_a_place_is_the_name_the_host_and_the_port(url: str, place: str) -> None:
    assert place_of(sa.create_engine(url)) == place
