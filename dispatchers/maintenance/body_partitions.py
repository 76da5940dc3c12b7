"""Keep the partitions of responses' bodies: make those of the days to come, take away those that nothing needs any more.

Both do nothing where `outbox db partition` never switched that layout on.
"""

from datetime import date, timedelta
from typing import NamedTuple

from sqlalchemy import Connection, text

from outbox.sql.body_partitions import ONE_DAY, Day, body_partition, body_table, prefix_of, read_layout
from outbox.sql.identifiers import quoted
from outbox.sql.schema import Tables

LOCK_WAIT_SECONDS = 5
"""How long the making of a partition waits for other changes of the bodies' table; readers and writers do not queue after it."""

DROPPING_LOCK = int.from_bytes(b"bodies")
"""The advisory lock, of a transaction, under which days are dropped: a second maintenance leaves it to the first."""

GRACE = timedelta(hours=1)
"""How long after its last record's time a day is left to the deletion of records, before what remains is carried over."""

CARRIED_MAX = 10_000
"""So many bodies of records that cannot be deleted are carried over to let a day go; a day with more of them stays."""

BATCH_ROWS = 500


class Drops(NamedTuple):
    """dropped: the days whose bodies are gone. due: those that need not be kept and are there still."""

    dropped: tuple[date, ...] = ()
    due: tuple[date, ...] = ()


def add_days(tables: Tables, connection: Connection) -> int:
    """Make the partitions of today and the days to come that are missing. Returns how many were."""
    connection.execute(text(f"SELECT set_config('lock_timeout', '{LOCK_WAIT_SECONDS}s', true)"))
    function = quoted(f"{prefix_of(tables)}add_body_days", tables.record.schema)
    return int(connection.execute(text(f"SELECT {function}()")).scalar_one())


def drop_days(tables: Tables, connection: Connection, *, dry: bool = False) -> Drops:
    """Detach and drop the days that no record needs, for the owner of the tables only. dry: only say which they are.

    What it does, it does on a second connection of the engine, statement by statement: nothing can be detached concurrently in
    a transaction. Detaching waits for all current readers and writers of bodies, without limit; no other transaction waits for
    it. `connection`'s transaction only holds the lock meanwhile.
    """
    if not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": DROPPING_LOCK}).scalar_one():
        return Drops()
    # After a savepoint: the snapshot of the last SELECT is kept up to the next statement, and finalizing would wait for it.
    with connection.begin_nested(), connection.engine.connect() as other:
        other.execution_options(isolation_level="AUTOCOMMIT")
        layout = read_layout(other, tables)
        if layout is None:
            return Drops()
        # Not today and not yesterday: a transaction that began before midnight may not have committed yet.
        old = [day for day in layout.days if day.day < layout.today - ONE_DAY]
        due = [day for day in old if not _is_needed(other, tables, day)]
        may_drop = layout.is_owner and not dry
        dropped = [day.day for day in due if may_drop and _drop(other, tables, day)]
    return Drops(tuple(dropped), tuple(day.day for day in due if day.day not in dropped))


def _is_needed(connection: Connection, tables: Tables, day: Day) -> bool:
    """Whether the time of a record has not passed, or only just, whose body is of this day. One probe of an index."""
    query = f"SELECT EXISTS (SELECT FROM {_record(tables)} WHERE body_day = :day AND keep_until >= clock_timestamp() - :grace)"
    return bool(connection.execute(text(query), {"day": day.day, "grace": GRACE}).scalar_one())


def _drop(connection: Connection, tables: Tables, day: Day) -> bool:
    """Detach a day, and drop it if even then no record names it. Returns whether it is gone."""
    body, partition = body_table(tables), body_partition(tables, day.day)
    if day.is_pending:  # a process died while it waited
        connection.exec_driver_sql(f"ALTER TABLE {body} DETACH PARTITION {partition} FINALIZE")
    elif day.is_attached:
        if not _carry_over(connection, tables, day):
            return False
        connection.exec_driver_sql(f"ALTER TABLE {body} DETACH PARTITION {partition} CONCURRENTLY")
    if _is_named(connection, tables, day):  # by a transaction that was longer than a day
        until = day.day + ONE_DAY
        connection.exec_driver_sql(
            f"ALTER TABLE {body} ATTACH PARTITION {partition} FOR VALUES FROM ('{day.day}') TO ('{until}')"
        )
        return False
    connection.exec_driver_sql(f"DROP TABLE {partition}")
    return True


def _carry_over(connection: Connection, tables: Tables, day: Day) -> bool:
    """Store again, as of today, the bodies of the few expired records whose entries are unsettled.

    Returns whether no record names the day any more.
    """
    record = _record(tables)
    body_of = quoted(f"{prefix_of(tables)}body_of", tables.record.schema)
    remaining = text(
        f"SELECT count(*) FROM (SELECT FROM {record} WHERE body_day = :day LIMIT {CARRIED_MAX + 1}) AS remaining"
    )
    if connection.execute(remaining, {"day": day.day}).scalar_one() > CARRIED_MAX:
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
