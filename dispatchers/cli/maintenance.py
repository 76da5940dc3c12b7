"""`outbox maintenance`: run retention by hand or from cron, until nothing is left to delete."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dispatchers.cli.connections import deciding, runner
from dispatchers.cli.options import Since, Target
from dispatchers.cli.output import answer, one_of_several
from dispatchers.cli.over_databases import over_databases

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dispatchers.maintenance.jobs import Maintenance
    from dispatchers.maintenance.retention_sql import Batch
    from outbox.sql.schema.tables import Tables

Result = TypeVar("Result")
Advance = Callable[[str, "Batch"], None]

BATCHES_A_LINE = 100  # without a terminal: a line for each 50,000 rows


class Span(Since):
    """A span such as `90s`, `15m`, `2h`, `35d` or `4w`, as a timedelta."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        try:
            span = super().convert(value, param, ctx)
        except click.BadParameter:
            span = None
        if span is None or isinstance(span, datetime):
            self.fail(f"{value!r} is not a span such as 90s, 15m, 2h, 35d or 4w", param, ctx)
        return span


class Window(Span):
    """A span, or `forever`."""

    name = "span|forever"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "forever":
            from dispatchers.time_limits import FOREVER

            return FOREVER
        return super().convert(value, param, ctx)


@click.command()
@click.option(
    "--window",
    "windows",
    type=Window(),
    multiple=True,
    required=True,
    help="Longest window of all adapters that send from this database; add `--window forever` if one declares FOREVER."
    " Required, because with too short a window a key could be deleted that a service still remembers.",
)
@click.option(
    "--retention",
    type=Span(),
    default=None,
    show_default="35d",
    help="How long settled entries are kept; at least the longest window plus a day, and longer than your callers retry: a"
    " request that is repeated after its entry was deleted causes a new effect.",
)
@click.option("--dry-run", is_flag=True, help="Only count the rows that would be deleted.")
@partial(over_databases, is_long=True)
def maintenance(target: Target, windows: tuple[Any, ...], retention: timedelta | None, dry_run: bool) -> None:
    """Delete settled entries and records past their retention.

    Deletes records past their retention, settled entries with their events, and tombstones of keys that no service
    remembers. Never deletes an unsettled entry. Uses short transactions. You can run it while the app works, and stop it at
    any time. A running dispatcher also deletes these rows.
    """
    from dispatchers.maintenance.audit_log import delete_old_decisions
    from dispatchers.maintenance.jobs import Maintenance
    from dispatchers.maintenance.retention import Retention
    from dispatchers.maintenance.retention_sql import STEPS, overdue
    from dispatchers.settings import RETENTION
    from dispatchers.store.records.heartbeats import forget_dead
    from dispatchers.store.records.send_counts import forget_old

    spans = Retention.of(RETENTION if retention is None else retention, windows)
    with deciding(target) as (connection, tables):
        engine = connection.engine
        whole = overdue(connection, tables, spans)
        if not dry_run:
            forget_dead(connection, tables)
            delete_old_decisions(connection, tables)
            forget_old(connection, tables)
    with engine.connect() as connection:
        with _progress(whole) as advance:
            deleted = asyncio.run(_sweep(Maintenance(runner(connection), tables, spans, dry=dry_run), advance))
        bodies, alarm = _keep_bodies(connection, tables, dry=dry_run)
    counts = {name: deleted[name] for name in STEPS}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = [f"{'would delete' if dry_run else 'deleted'} {summary}"]
    if bodies:
        lines.append(bodies.summary(dry=dry_run))
    answer({"dry_run": dry_run, "deleted": counts, **({"bodies": bodies} if bodies else {})}, "\n".join(lines))
    if alarm:
        raise click.ClickException(alarm)


@dataclass(frozen=True)
class Bodies:
    """What was done to the partitions of bodies.

    due: days that need not be kept, and are there still. why: for what reason. days_ahead: for how many there is a partition.
    """

    added: int
    dropped: tuple[date, ...]
    due: tuple[date, ...]
    why: str | None
    days_ahead: int

    def summary(self, *, dry: bool) -> str:
        days = _listed(self.due if dry else self.dropped)
        text = f"{'would drop' if dry else 'dropped'} the partitions of {days}; partitions exist for {self.days_ahead} days ahead"
        return f"{text}\nnot dropped: {_listed(self.due)}: {self.why}" if self.why else text


def _listed(days: tuple[date, ...]) -> str:
    return ", ".join(map(str, days)) or "no day"


def _keep_bodies(connection: "Connection", tables: "Tables", *, dry: bool) -> tuple[Bodies | None, str | None]:
    """What was done, and what is wrong; nothing where the layout at scale was never switched on."""
    from dispatchers.maintenance.body_partitions import add_days, drop_days
    from outbox.sql.schema.body_partitions import read_layout

    with connection.begin():
        layout = read_layout(connection, tables)
    if layout is None:
        return None, None
    added = 0
    if layout.lacks_days and not dry:
        with connection.begin():
            added = add_days(connection, tables)
            layout = read_layout(connection, tables) or layout
    with connection.begin():
        dropped, due = drop_days(connection, tables, dry=dry)
    why = None
    if due and not dry:
        why = (
            "records that must be kept refer to them"
            if layout.is_owner
            else "only the owner of the tables may drop them"
        )
    return Bodies(added, dropped, due, why, layout.ahead), layout.alarm


async def _sweep(maintenance: "Maintenance", advance: Advance) -> Counter[str]:
    deleted: Counter[str] = Counter()
    async for name, batch in maintenance.sweep():
        deleted[name] += batch.deleted
        advance(name, batch)
    return deleted


# --- progress, on stderr


@contextmanager
def _progress(whole: dict[str, int]) -> Iterator[Advance]:
    """A progress bar for each step on a terminal, lines elsewhere, and for each of several databases. whole: how many rows each
    step must check.
    """
    from rich.console import Console

    console, database = Console(stderr=True), one_of_several()
    if database is not None or not console.is_terminal:
        yield _lines(whole, "" if database is None else f"{database}: ")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks = {name: bars.add_task(name, total=count) for name, count in whole.items()}
        yield lambda name, batch: bars.advance(tasks[name], batch.scanned)


def _lines(whole: dict[str, int], prefix: str) -> Advance:
    scanned: Counter[str] = Counter()
    batches: Counter[str] = Counter()

    def advance(name: str, batch: "Batch") -> None:
        scanned[name] += batch.scanned
        batches[name] += 1
        if batch.after is None or batches[name] % BATCHES_A_LINE == 0:
            click.echo(f"{prefix}{name}: checked {scanned[name]} of {max(whole[name], scanned[name])}", err=True)

    return advance
