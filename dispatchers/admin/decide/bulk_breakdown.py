"""The entries that a decision in bulk would change: counted by operation, source, parent and state, with some samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from uuid import UUID

from sqlalchemy import Connection, select

from dispatchers.admin.read.entry_filter import Filter
from outbox.sql.schema.tables import Tables

MAX_IDS = 1000  # in one statement
MAX_SAMPLES = 5
MAX_VALUES = 5
"""How many values of each kind are listed; the others are counted together."""
OTHERS = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An entry, without what was sent: `outbox show --payload` shows that, and records who saw it."""

    id: UUID
    operation: str
    source: str
    parent: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """counts: for `operation`, `source`, `parent` and `state`, how many entries have which value; the most frequent come first.

    `parent` counts the beginnings of the parent keys, up to the last `:` or `/`. samples: some of the entries.
    """

    counts: Mapping[str, Mapping[str, int]]
    samples: Sequence[Sample]


def break_down(connection: Connection, tables: Tables, wanted: Filter, ids: Sequence[UUID]) -> Breakdown:
    """Break down these entries, which `wanted` has selected. Reads each of them by its key."""
    entry, rows = tables.entry, wanted.rows(tables)
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("operation", "source", "parent", "state")}
    rest = iter(ids)
    while some := list(islice(rest, MAX_IDS)):
        columns = select(entry.c.operation, entry.c.source, entry.c.parent, rows.c.state)
        for row in connection.execute(columns.join(rows, rows.c.id == entry.c.id).where(entry.c.id.in_(some))):
            values = {**row._mapping, "parent": beginning_of(row.parent)}
            for name, count in counts.items():
                count[values[name]] += 1
    return Breakdown(
        counts={name: _most_frequent(count) for name, count in counts.items()},
        samples=_samples(connection, tables, ids),
    )


def beginning_of(parent: str) -> str:
    """`order:` of `order:17`; empty for a parent without `:` and `/`, such as a UUID."""
    return parent[: max(parent.rfind(":"), parent.rfind("/")) + 1]


def _most_frequent(count: Counter[str]) -> dict[str, int]:
    listed = dict(count.most_common(MAX_VALUES))
    others = count.total() - sum(listed.values())
    return listed | {OTHERS: others} if others else listed


def _samples(connection: Connection, tables: Tables, ids: Sequence[UUID]) -> list[Sample]:
    entry, chosen = tables.entry, ids[:: max(len(ids) // MAX_SAMPLES, 1)][:MAX_SAMPLES]
    columns = select(entry.c.id, entry.c.operation, entry.c.source, entry.c.parent, entry.c.created_at)
    found = {row.id: Sample(**row._mapping) for row in connection.execute(columns.where(entry.c.id.in_(chosen)))}
    return [found[id] for id in chosen if id in found]
