"""The documents are true: snippets and links. (Their tables: test_docs_tables.py.)

A page's snippets run from top to bottom in one new directory, each Python one as a program of its own:

- ```python runs, with SQLite where it needs a database. A first line `# shop.py` is its file's name, under which later
  ones import it. `<!-- not run: reason -->` on the line before it leaves it out, and NOT_RUN below must say so too.
- ```sh runs only after `<!-- run -->`; what it exports holds for the rest of the page. After `<!-- run until stopped -->` it is
  one command that starts a dispatcher, which must come up, and stop at a SIGTERM.
- ```text after one of these is its output, to the letter.

POSTGRESQL below is the URL of a blank database of the test's own; a page that prints it needs no server of its reader's.

After an install line, a ```sh block of one `pip install "sqlalchemy-outbox[...]"`, the snippets run in a new directory and a
new environment, which holds what this line installs and no more. (What is before a page's first such line runs there too.)
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from support.docs_pages import FENCE, PAGES, ROOT, Snippet, snippets_of
from support.installs import Environment, Environments
from support.migrations import blank_database
from support.python_processes import DEVNULL, PIPE, STDOUT, PythonProcess, forked_commands

LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*/README.md"))]
NOT_RUN: list[tuple[str, str]] = [("http-api.md", "it needs PostgreSQL")] * 2 + [
    ("verification.md", "it kills the process")
]
"""Page and reason of every Python snippet that is left out."""

POSTGRESQL = "postgresql+psycopg://shop@localhost/shop"
MAX_SECONDS = 60

every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


# --- snippets


class Reader:
    """Follows a page as a reader would, in a directory of its own. Raises AssertionError where it leads astray."""

    def __init__(self, directory: Path, environment: Environment | None = None) -> None:
        self.directory = directory
        ours = ("OUTBOX_", "DATABASE_URL", "PYTHON", "COLUMNS")  # pytest-xdist's workers have a width
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        commands = directory / ".commands"
        commands.mkdir()
        python, self.server = environment or (Path(sys.executable), None)
        if environment is None:  # no such page uses our pytest-asyncio, which prints a warning if it is not set up
            self.environment["PYTEST_ADDOPTS"] = "-p no:asyncio"
        self.environment["PATH"] = os.pathsep.join([str(commands), str(python.parent), os.environ["PATH"]])
        names = ["outbox", "alembic", "python"]
        self._inherited = forked_commands(commands, names, self.environment, python=python, server=self.server)
        self.output: str | None = None

    def follow(self, snippets: Iterable[Snippet]) -> None:
        for snippet in snippets:
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
        return self._finish(snippet, PythonProcess(file.name, server=self.server, **self._surroundings))

    def run_shell(self, snippet: Snippet) -> str:
        output = self._run(snippet, "bash", "-euc", f"{snippet.text}\nenv -0 > .environment")
        exported = (self.directory / ".environment").read_text().split("\0")
        self.environment = dict(line.split("=", 1) for line in exported if line)
        return output

    def run_until_stopped(self, snippet: Snippet) -> str:
        with self._start("bash", "-euc", f"exec {snippet.text}") as process:
            late = Timer(MAX_SECONDS, process.kill)
            late.start()
            seen = ""
            for line in process.stdout or ():
                seen += line
                if "outbox.daemon: started" in line:
                    process.terminate()
            late.cancel()
        assert process.returncode == 0, f"line {snippet.line}: exit status {process.returncode}\n{seen}"
        return seen

    def _run(self, snippet: Snippet, *command: str) -> str:
        return self._finish(snippet, self._start(*command))

    def _finish(self, snippet: Snippet, process: subprocess.Popen[str] | PythonProcess) -> str:
        with process:
            late = Timer(MAX_SECONDS, process.kill)
            late.start()
            output = process.stdout.read()
            process.wait()
            late.cancel()
        assert process.returncode == 0, f"line {snippet.line}: exit status {process.returncode}\n{output}"
        return output

    def _start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, text=True, pass_fds=[self._inherited], **self._surroundings)

    @property
    def _surroundings(self) -> dict[str, Any]:
        return {"cwd": self.directory, "env": self.environment, "stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environments]:
    with closing(Environments(tmp_path_factory.mktemp("environments"))) as made:
        yield made


def installed(snippet: Snippet) -> str | None:
    """What an install line installs; None of any other snippet."""
    found = re.fullmatch(r"pip install (.*sqlalchemy-outbox\[.*)\n", snippet.text) if snippet.language == "sh" else None
    return found[1] if found else None


def parts_of(snippets: list[Snippet]) -> Iterator[tuple[str | None, list[Snippet]]]:
    """What each install line installs, with the snippets up to the next one."""
    lines = [index for index, snippet in enumerate(snippets) if installed(snippet)] or [0]
    for start, end in pairwise([0, *lines[1:], len(snippets)]):
        part = snippets[start:end]
        yield next(filter(None, map(installed, part)), None), part


@contextmanager
def readable(page: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The page's text, with a database at the URL that it prints."""
    markdown = page.read_text()
    if POSTGRESQL not in markdown:
        yield markdown
        return
    with blank_database(request.getfixturevalue("server_url")) as database:
        yield markdown.replace(POSTGRESQL, database.url.render_as_string(hide_password=False))


