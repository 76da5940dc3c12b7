"""A command's output: one JSON document, or text and tables."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import click

from dispatchers.admin.read.plain_values import plain
from dispatchers.cli.exit_codes import JSON

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

MAX_COLUMNS = 10_000  # without a terminal nothing is cut: one entry stays on one line for grep
SHORT_ID_CHARS = 13  # twelve digits and a dash: the entries of one parent share the first eight


def answer(document: Any, text: "str | Callable[[], Iterable[RenderableType]]") -> None:
    """Print `document` where JSON was asked for, else `text`, or what it draws."""
    collected = _collected.get()
    if collected is not None:
        is_json = click.get_current_context().meta.get(JSON)
        drawn: list[RenderableType] = []
        if not is_json:
            drawn.extend(text() if callable(text) else [prose(text)])
        collected.parts.append(Part(document, drawn))
    elif click.get_current_context().meta.get(JSON):
        click.echo(json.dumps(plain(document), indent=2))
    elif callable(text):
        draw(text())
    else:
        click.echo(text)


class Part(NamedTuple):
    """The output of a command. drawn: as text; empty for JSON."""

    document: Any
    drawn: "list[RenderableType]"


class Collected(NamedTuple):
    """The answers of one of several databases."""

    database: str
    parts: list[Part]


_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


def one_of_several() -> str | None:
    """The name of the database, if the command asks several."""
    collected = _collected.get()
    return None if collected is None else collected.database


@contextmanager
def collecting(database: str) -> Iterator[list[Part]]:
    """Collect what this thread's `answer` would print until the end of the block. database: its name."""
    collected = Collected(database, [])
    token = _collected.set(collected)
    try:
        yield collected.parts
    finally:
        _collected.reset(token)


def clean(text: str) -> str:
    """`text` without terminal control characters: parent keys and reasons come from outside."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def can_ask() -> bool:
    """Whether there is a terminal to ask a question. A process that was started with a closed input has no `stdin`."""
    return sys.stdin is not None and sys.stdin.isatty()


# --- tables


def is_screen() -> bool:
    """Whether a terminal limits the width."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def short(id: UUID) -> str:
    """The first digits of an id on a terminal; elsewhere the whole id."""
    return str(id)[:SHORT_ID_CHARS] if is_screen() else str(id)


def table(*columns: str, elastic: Sequence[str] = (), right: Sequence[str] = ()) -> "Table":
    """An empty table without lines. elastic: the columns that shrink on a narrow terminal. right: those of numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, no_wrap=column not in elastic, justify="right" if column in right else "left")
    return made


def pairs(values: Iterable[tuple[str, Any]]) -> "Table":
    """Names and values, one a line, long values wrapped; what is None is left out."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values:
        if value is not None:
            made.add_row(name, prose(value))
    return made


STYLES = {"delivered": "green", "failed": "red", "cancelled": "dim", "uncertain": "bold yellow", "sending": "cyan"}


def cell(value: Any, style: str = "") -> "Text":
    """One line of a table, cut where it does not fit."""
    from rich.text import Text

    return Text(clean(str(value)), style=style, no_wrap=True, overflow="ellipsis")


def prose(value: Any, style: str = "") -> "Text":
    """Text that wraps to the next line."""
    from rich.text import Text

    return value if isinstance(value, Text) else Text(clean(str(value)), style=style)


def json_text(value: Any) -> "Text":
    from rich.text import Text

    lines = json.dumps(value, indent=2, ensure_ascii=False).splitlines()
    return Text("\n".join(map(clean, lines)))


def state_cell(state: str) -> "Text":
    return cell(state, STYLES.get(state, ""))


def draw(parts: "Iterable[RenderableType]", *, to_stderr: bool = False) -> None:
    """Print what is drawn. to_stderr: before a question, so that the command's own output stays apart."""
    console = _console()
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), err=to_stderr)


def _console() -> "Console":
    from rich.console import Console

    width = None if is_screen() else MAX_COLUMNS
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
