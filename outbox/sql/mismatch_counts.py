"""Counts, in memory, the requests that came with the key of another request, and writes the SQL that stores the counts."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

from outbox.sql.identifiers import quoted
from outbox.sql.schema import Tables

IDS_MAX = 1000
"""So many records' counts are kept while they cannot be written; those of others are dropped."""


class Mismatch(NamedTuple):
    """A request with the key of the record `id`, which another request has made. Both tables are named as in SQL."""

    mismatch_table: str
    record_table: str
    id: UUID

    @classmethod
    def of(cls, tables: Tables, id: UUID) -> "Mismatch":
        mismatch, record = (quoted(table.name, table.schema) for table in (tables.mismatch, tables.record))
        return cls(mismatch, record, id)


class MismatchCounts:
    """How many requests have come with each key since the counts were stored last."""

    def __init__(self) -> None:
        self._counts = Counter[Mismatch]()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, mismatch: Mismatch) -> None:
        if mismatch in self._counts or len(self._counts) < IDS_MAX:
            self._counts[mismatch] += 1

    def clear(self) -> None:
        self._counts.clear()

    def statements(self) -> Iterator[str]:
        """One transaction, which waits for no disk, and gives up soon if another one holds a lock.

        The rows are locked in the order of their ids. A count whose record is gone is left out. The caller ends the
        connection if a statement fails, and so the transaction.
        """
        yield "BEGIN ISOLATION LEVEL READ COMMITTED"
        yield "SET LOCAL lock_timeout = '1s'"
        yield "SET LOCAL statement_timeout = '3s'"
        yield "SET LOCAL synchronous_commit = off"
        for tables in sorted({each[:2] for each in self._counts}):
            counts = {each.id: count for each, count in self._counts.items() if each[:2] == tables}
            yield _upsert(*tables, counts)
        yield "COMMIT"


def _upsert(mismatch_table: str, record_table: str, counts: dict[UUID, int]) -> str:
    rows = ", ".join(f"('{id}'::uuid, {count}::bigint)" for id, count in counts.items())
    return (
        f"INSERT INTO {mismatch_table} AS m (id, requests, first_at, last_at)"
        f" SELECT r.id, n.requests, clock_timestamp(), clock_timestamp() FROM (VALUES {rows}) AS n (id, requests)"
        f" JOIN {record_table} AS r ON r.id = n.id ORDER BY r.id"
        " ON CONFLICT (id) DO UPDATE SET requests = m.requests + EXCLUDED.requests, last_at = EXCLUDED.last_at"
    )
