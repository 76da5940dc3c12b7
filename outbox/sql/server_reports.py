"""Reports of a server about itself and its tables: the values that each dialect returns."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Holder:
    """What keeps old row versions. held_seconds: for how long; None for a replication slot that nothing reads."""

    what: str
    held_seconds: float | None


@dataclass(frozen=True, slots=True)
class TableHealth:
    """A table, as the server's statistics show it; on MariaDB its name, rows and sizes only.

    alive, dead: its rows, estimated. vacuums: whether autovacuum works on it. vacuum_after: autovacuum begins at so many dead
    rows. heap_bytes, index_bytes: on disk; the first without its TOAST table. vacuumed_at: its last vacuum, by hand or not.
    updates, hot_updates: since the statistics were reset; a HOT update wrote to no index.
    """

    name: str
    alive: int
    dead: int
    vacuums: bool
    vacuum_after: int = 0
    heap_bytes: int = 0
    index_bytes: int = 0
    vacuumed_at: datetime | None = None
    analyzed_at: datetime | None = None
    updates: int = 0
    hot_updates: int = 0


class ServerIdentity(NamedTuple):
    """What the server says of itself, by which a restore, a copy and a promotion are found. None: it does not say."""

    checked_at: datetime
    system_identifier: str | None = None
    timeline: str | None = None
    lsn: str | None = None
    place: str | None = None
