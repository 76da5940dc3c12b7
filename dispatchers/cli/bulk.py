"""Decisions in bulk on the command line: the sentence and the count, the question, the progress, and what was done."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding_in_batches, reading
from dispatchers.cli.exit_codes import REFUSED
from dispatchers.cli.filters import Given, filter_of
from dispatchers.cli.output import answer, can_ask, clean

if TYPE_CHECKING:
    from dispatchers.admin.decide.bulk import BulkDecision, Preview, Progress
    from dispatchers.admin.decide.bulk_breakdown import Breakdown

SETTLED_SECONDS = 5.0  # a command waits so long for its decisions to take effect
EFFECT_PAUSE_SECONDS = 0.2
MAX_UNASKED = 1000  # more entries need --max: a filter that was meant to be narrower selects many

Advance = Callable[["Progress"], None]


class Bulk(NamedTuple):
    """How the decision is made. rate: entries per second at most. most: the operator's limit of entries.

    propose: another operator must confirm it.
    """

    dry_run: bool
    yes: bool
    most: int | None
    rate: float | None
    propose: bool


def bulk_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--dry-run`, `--yes`, `--max`, `--rate` and `--propose`; the command gets them as one `bulk`."""

    @wraps(command)
    def with_bulk(*, dry_run: bool, yes: bool, most: int | None, rate: float | None, propose: bool, **rest: Any) -> Any:
        return command(bulk=Bulk(dry_run, yes, most, rate, propose), **rest)

    for option in (
        click.option(
            "--propose",
            is_flag=True,
            help="Change nothing, and propose the decision: another operator runs `outbox confirm`.",
        ),
        click.option(
            "--rate", type=click.FloatRange(0.1), help="With options that select entries: entries per second at most."
        ),
        click.option(
            "--max",
            "most",
            type=click.IntRange(1),
            help=f"With a filter: the most entries; required above {MAX_UNASKED}.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option(
            "--dry-run",
            is_flag=True,
            help="With options that select entries: print what would be done, and change nothing.",
        ),
    ):
        with_bulk = option(with_bulk)
    return with_bulk


NO_BULK = Bulk(dry_run=False, yes=False, most=None, rate=None, propose=False)


def require_one(id: str | None, bulk: Bulk, *, has_filter: bool) -> None:
    """Raise UsageError unless there is either an ID or a filter."""
    if (id is None) != has_filter:
        raise click.UsageError("give either an ID, or options that select entries")
    if id is not None and (bulk.dry_run or bulk.most is not None or bulk.rate is not None):
        raise click.UsageError("--dry-run, --max and --rate need options that select entries, not an ID")


def decide_in_bulk(given: Given, decision: "BulkDecision", bulk: Bulk, target: options.Target) -> None:
    """Count, ask, decide, and report."""
    from dispatchers.admin.decide.bulk import STATES, preview
    from dispatchers.admin.decide.bulk_breakdown import break_down

    wanted = filter_of(given, STATES[decision.action])
    with reading(target) as (connection, tables):
        found = preview(connection, tables, wanted, decision)
        parts = break_down(connection, tables, found.wanted, found.ids) if bulk.dry_run else None
    count = len(found.ids)
    if bulk.dry_run or not count:
        document = _document(decision, found) | {"dry_run": bulk.dry_run, "done": 0, "skipped": {}}
        if parts is not None:
            document |= {"breakdown": parts.counts, "samples": parts.samples}
        said = f"would {found.sentence}" if count else _none(found)
        answer(document, "\n".join([said, *(_breakdown(parts) if parts and count else ()), *_left_alone(found)]))
        return
    _require_few(count, bulk.most)
    _confirm(found, yes=bulk.yes)
    with _stopping() as pause:
        done = _run(decision, found, bulk, target, pause)
        effect = _effect(decision, found, done, target, pause)
    _report(decision, found, done, effect)


def _require_few(count: int, most: int | None) -> None:
    if most is None and count > MAX_UNASKED:
        raise click.ClickException(
            f"these are {count:,} entries, more than {MAX_UNASKED:,}: give --max {count} if that is right; nothing was changed"
        )
    if most is not None and count > most:
        raise click.ClickException(f"these are {count:,} entries, more than --max {most}; nothing was changed")


def _confirm(found: "Preview", *, yes: bool) -> None:
    for line in (found.sentence, *_left_alone(found)):
        click.echo(line, err=True)
    if yes:
        return
    if not can_ask():
        raise click.UsageError("there is no terminal to ask for confirmation: give --yes, or --dry-run first")
    count = len(found.ids)
    click.confirm(f"Change {count:,} {'entry' if count == 1 else 'entries'}?", abort=True, err=True)


