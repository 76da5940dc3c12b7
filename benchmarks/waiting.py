"""Many entries in one statement, written by SQL as `enqueue` would write them."""

from typing import Any, LiteralString
from uuid import uuid4

import psycopg

ENTRIES: LiteralString = """
    WITH written AS (INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id,
        destination, payload, options, headers, schema_version, due_at, created_at)
    SELECT md5(%(salt)s || n)::uuid, 'bench', '', 'app', %(salt)s || n, %(name)s || '.send', '', 'k1',
        sha256(convert_to(%(salt)s || n, 'UTF8')), md5(%(salt)s || n)::uuid, destination, %(payload)s, '{}', '{}', 1, at, at
    FROM (SELECT n, now() - %(age)s::interval - (%(count)s - n) * %(apart)s::interval AS at,
            %(name)s || CASE WHEN %(destinations)s > 1 THEN (n %% %(destinations)s)::text ELSE '' END AS destination
        FROM generate_series(1, %(count)s) AS n) AS numbered
    RETURNING id, destination, due_at, created_at)
"""
QUEUE = """
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)
    SELECT id, destination, 'pending', due_at, 0, 0, false, 0 FROM written
"""
SETTLEMENTS = """
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
    SELECT id, 'delivered', 1, 1, 0, created_at FROM written
"""
APART = "1 ms"
"""Between the due times of two entries: no queue fills within one instant, and a cursor passes over what was settled."""
PAYLOAD = b'{"amount": 2000, "currency": "eur", "customer": "cus_1", "description": "one line of an order"}'


def add_waiting(connection: psycopg.Connection[Any], count: int, name: str = "noop", *, destinations: int = 1) -> None:
    """Entries that are due; of several destinations their numbers are added to the name."""
    _add(connection, QUEUE, count, name, destinations, "1 second")


def add_settled(connection: psycopg.Connection[Any], count: int, age: str) -> None:
    """Entries that were delivered so long ago."""
    _add(connection, SETTLEMENTS, count, "noop", 1, age)


def _add(
    connection: psycopg.Connection[Any], then: LiteralString, count: int, name: str, destinations: int, age: str
) -> None:
    # As long as the parents of `enqueue`: otherwise VACUUM finds room for one of its rows on each page.
    salt = uuid4().hex[:8]
    values: dict[str, Any] = {
        "apart": APART,
        "salt": salt,
        "payload": PAYLOAD,
        "name": name,
        "destinations": destinations,
        "count": count,
        "age": age,
    }
    connection.execute(ENTRIES + then, values)
