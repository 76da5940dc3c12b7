"""The documents are true: vectors, tables, snippets, links.

A page's snippets run from top to bottom in one new directory, each Python one as a program of its own:

- ```python runs, with SQLite where it needs a database. A first line `# shop.py` is its file's name, under which later
  ones import it. `<!-- not run: reason -->` on the line before it leaves it out, and NOT_RUN below must say so too.
- ```sh runs only after `<!-- run -->`; what it exports holds for the rest of the page. After `<!-- run until stopped -->` it is
  one command that starts a dispatcher, which must come up, and stop at a SIGTERM.
- ```text after one of these is its output, to the letter.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest

from dispatchers import Adapter, Operations
from dispatchers.delivery import KeyFormat
from outbox import Keyring, ParentKey, keys

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN: list[tuple[str, str]] = []
"""Page and reason of every Python snippet that is left out."""

SECONDS_MAX = 60

every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


# --- reading Markdown


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


# --- snippets


class Reader:
    """Follows a page as a person would, in a directory of its own. Raises AssertionError where it leads astray."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ours = ("OUTBOX_", "DATABASE_URL", "PYTHON")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.output: str | None = None

    def follow(self, markdown: str) -> None:
        for snippet in snippets_of(markdown):
            self._follow(snippet)

    def _follow(self, snippet: Snippet) -> None:
        match snippet.language, snippet.mark:
            case "python", None:
                self.output = self.run_python(snippet)
            case "python", str(mark) if mark.startswith("not run: "):
                self.output = None
            case "sh", "run":
                self.output = self.run_shell(snippet)
            case "sh", "run until stopped":
                self.output = self.run_until_stopped(snippet)
            case "text", None:
                assert self.output in (None, snippet.text), f"line {snippet.line}: it prints\n{self.output}"
            case _, None:
                self.output = None
            case language, mark:
                raise AssertionError(f"line {snippet.line}: <!-- {mark} --> says nothing about ```{language}")

    def run_python(self, snippet: Snippet) -> str:
        named = re.match(r"# (\w+\.py)\n", snippet.text)
        file = self.directory / (named[1] if named else f"line_{snippet.line}.py")
        file.write_text(snippet.text)
        return self._run(snippet, sys.executable, file.name)

    def run_shell(self, snippet: Snippet) -> str:
        output = self._run(snippet, "bash", "-euc", f"{snippet.text}\nenv -0 > .environment")
        exported = (self.directory / ".environment").read_text().split("\0")
        self.environment = dict(line.split("=", 1) for line in exported if line)
        return output

    def run_until_stopped(self, snippet: Snippet) -> str:
        with self._start("bash", "-euc", f"exec {snippet.text}") as process:
            late = Timer(SECONDS_MAX, process.kill)
            late.start()
            seen = ""
            for line in process.stdout or ():
                seen += line
                if line.endswith("sending\n"):
                    process.terminate()
            late.cancel()
        assert process.returncode == 0, f"line {snippet.line}: exit status {process.returncode}\n{seen}"
        return seen

    def _run(self, snippet: Snippet, *command: str) -> str:
        with self._start(*command) as process:
            late = Timer(SECONDS_MAX, process.kill)
            late.start()
            output, _ = process.communicate()
            late.cancel()
        assert process.returncode == 0, f"line {snippet.line}: exit status {process.returncode}\n{output}"
        return output

    def _start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@every_page
def test_every_snippet_runs_as_printed(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)

    reader.follow(page.read_text())


def test_only_the_snippets_that_are_known_here_are_left_out() -> None:
    marks = [(page.name, snippet.mark) for page in PAGES for snippet in snippets_of(page.read_text())]

    left_out = [(name, mark.removeprefix("not run: ")) for name, mark in marks if mark and mark.startswith("not run")]

    assert left_out == NOT_RUN


@pytest.mark.parametrize(
    "markdown",
    [
        "```python\n1 / 0\n```\n",
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "<!-- run -->\n```sh\nfalse\n```\n",
        "<!-- runs -->\n```sh\ntrue\n```\n",
    ],
    ids=["an exception", "another output", "a failing command", "a misspelt mark"],
)
def test_a_snippet_that_does_not_do_what_the_page_says_is_noticed(markdown: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)

    with pytest.raises(AssertionError, match=r"line \d"):
        reader.follow(markdown)


# --- links


def links_of(markdown: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", markdown))
    return re.findall(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)", prose, re.M)


def anchors_of(markdown: str) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, markdown: str) -> Iterator[str]:
    for link in map("".join, links_of(markdown)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and target.is_relative_to(ROOT)
        text = markdown if target == page else target.read_text() if found and target.suffix == ".md" else ""
        if not found or (anchor and anchor not in anchors_of(text)):
            yield link


@every_page
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page, page.read_text())) == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    page = ROOT / "docs" / "keys.md"
    markdown = (
        "# A `word`, and more\n[a](gone.md) [b](#a-word-and-more) [c](#gone) [d](../README.md) [e](http://x.test)\n"
    )

    broken = list(broken_links(page, markdown))

    assert broken == ["gone.md", "#gone"]


# --- docs/keys.md

