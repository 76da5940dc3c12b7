"""The live view: bars and counters on a terminal, or one line per second in a log."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.snapshot import Snapshot

EVENTS_SHOWN = 8
LINE_EVERY_SECONDS = 1.0


class View(Protocol):
    def show(self, now: Snapshot) -> None:
        """Show the current state. Called several times a second."""

    def report_event(self, seconds: float, event: str) -> None:
        """Report something that happened."""

    def print_line(self, text: str) -> None:
        """Print a line that stays."""


@contextlib.contextmanager
def view(console: Console) -> Iterator[View]:
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, refresh_per_second=10, transient=True) as live:
        yield Screen(live)


class Lines:
    """For a log: plain text, nothing redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def show(self, now: Snapshot) -> None:
        if now.seconds < self._next:
            return
        self._next = now.seconds + LINE_EVERY_SECONDS
        self.report_event(
            now.seconds,
            f"answered {now.answered}/{now.orders}  charged {now.payments.charges}  mailed {len(now.mails.accepted)}"
            f"  waiting {now.entries.open}  uncertain {now.entries.uncertain}  repeats recognised {now.payments.replays}",
        )

    def report_event(self, seconds: float, event: str) -> None:
        self.print_line(f"{seconds:5.1f} s  {event}")

    def print_line(self, text: str) -> None:
        print_plain(self._console, text)


class Screen:
    """For a terminal: one panel, redrawn."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._events: list[str] = []
        self._now: Snapshot | None = None

    def show(self, now: Snapshot) -> None:
        self._now = now
        self._live.update(self._drawn(now))

    def report_event(self, seconds: float, event: str) -> None:
        self._events.append(f"{seconds:5.1f} s  {event}")
        if self._now is not None:
            self._live.update(self._drawn(self._now))

    def print_line(self, text: str) -> None:
        print_plain(self._live.console, text)

    def _drawn(self, now: Snapshot) -> RenderableType:
        events = Text("\n".join(self._events[-EVENTS_SHOWN:]), style="dim")
        body = Group(bars(now), Text(), counters(now), Text(), events)
        title = f"[bold]{now.orders} checkouts[/bold]  {now.seconds:.0f} s"
        return Panel(body, title=title, width=96, padding=(1, 2))


def print_plain(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def bars(now: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, count, colour in (
        ("orders answered with 201", now.answered, "cyan"),
        ("charges in the payment ledger", now.payments.charges, "magenta"),
        ("receipts in the mail ledger", len(now.mails.accepted), "yellow"),
        ("charges settled in the outbox", now.charges.settled, "green"),
    ):
        bar = ProgressBar(total=now.orders, completed=count, width=44, complete_style=colour, finished_style=colour)
        grid.add_row(name, bar, f"{count}/{now.orders}")
    return grid


def counters(now: Snapshot) -> Table:
    payments, mails, entries = now.payments, now.mails, now.entries
    grid = Table.grid(padding=(0, 3))
    interrupted = sum(map(len, now.interrupted))
    turned_away = mails.turned_away.total()
    pairs = [
        ("pending", entries["pending"], "responses lost", payments.lost, "mails refused", turned_away),
        ("sending", entries["sending"], "stored 500", payments.stored_500, "mail replies lost", mails.lost),
        (
            "retry",
            entries["retry"],
            "429 and 503",
            payments.limited_429 + payments.refused_503,
            "kills",
            len(now.interrupted),
        ),
        ("uncertain", entries.uncertain, "repeats recognised", payments.replays, "sends cut off by kills", interrupted),
    ]
    for name, count, fault, faults, more, many in pairs:
        grid.add_row(name, f"[bold]{count}[/bold]", fault, f"[bold]{faults}[/bold]", more, f"[bold]{many}[/bold]")
    return grid
