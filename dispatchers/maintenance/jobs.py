"""The scheduled jobs: retention in small batches, the partitions of bodies, and gauges."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from dispatchers.maintenance.body_partitions import add_days, drop_days
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import STEPS, Batch, Place, Scan
from dispatchers.store.protocol import Run
from dispatchers.store.records.gauges import Gauge, read_gauges
from dispatchers.store.records.heartbeats import forget_dead
from dispatchers.store.records.queries import read_lags
from dispatchers.store.records.send_counts import forget_old
from outbox.sql.clock import database_now
from outbox.sql.errors.driver import sqlstate
from outbox.sql.schema.body_partitions import Layout, read_layout
from outbox.sql.schema.tables import Tables

log = logging.getLogger("outbox.maintenance")

MAX_ROWS = 500  # a batch holds its locks for about 20 ms
MAX_BATCHES = 200  # batches of each step in one run: 100,000 rows, so that a backlog cannot occupy the database
PAUSE_RATIO = 4.0  # pause after a batch, in multiples of its duration: retention uses at most a fifth of one core
LAG_WARNED = timedelta(minutes=5)


# --- retention


class Maintenance:
    """Deletes expired rows in batches. Several processes that run it at the same time divide the work.

    It reads each table from the oldest row to the last one that is old enough, and then begins again. Rows that must be kept
    are skipped.

    run: runs work in a transaction. max_rows: how many rows a batch reads. pause_ratio: the pause after a batch, in multiples of
    the batch's duration by `clock`, so that a busy database gets longer pauses. dry: count the rows, but delete nothing.
    """

    def __init__(
        self,
        run: Run,
        tables: Tables,
        retention: Retention,
        *,
        max_rows: int = MAX_ROWS,
        pause_ratio: float = PAUSE_RATIO,
        dry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._tables = tables
        self._retention = retention
        self._max_rows = max_rows
        self._pause_ratio = pause_ratio
        self._dry = dry
        self._clock = clock
        self._places: dict[str, Place | None] = dict.fromkeys(STEPS)

    async def sweep(self, *, max_batches: int | None = None) -> AsyncGenerator[tuple[str, Batch], None]:
        """Run at most `max_batches` batches of each step, and yield the step and the batch after each one.

        Each step continues where the last sweep stopped, until the end of its table. The caller may stop after any batch.
        """
        for name in STEPS:
            done = 0
            while max_batches is None or done < max_batches:
                began = self._clock()
                batch = await self._batch(name)
                took = self._clock() - began
                done += 1
                yield name, batch
                if batch.after is None:
                    break
                await asyncio.sleep(self._pause_ratio * took)

    async def run_once(self, stopping: asyncio.Event | None = None, *, max_batches: int = MAX_BATCHES) -> Counter[str]:
        """Sweep with a limited number of batches, or until `stopping` is set. Returns how many rows each step deleted.

        Raises what the database raises; the earlier batches are committed.
        """
        deleted: Counter[str] = Counter()
        async with aclosing(self.sweep(max_batches=max_batches)) as sweep:
            async for name, batch in sweep:
                deleted[name] += batch.deleted
                if stopping is not None and stopping.is_set():
                    break
        return deleted

    async def _batch(self, name: str) -> Batch:
        scan = Scan(self._retention, self._max_rows, self._places[name], self._dry)
        batch = await self._run(partial(_delete_next, name, self._tables, scan))
        self._places[name] = batch.after
        return batch


def _delete_next(name: str, tables: Tables, scan: Scan, connection: Connection) -> Batch:
    return STEPS[name](connection, tables, scan)


async def retain(maintenance: Maintenance, stopping: asyncio.Event) -> None:
    """Run retention once, with a limited number of batches, and log what was deleted."""
    deleted = await maintenance.run_once(stopping)
    if deleted.total():
        log.info("deleted %s", ", ".join(f"{deleted[name]} {name}" for name in STEPS))


async def forget_dead_dispatchers(run: Run, tables: Tables) -> int:
    """Delete the heartbeats of dispatchers that crashed long ago, and the counts of what was sent long ago."""

    def forget(connection: Connection) -> int:
        forget_old(connection, tables)
        return forget_dead(connection, tables)

    return await run(forget)


# --- the partitions of bodies


async def keep_bodies(run: Run, run_apart: Run, tables: Tables) -> None:
    """Create the partitions of the next days, and drop those that no record needs. Log an error if tomorrow's is missing.

    run_apart: runs work that may wait long for other transactions.
    """
    layout = await run(lambda connection: read_layout(connection, tables))
    if layout is None:
        return
    if layout.lacks_days:
        layout = await _with_days(run, tables)
    if layout is not None and layout.alarm:
        log.error("%s", layout.alarm)
    drops = await run_apart(partial(drop_days, tables=tables))
    if drops.dropped:
        log.info("dropped the body partitions of %s", ", ".join(map(str, drops.dropped)))
    if layout is not None and drops.due and not layout.is_owner:
        log.warning(
            "cannot drop %d expired body partitions, the oldest of %s: this role does not own the tables; run `outbox"
            " maintenance` as their owner",
            len(drops.due),
            drops.due[0],
        )


async def _with_days(run: Run, tables: Tables) -> Layout | None:
    """The layout after the creation of partitions. If that failed, the layout as it is: its `alarm` is then logged."""
    try:
        added = await run(partial(add_days, tables=tables))
        log.info("created %d body partitions for the coming days", added)
    except DBAPIError as error:
        log.warning("cannot create body partitions: %s; retried later", sqlstate(error.orig) or type(error).__name__)
    return await run(lambda connection: read_layout(connection, tables))


# --- gauges


async def report_gauges(run: Run, tables: Tables) -> dict[str, Gauge]:
    """Log each destination's entries by state. If some are uncertain, log a warning, because these need an operator."""
    gauges = await run(lambda connection: read_gauges(connection, tables))
    for destination, gauge in sorted(gauges.items()):
        level = logging.WARNING if gauge.states.get("uncertain") else logging.INFO
        counts = ", ".join(f"{count} {state}" for state, count in sorted(gauge.states.items()))
        log.log(level, "destination %r: %s%s", destination, counts, "" if gauge.is_whole else " or more")
    return gauges


async def report_lag(run: Run, tables: Tables) -> dict[str, timedelta]:
    """How long the oldest due entry of each destination has been waiting; logged if it is five minutes or more.

    Destinations without waiting entries are left out. Each destination costs one probe of the index.
    """
    lags = await run(lambda connection: read_lags(connection, tables, database_now(connection)))
    for destination, lag in sorted(lags.items()):
        if lag >= LAG_WARNED:
            log.warning(
                "destination %r: its oldest due entry has waited %s and no dispatcher has claimed it", destination, lag
            )
    return lags