@every_page
def test_every_snippet_runs_as_printed(
    page: Path, tmp_path: Path, environments: Environments, request: pytest.FixtureRequest
) -> None:
    with readable(page, request) as markdown:
        for number, (line, snippets) in enumerate(parts_of(snippets_of(markdown))):
            directory = tmp_path / str(number)
            directory.mkdir()
            reader = Reader(directory, environments.make(line) if line else None)

            reader.follow(snippets)


def test_readers_who_run_the_readme_twice_see_no_traceback(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with readable(ROOT / "README.md", request) as markdown:
        reader = Reader(tmp_path)
        reader.follow(snippets_of(markdown))

        for snippet in snippets_of(markdown):
            if snippet.language == "python":
                assert "Traceback" not in reader.run_python(snippet)


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
    ids=["an exception", "another output", "a failing command", "a misspelt directive"],
)
def test_a_snippet_that_does_not_do_what_the_page_says_is_noticed(markdown: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)

    with pytest.raises(AssertionError, match=r"line \d"):
        reader.follow(snippets_of(markdown))


# --- links

REPOSITORY = "https://github.com/sqlalchemy-outbox/sqlalchemy-outbox/blob/main/"
"""How a page of the site links to a file that is not on the site."""


def links_of(markdown: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", markdown))
    return re.findall(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)", prose, re.M)


def anchors_of(markdown: str) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, markdown: str) -> Iterator[str]:
    for link in map("".join, links_of(markdown)):
        if re.match(r"\w+:", link) and not link.startswith(REPOSITORY):
            continue
        path, _, anchor = link.removeprefix(REPOSITORY).partition("#")
        folder = ROOT if link.startswith(REPOSITORY) else page.parent
        target = (folder / path).resolve() if path else page
        found = target.exists() and target.is_relative_to(ROOT)
        text = markdown if target == page else target.read_text() if found and target.suffix == ".md" else ""
        if not found or (anchor and anchor not in anchors_of(text)):
            yield link


def test_every_link_within_the_repository_leads_somewhere() -> None:
    broken = {page: [*broken_links(page, page.read_text())] for page in LINKED}

    assert {page: links for page, links in broken.items() if links} == {}


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    page = ROOT / "docs" / "keys.md"
    markdown = (
        "# A `word`, and more\n[a](gone.md) [b](#a-word-and-more) [c](#gone) [d](../README.md) [e](http://x.test)\n"
        f"[f]({REPOSITORY}README.md) [g]({REPOSITORY}gone.py)\n"
    )

    broken = list(broken_links(page, markdown))

    assert broken == ["gone.md", "#gone", f"{REPOSITORY}gone.py"]


NAMED_BY = ("outbox", "dispatchers", "tests", "examples", "benchmarks", "alembic")
SUFFIXES = {".py", ".yml", ".yaml", ".service", ".html", ".toml"}


def test_every_page_that_the_code_names_is_there() -> None:
    files = [
        ROOT / "dev.py",
        ROOT / "pyproject.toml",
        *(path for name in NAMED_BY for path in (ROOT / name).rglob("*")),
    ]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in files
        if path.suffix in SUFFIXES
        for page in re.findall(r"\bdocs/([\w-]+\.md)\b", path.read_text())
    }

    assert {page for _, page in named} >= {"keys.md", "restore.md", "operations.md"}
    assert [(path, page) for path, page in sorted(named) if not (ROOT / "docs" / page).exists()] == []
