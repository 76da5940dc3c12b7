"""The partitioned layout: the bodies of responses are in one partition for each day, apart from the small table of records.

`outbox db partition` switches this layout on, in PostgreSQL only. Then a trigger moves the body of each answer into the
partition of its day (UTC), and stores the day in the record. Code that writes records works with both layouts. If a day's
partition is missing, its bodies stay in the records, so no request fails. `outbox.sql.statements.stored_body` reads both.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Connection, text

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.identifiers import quoted
from outbox.sql.schema.tables import Tables

DAYS_AHEAD = 7
"""How many partitions are created in advance: enough for a long weekend without a dispatcher or maintenance."""

ONE_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Day:
    """A day's partition. is_attached: it is part of the bodies' table. is_pending: it is being detached."""

    day: date
    is_attached: bool
    is_pending: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The state of the bodies' table in the catalogue.

    is_on: new bodies go into it. is_owner: whether this role may drop partitions. days: the partitions, oldest first.
    """

    is_on: bool
    is_owner: bool
    today: date
    days: tuple[Day, ...]

    @property
    def ahead(self) -> int:
        """How many of the next days have a partition, without a gap. Zero: tomorrow's is missing."""
        present = {day.day for day in self.days if day.is_attached and not day.is_pending}
        ahead = 0
        while self.today + (ahead + 1) * ONE_DAY in present:
            ahead += 1
        return ahead

    @property
    def lacks_days(self) -> bool:
        """Whether partitions must be created."""
        return self.is_on and not (self.has_today and self.ahead >= DAYS_AHEAD)

    @property
    def has_today(self) -> bool:
        return any(day.day == self.today and day.is_attached for day in self.days)

    @property
    def alarm(self) -> str | None:
        """The problem with the next partitions, and what to do; None if there is no problem."""
        if not self.is_on or (self.has_today and self.ahead):
            return None
        missing = self.today if not self.has_today else self.today + ONE_DAY
        return (
            f"the partition for the response bodies of {missing} is missing: the bodies of that day are stored in the records,"
            " and no request fails. A running dispatcher, or `outbox maintenance`, should have created the partition: find out"
            " why it was not created"
        )


def body_tables(prefix: str) -> re.Pattern[str]:
    """The names of the bodies' table and of its partitions."""
    return re.compile(rf"{re.escape(prefix)}body(_\d{{8}})?")


def body_table(tables: Tables) -> str:
    """The quoted name of the bodies' table."""
    return quoted(f"{prefix_of(tables)}body", tables.record.schema)


def body_partition(tables: Tables, day: date) -> str:
    """The quoted name of the partition of `day`."""
    return quoted(f"{prefix_of(tables)}body_{day:%Y%m%d}", tables.record.schema)


def prefix_of(tables: Tables) -> str:
    return tables.record.name.removesuffix("record")


def read_layout(connection: Connection, tables: Tables) -> Layout | None:
    """The present layout, or None if partitions were never switched on. Locks nothing."""
    if not dialect_of(connection).has_catalog:
        return None
    prefix = prefix_of(tables)
    of = {"table": body_table(tables), "record": quoted(tables.record.name, tables.record.schema)}
    found = connection.execute(_LAYOUT, {**of, "trigger": f"{prefix}move_body"}).one()
    if found.is_owner is None:
        return None
    rows = connection.execute(_DAYS, {**of, "pattern": f"^{re.escape(prefix)}body_[0-9]{{8}}$"})
    days = tuple(Day(_day(row.name), row.is_attached, row.is_pending) for row in rows)
    return Layout(found.is_on, found.is_owner, found.today, days)


def _day(name: str) -> date:
    return datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date()


_LAYOUT = text("""
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass(:record) AND tgname = :trigger) AS is_on,
       (SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(:table)) AS is_owner,
       CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date) AS today
""")

# After a crash, a partition may be detached but not dropped. It is no child any more, so it is found by its name.
_DAYS = text("""
SELECT c.relname AS name, i.inhrelid IS NOT NULL AS is_attached, coalesce(i.inhdetachpending, false) AS is_pending
FROM pg_class AS c
LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid AND i.inhparent = to_regclass(:table)
WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass(:table))
    AND c.relkind = 'r' AND c.relname ~ :pattern
ORDER BY c.relname
""")
