"""The documents' pages and their contents: fenced blocks and tables."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Snippet:
    """A fenced block. mark: the HTML comment on the line before it."""

    mark: str | None
    language: str
    text: str
    line: int


FENCE = re.compile(r"^(?:<!-- *(?P<mark>.*?) *-->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


def snippets_of(markdown: str) -> list[Snippet]:
    return [
        Snippet(found["mark"], found["language"], found["text"], markdown.count("\n", 0, found.start("text")) + 1)
        for found in FENCE.finditer(markdown)
    ]


def tables_of(markdown: str) -> list[list[dict[str, str]]]:
    """Every table: its rows by column name, without the backticks around a whole cell."""
    tables: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", markdown, re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in block.splitlines()]
        tables.append(
            [dict(zip(head, (re.sub(r"^`(.*)`$", r"\1", cell) for cell in row), strict=True)) for row in rows]
        )
    return tables


def rows_of(markdown: str, *columns: str) -> list[dict[str, str]]:
    """The rows of the one table that has these columns."""
    (rows,) = [table for table in tables_of(markdown) if set(columns) <= table[0].keys()]
    return rows