KEYS = (ROOT / "docs" / "keys.md").read_text()
RING, PUBLIC = Keyring({"k1": bytes(range(32))}), Keyring.public()


def fields_of(row: dict[str, str]) -> keys.KeyFields:
    parent = ParentKey(row["parent"], scope=row["scope"], source=row["source"])
    return keys.key_fields(row["env"], parent, row["operation"], row["discriminator"])


def computed(fields: keys.KeyFields) -> dict[str, str]:
    """Every value that the page may have of one vector, by its column's name."""
    tag, public = keys.derive_tag(RING, "k1", fields), keys.derive_tag(PUBLIC, "public", fields)
    epochs = {n: keys.encode_native(keys.derive_tag(RING, "k1", fields, n)) for n in (1, 2, 10)}
    return {
        "tag, and its `hex` encoding": keys.encode_hex(tag),
        "native": keys.encode_native(tag),
        "uuid": keys.encode_uuid(tag),
        "uuid version 4": keys.encode_uuid(tag, version=4),
        "uuid version 5": keys.encode_uuid(tag, version=5),
        "entry id": str(keys.entry_id(fields)),
        "parent id": str(keys.parent_id(fields.env, fields.parent)),
        "epoch 1": epochs[1],
        "epoch 2": epochs[2],
        "epoch 10": epochs[10],
        "public": keys.encode_native(public),
        "public, epoch 1": keys.encode_native(keys.derive_tag(PUBLIC, "public", fields, 1)),
    }


def vectors_of(markdown: str) -> list[tuple[str, str, str]]:
    """The printed values: (vector, column, value)."""
    tables = [rows_of(markdown, column) for column in ("native", "entry id", "epoch 1", "epoch 2")]
    rows = [({"vector": "1"} | row) for table in tables for row in table]
    return [(row["vector"], column, value) for row in rows for column, value in row.items() if column != "vector"]


def disagreements(markdown: str) -> list[tuple[str, str, str]]:
    code = {row["vector"]: computed(fields_of(row)) for row in rows_of(markdown, "env", "discriminator")}
    return [(vector, name, value) for vector, name, value in vectors_of(markdown) if code[vector][name] != value]


def test_the_vectors_of_the_page_are_those_of_the_code() -> None:
    assert len(vectors_of(KEYS)) == 7 * (2 + 3 + 3) + 4
    assert disagreements(KEYS) == []


@pytest.mark.parametrize("vector", vectors_of(KEYS), ids=lambda vector: f"{vector[0]} {vector[1]}")
def test_a_changed_digit_in_a_vector_is_noticed(vector: tuple[str, str, str]) -> None:
    _, _, value = vector
    middle = len(value) // 2
    changed = value[:middle] + ("0" if value[middle] != "0" else "1") + value[middle + 1 :]

    assert disagreements(KEYS.replace(f"`{value}`", f"`{changed}`"))


@pytest.mark.parametrize("column", ["env", "scope", "source", "parent", "operation", "discriminator"])
def test_a_changed_letter_in_a_field_is_noticed(column: str) -> None:
    row = rows_of(KEYS, "env", "discriminator")[6]
    line = next(line for line in KEYS.splitlines() if line.startswith("| 7 |"))

    assert disagreements(KEYS.replace(line, line.replace(f"`{row[column]}`", f"`{row[column]}0`")))


def test_the_examples_of_pae_are_those_of_the_code() -> None:
    printed = {row["parts"]: row["PAE in hex"] for row in rows_of(KEYS, "parts")}

    assert printed == {"none": keys.pae().hex(), "`ab` and the empty text": keys.pae(b"ab", b"").hex()}


def test_the_limits_of_the_fields_are_those_of_the_code() -> None:
    printed = {row["field"]: tuple(map(int, row["bytes"].split("-"))) for row in rows_of(KEYS, "field", "bytes")}

    assert list(printed) == ["env", "scope", "source", "parent", "operation", "discriminator"]
    assert printed == {name: keys.LIMITS[name] for name in printed}
    assert f"`{keys.OPERATION.pattern}`" in KEYS


def test_the_encodings_have_the_printed_lengths() -> None:
    printed = {row["encoding"]: int(row["characters"]) for row in rows_of(KEYS, "encoding")}

    assert printed == {
        name: len(KeyFormat(encoding=name).encode(keys.Tag(bytes(32)))) for name in ("native", "uuid", "hex")
    }


# --- docs/adapters.md


def test_the_declarations_of_the_page_and_their_defaults_are_those_of_the_code() -> None:
    rows = rows_of((ROOT / "docs" / "adapters.md").read_text(), "declaration", "default")

    declared = {name for name, value in vars(Adapter).items() if not name.startswith("_") and not callable(value)}
    taken = set(Operations.operation.__kwdefaults__)

    assert {row["declaration"] for row in rows} == declared == taken
    names = {"FOREVER": "FOREVER", "NATIVE": KeyFormat(), "timedelta": timedelta}
    for row in rows:
        default = eval(row["default"], names)
        assert default == getattr(Adapter, row["declaration"]), row
        assert default == Operations.operation.__kwdefaults__[row["declaration"]], row
