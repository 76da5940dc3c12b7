"""The scheduled jobs: retention in small batches, the bodies' partitions, and gauges."""

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
from dispatchers.store.gauges import Gauge
from dispatchers.store.heartbeats import forget_dead
from dispatchers.store.protocol import Run, Store
from dispatchers.store.queries import read_lags
from outbox.sql.body_partitions import Layout, read_layout
from outbox.sql.dialect import database_now, sqlstate
from outbox.sql.schema import Tables

log = logging.getLogger("outbox.maintenance")

ROWS_MAX = 500  # a batch holds its locks for some 20 ms
BATCHES_MAX = 200  # of each step in one run: 100,000 rows, so that a backlog never hogs
PAUSE_RATIO = 2.0  # after each batch, for those who send: so that retention uses a third of one core at most
LAG_WARNED = timedelta(minutes=5)


# --- retention


class Maintenance:
    """Deletes what has outlived its use, a batch at a time; several at once divide the work.

    It goes through each table from the oldest row to the youngest that is old enough, and then begins again; rows that must
    stay are skipped.

    run: its way to the database. rows_max: how many rows a batch reads. pause_ratio: how long it pauses between two batches, for
    those who send, in multiples of what the first one took by `clock`: a busy machine needs longer pauses. dry: count, but delete
    nothing.
    """

    def __init__(
        self,
        run: Run,
        tables: Tables,
        retention: Retention,
        *,
        rows_max: int = ROWS_MAX,
        pause_ratio: float = PAUSE_RATIO,
        dry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._tables = tables
        self._retention = retention
        self._rows_max = rows_max
        self._pause_ratio = pause_ratio
        self._dry = dry
        self._clock = clock
        self._places: dict[str, Place | None] = dict.fromkeys(STEPS)

    async def sweep(self, *, batches_max: int | None = None) -> AsyncGenerator[tuple[str, Batch], None]:
        """Do one batch after another, at most `batches_max` of each step, and yield each: (step, what it did).

        Each step continues where the sweep before this one stopped, to its table's end. It may be left after any batch.
        """
        for name in STEPS:
            done = 0
            while batches_max is None or done < batches_max:
                began = self._clock()
                batch = await self._batch(name)
                took = self._clock() - began
                done += 1
                yield name, batch
                if batch.after is None:
                    break
                await asyncio.sleep(self._pause_ratio * took)

    async def run_once(self, stopping: asyncio.Event | None = None, *, batches_max: int = BATCHES_MAX) -> Counter[str]:
        """One bounded sweep, until `stopping` is set. Returns how many rows each step deleted.

        Raises what the database raises; batches before that one are committed.
        """
        deleted: Counter[str] = Counter()
        async with aclosing(self.sweep(batches_max=batches_max)) as sweep:
            async for name, batch in sweep:
                deleted[name] += batch.deleted
                if stopping is not None and stopping.is_set():
                    break
        return deleted

    async def _batch(self, name: str) -> Batch:
        scan = Scan(self._retention, self._rows_max, self._places[name], self._dry)
        batch = await self._run(partial(_work, name, self._tables, scan))
        self._places[name] = batch.after
        return batch


def _work(name: str, tables: Tables, scan: Scan, connection: Connection) -> Batch:
    return STEPS[name](connection, tables, scan)


async def retain(maintenance: Maintenance, stopping: asyncio.Event) -> None:
    """Run retention once, bounded, and log what was deleted."""
    deleted = await maintenance.run_once(stopping)
    if deleted.total():
        log.info("deleted %s", ", ".join(f"{deleted[name]} {name}" for name in STEPS))


async def forget_dead_dispatchers(run: Run, tables: Tables) -> int:
    """Delete the heartbeats of dispatchers that died long ago."""
    return await run(partial(_forget_dead, tables))


def _forget_dead(tables: Tables, connection: Connection) -> int:
    return forget_dead(connection, tables)


# --- the layout at scale


async def keep_bodies(run: Run, run_apart: Run, tables: Tables) -> None:
    """Make the partitions of the days to come, drop those that nothing needs, and report; an error if tomorrow's is missing.

    run_apart: runs work that may wait long for others' transactions.
    """
    layout = await run(lambda connection: read_layout(connection, tables))
    if layout is None:
        return
    if layout.lacks_days:
        layout = await _with_days(run, tables)
    if layout is not None and layout.alarm:
        log.error("%s", layout.alarm)
    drops = await run_apart(partial(drop_days, tables))
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
    """The layout with its partitions made, or as it was if that failed: then it has a reason to be reported."""
    try:
        added = await run(partial(add_days, tables))
        log.info("created %d body partitions for the coming days", added)
    except DBAPIError as error:
        log.warning("cannot create body partitions: %s; retried later", sqlstate(error.orig) or type(error).__name__)
    return await run(lambda connection: read_layout(connection, tables))


# --- gauges


async def report_gauges(store: Store) -> dict[str, Gauge]:
    """Log each destination's entries by state; as a warning if some are uncertain, since those need an operator."""
    gauges = await store.gauges()
    for destination, gauge in sorted(gauges.items()):
        level = logging.WARNING if gauge.states.get("uncertain") else logging.INFO
        counts = ", ".join(f"{count} {state}" for state, count in sorted(gauge.states.items()))
        log.log(level, "destination %r: %s%s", destination, counts, "" if gauge.is_whole else " or more")
    return gauges


async def report_lag(run: Run, tables: Tables) -> dict[str, timedelta]:
    """How long the oldest due entry of each destination has been waiting for a sender; logged from five minutes on.

    Destinations where nothing waits are left out. One probe of the index for each destination.
    """
    lags = await run(lambda connection: read_lags(connection, tables, database_now(connection)))
    for destination, lag in sorted(lags.items()):
        if lag >= LAG_WARNED:
            log.warning(
                "destination %r: its oldest due entry has waited %s and no dispatcher has claimed it", destination, lag
            )
    return lags
