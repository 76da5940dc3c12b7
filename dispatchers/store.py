"""What the dispatcher needs of a database, whichever it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from dispatchers.callbacks import Calls, OnCompleted
from dispatchers.lifecycle import Claimed, ClaimRequest, End, Ending
from dispatchers.marks import Mark, Watched
from dispatchers.pressure import Pressures
from dispatchers.sql_accepted import Accepted
from dispatchers.sql_looks import Wanted
from outbox.keys import KeyFields

CALLBACKS_AT_ONCE = 4
"""Each holds a connection of the pool, whose default size is five."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one round trip brought: ids whose settling took effect, and new claims.

    passed_over: how many were due, but are not the heads of their lanes.
    pressures: the destinations' rows that were locked for the request's `pressing`; news of others were not taken.
    """

    settled: set[UUID] = field(default_factory=set)
    claimed: list[Claimed] = field(default_factory=list)
    passed_over: int = 0
    pressures: Pressures | None = None


class Store(Protocol):
    """What the dispatcher needs of a database. A simulation hands in one of its own."""

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        """Settle what is still ours, then claim, in one transaction that is committed on return."""
        ...

    async def settle_with(self, entry: Claimed, end: End, calls: Calls) -> bool:
        """Settle one entry and run `calls` in the same transaction, if the lease is still ours; returns whether it was.

        The transaction has the engine's own isolation level, which the app may count on in its callback.

        Raises `CallbackFailed`, `NoTransaction` on an engine in autocommit mode, and what the database raises; nothing is
        changed then.
        """
        ...

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        """The next accepted requests, oldest first; fewer than `ACCEPTED_MAX` at the end."""
        ...

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        """Run the completion of an accepted request and store its response, if every entry has ended; returns whether.

        Raises as `settle_with` does.
        """
        ...

    @property
    def takes_async_callbacks(self) -> bool:
        """Whether a callback may be a coroutine function."""
        ...

    async def destinations(self) -> list[str]:
        """Every destination that has unsettled entries."""
        ...

    async def seek(self, wanted: Wanted, quiescence: timedelta, after: UUID | None) -> UUID | None:
        """Have a page of those uncertain entries looked for that nobody has looked for yet: see `sql_looks.seek`."""

    async def watch(self, env: str, known: Mark | None) -> Watched:
        """Compare the database with the mark of its history and with `known`, which this process remembers of it.

        Where they differ every dispatcher holds; else the mark is renewed when it is old. What it comes to is committed on
        return. A database that cannot lose anything has no mark.
        """
        ...

    async def pressures(self) -> Pressures:
        """Of the destinations on which something weighs, or that were paused once."""
        ...

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        """The fields from which an entry's keys derive: needed for another key epoch only."""
        ...

    async def gauges(self) -> dict[str, dict[str, int]]:
        """How many unsettled entries there are: {destination: {state: count}}."""
        ...

    async def unknown_kid(self, known: Sequence[str]) -> str | None:
        """A key id among unsettled entries that is not in `known`, if there is one."""
        ...

    async def foreign_env(self, env: str) -> str | None:
        """The name of another deployment among unsettled entries that are not held, if there is one."""
        ...

    async def check(self) -> None:
        """Raise `SchemaError` if the tables are not there, or not those that this release needs."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...