def _run(
    decision: "BulkDecision", found: "Preview", bulk: Bulk, target: options.Target, pause: Callable[[float], bool]
) -> "Progress":
    from dispatchers.admin.decide.bulk import NOTHING_DONE, decide

    done = NOTHING_DONE
    with deciding_in_batches(target) as (engine, tables), _progress(len(found.ids)) as advance:
        try:
            for done in decide(engine, tables, decision, found, rate=bulk.rate, pause=pause):
                advance(done)
        except (Exception, KeyboardInterrupt) as error:
            cause = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "an error"
            click.echo(
                f"stopped by {cause}: {done.done:,} changed and {done.total - done.done:,} left alone for"
                " certain; of the batch after them `outbox audit --limit 1` shows whether it was committed. The same command"
                " continues with the rest",
                err=True,
            )
            raise
    return done


class Effect(NamedTuple):
    """How many entries are decided and not settled yet, and what they wait for. Empty for decisions that need no dispatcher."""

    open: int = 0
    why: str = ""


def _effect(
    decision: "BulkDecision", found: "Preview", done: "Progress", target: options.Target, pause: Callable[[float], bool]
) -> Effect:
    """Wait a moment until the running dispatchers have carried the decision out; without one, do not wait."""
    from dispatchers.admin.decide.bulk_effect import CARRIED_OUT, count_open
    from dispatchers.admin.read.dispatchers import live
    from dispatchers.store.records.heartbeats import read_dispatchers
    from dispatchers.store.records.identity import is_suspended
    from outbox.sql.clock import database_now

    if decision.action not in CARRIED_OUT or not done.done:
        return Effect()
    until = time.monotonic() + SETTLED_SECONDS
    while True:
        with reading(target) as (connection, tables):
            count = count_open(connection, tables, found.ids)
            if not count:
                return Effect()
            if is_suspended(connection, tables):
                return Effect(count, "a dispatcher settles them after `outbox resume --after-restore`")
            if not live(read_dispatchers(connection, tables, database_now(connection))):
                return Effect(count, "no running dispatcher reports itself; the next one settles them without a send")
        if time.monotonic() >= until or pause(EFFECT_PAUSE_SECONDS):
            return Effect(count, "a running dispatcher settles them without a send; `outbox status` counts them")


def _report(decision: "BulkDecision", found: "Preview", done: "Progress", effect: Effect) -> None:
    rest = len(found.ids) - done.total
    document = _document(decision, found) | {"dry_run": False, "done": done.done, "skipped": dict(done.skipped)}
    document |= {"not_settled": effect.open}
    lines = [f"{decision.action}: {done.done:,} of {len(found.ids):,} entries changed"]
    if effect.open:
        lines.append(f"{effect.open:,} of them decided and not settled yet: {effect.why}")
    lines += [f"{count:,} left alone meanwhile: {clean(why)}" for why, count in done.skipped.items()]
    if rest:
        lines.append(f"interrupted: {rest:,} not reached; the same command continues with them")
    answer(document | {"not_reached": rest}, "\n".join(lines))
    if rest:
        click.get_current_context().exit(REFUSED)


def _document(decision: "BulkDecision", found: "Preview") -> dict[str, Any]:
    return {
        "decision": decision.action,
        "actor": decision.actor,
        "sentence": found.sentence,
        "count": len(found.ids),
        "left_alone": dict(found.left_alone),
    }


def _none(found: "Preview") -> str:
    return f"nothing to do: would {found.sentence}"


def _breakdown(found: "Breakdown") -> Iterator[str]:
    """Lines such as `  source: 2 app, 1 http`."""
    from dispatchers.admin.read.plain_values import instant

    for name, counts in found.counts.items():
        label = "parent key begins with" if name == "parent" else name
        yield f"  {label}: " + ", ".join(f"{count:,} {clean(value) or '-'}" for value, count in counts.items())
    for sample in found.samples:
        yield f"  sample: {sample.id}, parent {clean(sample.parent)}, enqueued {instant(sample.created_at)}"


def _left_alone(found: "Preview") -> list[str]:
    return [
        f"{count:,} more meet the filter and are left alone: {clean(why)}" for why, count in found.left_alone.items()
    ]


# --- interruption and progress


@contextmanager
def _stopping() -> Iterator[Callable[[float], bool]]:
    """A pause that ends at once, and returns True, if Ctrl-C was or is pressed: so a batch in progress ends first, and
    the counts are exact. A second Ctrl-C ends the batch too.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    def pause(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not pressed and (rest := until - time.monotonic()) > 0:
            time.sleep(min(rest, 0.1))  # a signal's handler does not end a sleep
        return pressed

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pause
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar with the rate on a terminal; elsewhere a line for each tenth."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=total, rate="")

        def advance(done: Any) -> None:
            bars.update(task, completed=done.total)
            speed = bars.tasks[0].speed
            bars.update(task, rate="" if speed is None else f"{speed:,.0f}/s")

        yield advance


def _lines(total: int) -> Advance:
    printed = 0

    def advance(done: "Progress") -> None:
        nonlocal printed
        tenth = done.total * 10 // total
        if tenth > printed:
            printed = tenth
            click.echo(f"{done.total:,} of {total:,}", err=True)

    return advance
