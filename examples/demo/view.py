"""The live view: bars and counters on a terminal, a line a second anywhere else."""

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
        """How things stand; called several times a second."""

    def tell(self, seconds: float, event: str) -> None:
        """Something happened."""


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
        self._say(
            now.seconds,
            f"answered {now.answered}/{now.orders}  settled {now.settled}  waiting {now.open}"
            f"  uncertain {now.uncertain}  charges {now.service.charges}  duplicates suppressed {now.service.replays}",
        )

    def tell(self, seconds: float, event: str) -> None:
        self._say(seconds, event)

    def _say(self, seconds: float, text: str) -> None:
        self._console.print(f"{seconds:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


class Screen:
    """For a terminal: one panel, redrawn."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._events: list[str] = []
        self._now: Snapshot | None = None

    def show(self, now: Snapshot) -> None:
        self._now = now
        self._live.update(self._drawn(now))

    def tell(self, seconds: float, event: str) -> None:
        self._events.append(f"{seconds:5.1f} s  {event}")
        if self._now is not None:
            self._live.update(self._drawn(self._now))

    def _drawn(self, now: Snapshot) -> RenderableType:
        service = now.service
        events = Text("\n".join(self._events[-EVENTS_SHOWN:]), style="dim")
        body = Group(bars(now), Text(), counters(now), Text(), events)
        title = f"[bold]{now.orders} checkouts[/bold]  {now.seconds:.0f} s"
        subtitle = f"[dim]{service.requests} requests to the payment service for {service.charges} charges[/dim]"
        return Panel(body, title=title, subtitle=subtitle, width=96, padding=(1, 2))


def bars(now: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, count, colour in (
        ("clients answered 201", now.answered, "cyan"),
        ("charges in the ledger", now.service.charges, "magenta"),
        ("entries settled", now.settled, "green"),
    ):
        bar = ProgressBar(total=now.orders, completed=count, width=48, complete_style=colour, finished_style=colour)
        grid.add_row(name, bar, f"{count}/{now.orders}")
    return grid


def counters(now: Snapshot) -> Table:
    service, entries = now.service, now.entries
    grid = Table.grid(padding=(0, 3))
    pairs = [
        ("pending", entries.get("pending", 0), "responses lost", service.lost, "kills", len(now.struck)),
        ("sending", entries.get("sending", 0), "500, stored", service.stored_500, "struck", sum(now.struck)),
        ("retry", entries.get("retry", 0), "429 and 503", service.limited_429 + service.refused_503, "", ""),
        ("uncertain", now.uncertain, "409, key in use", service.in_use_409, "duplicates suppressed", service.replays),
    ]
    for name, count, fault, faults, more, many in pairs:
        grid.add_row(name, f"[bold]{count}[/bold]", fault, f"[bold]{faults}[/bold]", more, f"[bold]{many}[/bold]")
    return grid
