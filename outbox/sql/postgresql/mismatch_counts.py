"""Counts, in memory, the requests that came with the key of another request, and writes the SQL that stores the counts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import NamedTuple
from uuid import UUID

from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import Tables

MAX_IDS = 1000
"""The counts of so many records are kept for each schema while they cannot be written; those of others are dropped."""


class CountTables(NamedTuple):
    """The tables of mismatches and of records, named as in SQL."""

    mismatch: str
    record: str


class Mismatch(NamedTuple):
    """A request with the key of the record `id`, which another request has made."""

    tables: CountTables
    id: UUID

    @classmethod
    def of(cls, tables: Tables, id: UUID) -> "Mismatch":
        return cls(CountTables(*(quoted_table(table) for table in (tables.mismatch, tables.record))), id)


class MismatchCounts:
    """How many requests have come with each key since the counts were taken last. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[CountTables, Counter[UUID]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, mismatch: Mismatch, requests: int = 1) -> bool:
        """Returns whether nothing was counted before it."""
        with self._lock:
            is_first = not self._counts
            counts = self._counts.setdefault(mismatch.tables, Counter())
            if mismatch.id in counts or len(counts) < MAX_IDS:
                counts[mismatch.id] += requests
            return is_first

    def take(self) -> dict[CountTables, Counter[UUID]]:
        with self._lock:
            taken, self._counts = self._counts, {}
            return taken

    def give_back(self, tables: CountTables, counts: Mapping[UUID, int]) -> None:
        """What could not be stored."""
        for id, requests in counts.items():
            self.add(Mismatch(tables, id), requests)


def statements(tables: CountTables, counts: Mapping[UUID, int]) -> Iterator[str]:
    """One transaction, which waits for no disk. The hints wait for it, so it gives up soon, and before another one that waits for
    it searches for a deadlock: maintenance may be deleting the records.

    The rows are locked in the order of their ids. A count whose record is gone is left out. The caller ends the connection if a
    statement fails, and so the transaction.
    """
    yield "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
    yield "SET LOCAL lock_timeout = '100ms'"
    yield "SET LOCAL statement_timeout = '1s'"
    yield "SET LOCAL synchronous_commit = off"
    yield _upsert(tables, counts)
    yield "COMMIT"


def _upsert(tables: CountTables, counts: Mapping[UUID, int]) -> str:
    rows = ", ".join(f"('{id}'::uuid, {count}::bigint)" for id, count in counts.items())
    return (
        f"INSERT INTO {tables.mismatch} AS m (id, requests, first_at, last_at)"
        f" SELECT r.id, n.requests, statement_timestamp(), statement_timestamp() FROM (VALUES {rows}) AS n (id, requests)"
        f" JOIN {tables.record} AS r ON r.id = n.id ORDER BY r.id"
        " ON CONFLICT (id) DO UPDATE SET requests = m.requests + EXCLUDED.requests, last_at = EXCLUDED.last_at"
    )
