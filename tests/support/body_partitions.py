"""What the tests of the layout at scale share: a switched database, days that pass, and the contents of each partition."""

import time
from datetime import date

import sqlalchemy as sa

from dispatchers.maintenance.body_partitions import Drops, add_days, drop_days
from outbox import migrations
from outbox.sql.schema.body_partitions import Layout, body_partition, read_layout
from support.database import TABLES, Database
from support.retention import DAY, elapse


def switch_on(database: Database) -> None:
    """Not within the last half minute before midnight: the day must not change during a test."""
    with database.engine.connect() as connection:
        left = connection.execute(
            sa.text("SELECT 86400 - extract(epoch FROM clock_timestamp() AT TIME ZONE 'UTC')::bigint % 86400")
        ).scalar_one()
    if left < 30:
        time.sleep(left + 1)
    migrations.partition(database.engine)


def today(database: Database) -> date:
    return layout(database).today


def layout(database: Database) -> Layout:
    with database.engine.connect() as connection:
        found = read_layout(connection, TABLES)
    assert found is not None
    return found


def days_pass(database: Database, days: int) -> None:
    """As if all that is in the outbox had happened so many days earlier, and partitions had been made day by day."""
    elapse(database, days * DAY)
    with database.engine.begin() as connection:
        stored = connection.execute(sa.text("SELECT DISTINCT day FROM outbox_body")).scalars().all()
        for day in stored:
            _make_partition(connection, day - days * DAY)
        connection.execute(sa.text("UPDATE outbox_body SET day = day - :days"), {"days": days})
        connection.execute(sa.text("UPDATE outbox_record SET body_day = body_day - :days"), {"days": days})
        now = connection.execute(sa.text("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")).scalar_one()
        for day in stored:
            if day < now and day + days * DAY not in stored:  # empty now
                connection.exec_driver_sql(f"DROP TABLE {body_partition(TABLES, day)}")


def _make_partition(connection: sa.Connection, day: date) -> None:
    values = f"FROM ('{day}') TO ('{day + DAY}')"
    partition = body_partition(TABLES, day)
    connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {partition} PARTITION OF outbox_body FOR VALUES {values}")


def take_away(database: Database, day: date) -> None:
    """As if no maintenance had made the partition of this day."""
    database.execute(sa.text(f"DROP TABLE {body_partition(TABLES, day)}"))


def stored_bodies(database: Database) -> list[tuple[date, bytes]]:
    """The contents of the partitions."""
    with database.engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT day, body FROM outbox_body ORDER BY day, body"))
        return [(row.day, row.body) for row in rows]


def add(database: Database) -> int:
    with database.engine.begin() as connection:
        return add_days(connection, TABLES)


def drop(database: Database, *, dry: bool = False) -> Drops:
    with database.engine.begin() as connection:
        return drop_days(connection, TABLES, dry=dry)
