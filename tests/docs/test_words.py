"""Standard terms only: in help, log lines and error messages, in docstrings and comments, and in the names of tests."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, groupby
from pathlib import Path

import click
import pytest
from support.docs_pages import FENCE, PAGES, ROOT

import dispatchers
import outbox
from dispatchers.cli import main

FORBIDDEN = {
    "lane": "ordering group",
    "lanes": "ordering groups",
    "halt": "block",
    "halts": "blocks",
    "halted": "blocked",
    "halting": "blocking",
    "looked for": "looked up",
    "look for it": "look it up",
    "slot": "permit",
    "slots": "permits",
    "held": "suspended",
    "held back": "suspended",
    "goes on": "is resumed",
    "go on": "resume",
    "went on": "continued",
    "a person": "an operator",
    "handed back": "released",
    "vanished": "crashed",
    "promise": "invariant",
    "promises": "invariants",
    "upkeep": "maintenance",
    "timetable": "schedule",
    "companion": "piggybacked insert",
    "patience": "timeout",
    "doomed": "rollback-only",
    "buried": "tombstoned",
    "tells": "reports",
    "told": "reported",
    "weighs": "throttles",
    "asked for quiet": "Retry-After cooldown",
    "far side": "remote service",
    "anew": "again",
    "for good": "permanently",
    "in vain": "without result",
    "not to be had": "unavailable",
    "is to be": "must be",
    "what became of": "the outcome of",
    "becomes of": "happens to",
    "stands": "is",
    "whoever": "the actor",
    "nobody": "no dispatcher",
    "somebody": "an operator",
    "come due": "become due",
    "comes due": "becomes due",
    "is away": "is unavailable",
    "are away": "are unavailable",
    "for ever": "permanently",
    "fate": "outcome",
    "struck": "interrupted",
    "bury": "move away",
    "theatre": "scenario",
    "kin": "counterpart",
    "goodbye": "close",
    "story": "trace",
    "stories": "traces",
    "planted": "injected",
    "guard removed": "mutant",
    "quiescence": "fencing delay",
    "hostile": "faulty",
    "scene": "scenario",
    "cool-down": "cooldown",
    "pressure": "flow control",
    "a look": "a status lookup",
    "set-up": "setup",
}
"""The left column of the words, each with what to write instead."""

IN_TEXTS = {
    word: instead
    for word, instead in FORBIDDEN.items()
    if word not in {"held", "fate"}  # a lock or a lease is held, in PostgreSQL's words too; a simulation draws a fate
} | {
    "tell": "report, show or return",
    "look for": "search for",
    "looks for": "searches for",
    "a person's word": "an operator's decision",
    "a person's": "an operator's",
    "behind": "after",
    "stand in": "are in",
}
"""Those words, and further ones, that no docstring or comment has."""

STANDARD = re.compile(
    r"^ *behind(, before)?:|`behind`|`nobody`"  # names: fields, parameters, a Unix user
    r"|\bbehind a (proxy|pooler)\b"  # the networks' own term
    r"|\breplication slots?\b"  # PostgreSQL's own term
    r"|--\w+",  # a program's option
    re.MULTILINE,
)
WORDS = re.compile(r"\b(" + "|".join(sorted(FORBIDDEN, key=len, reverse=True)) + r")\b", re.IGNORECASE)
SQL = re.compile(r"\b(SELECT|RETURNING|LIMIT|WHERE|LATERAL|UPDATE|EXIT WHEN|OUT)\b")
NOT_OURS = {"remaining connection slots"}  # PostgreSQL's own text, by which an error is recognised
PACKAGES = [Path(package.__file__).parent for package in (outbox, dispatchers)]


TEXT_WORDS = re.compile(r"\b(" + "|".join(sorted(IN_TEXTS, key=len, reverse=True)) + r")\b", re.IGNORECASE)


SLOTS = re.compile(r"__slots__|(?<=frozen=True, )slots=True")  # Python's own, and in every other module


JOINED = re.compile(r"""(["'])\s+[bf]*\1""")  # a text in pieces


def parts_of(words: Iterable[str]) -> dict[str, set[str]]:
    return {word: set(re.findall(r"\w+", word)) for word in words}


PARTS, PARTS_IN_TEXTS = parts_of(FORBIDDEN), parts_of(IN_TEXTS)


def may_have(source: str, parts: Mapping[str, set[str]]) -> bool:
    """Whether one of these words is in the source at all. To parse it, or to search for all of them, costs many times as much."""
    text = re.sub(r"[\s_#]+|\\n", " ", JOINED.sub("", SLOTS.sub("", source))).lower()
    words = set(re.findall(r"\w+", text))
    return any(each <= words and word in text for word, each in parts.items())


def refused_in(text: str) -> list[str]:
    return [f"{word!r}: write {FORBIDDEN[word.lower()]!r}, in {text!r}" for word in WORDS.findall(text)]


def refused_in_text(text: str) -> list[str]:
    found = TEXT_WORDS.findall(" ".join(STANDARD.sub("", text).split()))
    refused = [f"{word!r}: write {IN_TEXTS[word.lower()]!r}" for word in found]
    return [*refused, "says 'The same' instead of what it does"] if text.startswith("The same") else refused


# --- help


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from commands(found, f"{name} {each}")


@pytest.mark.parametrize(("name", "command"), list(commands(main, "outbox")), ids=str)
def test_help_uses_the_standard_terms(name: str, command: click.Command) -> None:
    # a command keeps its help option: it must be the one that the other tests of this process expect
    text = command.get_help(click.Context(command, info_name=name, help_option_names=["-h", "--help"]))

    assert refused_in(" ".join(text.split())) == []


# --- log lines and errors


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """The texts of several words that are neither docstrings nor SQL: log lines, errors and stored reasons."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings and " " in text and not SQL.search(text):
                if text not in NOT_OURS:
                    yield node.lineno, text


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py") if path.parent.name != "testing")


def test_log_lines_and_errors_use_the_standard_terms() -> None:
    found = {
        f"{module.relative_to(ROOT)}:{line}": refused
        for module in modules()
        if may_have(source := module.read_text(), PARTS)
        for line, text in sentences(source)
        if (refused := refused_in(text))
    }

    assert found == {}


# --- documents

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*/README.md"))]
OTHERS_TERMS = {"replication slot"}


def prose_of(markdown: str) -> str:
    """The text without code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", markdown))
    return re.sub("|".join(OTHERS_TERMS), "", prose)


def test_documents_use_the_standard_terms() -> None:
    prose = {page: prose_of(page.read_text()).splitlines() for page in DOCUMENTS}

    found = {page: refused for page, lines in prose.items() if (refused := [*chain(*map(refused_in, lines))])}

    assert found == {}


def test_a_forbidden_word_is_found_in_prose_and_not_in_code() -> None:
    assert len(refused_in(prose_of("The lane `halted`.\n\n```text\nheld\n```\nIt goes on.\n"))) == 2


def test_a_forbidden_word_is_found_in_each_kind_of_message() -> None:
    source = 'log.warning("destination %r goes on", name)\nraise Error(f"entry {id} is held: {why}")\n'

    assert sorted(line for line, text in sentences(source) if refused_in(text)) == [1, 2]


# --- docstrings and comments


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def folder_of(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def by_folder(modules: Iterable[Path]) -> dict[str, list[Path]]:
    return {folder: list(paths) for folder, paths in groupby(sorted(modules, key=folder_of), folder_of)}


@cache
def source_in_question(module: Path) -> str:
    """The source, if it has a word in question, else nothing."""
    source = module.read_text()
    return source if "The same" in source or may_have(source, PARTS_IN_TEXTS) else ""


def refused_of(modules: Iterable[Path], read: Callable[[str], Iterator[tuple[int, str]]]) -> dict[str, list[str]]:
    """What is refused in the modules, by their lines."""
    return {
        f"{module.relative_to(ROOT)}:{line}": refused
        for module in modules
        for line, text in read(source_in_question(module))
        if (refused := refused_in_text(text))
    }


FOLDERS = ("alembic", "examples")
CHECKS = [
    path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)
]
DOCUMENTED = by_folder(
    [
        *(path for package in PACKAGES for path in package.rglob("*.py")),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
        *CHECKS,
        ROOT / "dev.py",
    ]
)


@pytest.mark.parametrize("folder", DOCUMENTED)
def test_docstrings_and_comments_use_the_standard_terms(folder: str) -> None:
    assert refused_of(DOCUMENTED[folder], texts) == {}


def test_a_forbidden_word_is_found_in_docstrings_and_comments() -> None:
    source = '"""The same of a lane."""\nx = 1  # nobody tells\nheld = "a lock is held"\n'

    found = [(line, len(refused_in_text(text))) for line, text in texts(source)]

    assert found == [(1, 2), (2, 2)]


# --- tests and benchmarks


def names(source: str) -> Iterator[tuple[int, str]]:
    """What a module defines, with spaces for underscores: functions, classes, parameters and variables."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name.replace("_", " ")
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                if not name.startswith("__"):  # `__slots__`
                    yield node.lineno, name.replace("_", " ")


CHECKED = by_folder(CHECKS)


@pytest.mark.parametrize("folder", CHECKED)
def test_names_and_sentences_of_tests_use_the_standard_terms(folder: str) -> None:
    assert refused_of(CHECKED[folder], names) == {}
    assert refused_of(CHECKED[folder], sentences) == {}


def test_a_word_is_in_question_wherever_it_is_found() -> None:
    sources = ['log("it goes"\n    f" on")', "x = 'what\\nheld'", '"""a\n    lane"""', "is_held = 1", "# it goes\n# on"]

    assert [may_have(source, PARTS) for source in [*sources, "slots, beheld = 1, 2"]] == [True] * 6
    assert not may_have("@dataclass(frozen=True, slots=True)\nclass Understands:\n    beheld = goes, on", PARTS)


def test_a_forbidden_word_is_found_in_names() -> None:
    source = "def test_whoever_waits(told):\n    self.a_look = 1\n    HALTED, lane = told, 2\n"

    assert sorted(line for line, text in names(source) if refused_in_text(text)) == [1, 1, 2, 3, 3]
