"""Maintains the partitions of responses' bodies: creates those of the next days, and drops those that no record needs.

It does nothing unless `outbox db partition` has switched this layout on.
"""

from datetime import date, timedelta
from typing import NamedTuple

from sqlalchemy import Connection, text

from outbox.sql.schema.body_partitions import ONE_DAY, Day, body_partition, body_table, prefix_of, read_layout
from outbox.sql.schema.identifiers import quoted
from outbox.sql.schema.tables import Tables

LOCK_WAIT_SECONDS = 5
"""How long the creation of a partition waits for other schema changes of the bodies' table. Readers and writers do not wait."""

DROPPING_LOCK = int.from_bytes(b"bodies")
"""The advisory transaction lock for dropping days: if one maintenance run holds it, another one drops nothing."""

GRACE = timedelta(hours=1)
"""How long retention may delete the expired records of a day, before the remaining bodies are carried over."""

MAX_CARRIED = 10_000
"""At most this many bodies, of records that cannot be deleted yet, are carried over. A day with more of them is kept."""

BATCH_ROWS = 500


class Drops(NamedTuple):
    """dropped: the days whose partitions were dropped. due: the days that could be dropped but still exist."""

    dropped: tuple[date, ...] = ()
    due: tuple[date, ...] = ()


def add_days(connection: Connection, tables: Tables) -> int:
    """Create the missing partitions of today and the next days. Returns how many were created."""
    connection.execute(text(f"SELECT set_config('lock_timeout', '{LOCK_WAIT_SECONDS}s', true)"))
    function = quoted(f"{prefix_of(tables)}add_body_days", tables.record.schema)
    return int(connection.execute(text(f"SELECT {function}()")).scalar_one())


def drop_days(connection: Connection, tables: Tables, *, dry: bool = False) -> Drops:
    """Detach and drop the days that no record needs. Only the owner of the tables can do this. dry: only return these days.

    All statements run on a second connection without a transaction, because DETACH CONCURRENTLY needs that. Detaching waits for
    all current readers and writers of bodies, without a limit, but no other transaction waits for it. Meanwhile the transaction
    of `connection` only holds the advisory lock.
    """
    if not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": DROPPING_LOCK}).scalar_one():
        return Drops()
    # A savepoint, because it releases the snapshot of the last SELECT; FINALIZE would wait for that snapshot.
    with connection.begin_nested(), connection.engine.connect() as other:
        other.execution_options(isolation_level="AUTOCOMMIT")
        layout = read_layout(other, tables)
        if layout is None:
            return Drops()
        # Keep today and yesterday: a transaction that began before midnight may not have committed yet.
        old = [day for day in layout.days if day.day < layout.today - ONE_DAY]
        due = [day for day in old if not _is_needed(other, tables, day)]
        may_drop = layout.is_owner and not dry
        dropped = [day.day for day in due if may_drop and _drop(other, tables, day)]
    return Drops(tuple(dropped), tuple(day.day for day in due if day.day not in dropped))


def _is_needed(connection: Connection, tables: Tables, day: Day) -> bool:
    """Whether a record with a body of this day has not expired, or only recently. One probe of an index."""
    query = f"SELECT EXISTS (SELECT FROM {_record(tables)} WHERE body_day = :day AND keep_until >= clock_timestamp() - :grace)"
    return bool(connection.execute(text(query), {"day": day.day, "grace": GRACE}).scalar_one())


def _drop(connection: Connection, tables: Tables, day: Day) -> bool:
    """Detach a day, and drop it if no record refers to it afterwards. Returns whether it was dropped."""
    body, partition = body_table(tables), body_partition(tables, day.day)
    if day.is_pending:  # another process crashed while its DETACH waited
        connection.exec_driver_sql(f"ALTER TABLE {body} DETACH PARTITION {partition} FINALIZE")
    elif day.is_attached:
        if not _carry_over(connection, tables, day):
            return False
        connection.exec_driver_sql(f"ALTER TABLE {body} DETACH PARTITION {partition} CONCURRENTLY")
    if _is_named(connection, tables, day):  # a transaction that took longer than a day has stored a body there
        until = day.day + ONE_DAY
        connection.exec_driver_sql(
            f"ALTER TABLE {body} ATTACH PARTITION {partition} FOR VALUES FROM ('{day.day}') TO ('{until}')"
        )
        return False
    connection.exec_driver_sql(f"DROP TABLE {partition}")
    return True


def _carry_over(connection: Connection, tables: Tables, day: Day) -> bool:
    """Copy the bodies of expired records with unsettled entries into today's partition.

    Returns whether no record refers to the day any more.
    """
    record = _record(tables)
    body_of = quoted(f"{prefix_of(tables)}body_of", tables.record.schema)
    remaining = text(
        f"SELECT count(*) FROM (SELECT FROM {record} WHERE body_day = :day LIMIT {MAX_CARRIED + 1}) AS remaining"
    )
    if connection.execute(remaining, {"day": day.day}).scalar_one() > MAX_CARRIED:
        return False
    carry = text(
        f"UPDATE {record} SET body = {body_of}(id, body_day), body_day = NULL WHERE id = ANY(ARRAY("
        f"SELECT id FROM {record} WHERE body_day = :day LIMIT {BATCH_ROWS} FOR UPDATE SKIP LOCKED)) AND body_day = :day"
    )
    while connection.execute(carry, {"day": day.day}).rowcount:
        pass
    return not _is_named(connection, tables, day)


def _is_named(connection: Connection, tables: Tables, day: Day) -> bool:
    query = text(f"SELECT EXISTS (SELECT FROM {_record(tables)} WHERE body_day = :day)")
    return bool(connection.execute(query, {"day": day.day}).scalar_one())


def _record(tables: Tables) -> str:
    return quoted(tables.record.name, tables.record.schema)
