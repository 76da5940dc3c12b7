"""A reader takes in each file at one sitting, and each function at one glance."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("alembic", "benchmarks", "dispatchers", "examples", "outbox", "tests")
SOURCES = [ROOT / "dev.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_NAME_LENGTH = 70
MAX_DISPATCHER_LINES = 39


def lengths(path: Path) -> dict[str, int]:
    """How many lines each function of this file has, by the line it begins in."""
    nodes = functions_in(ast.parse(path.read_text()))
    return {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in nodes}


def functions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A function is a statement: most of a file's nodes are parts of an expression, and are passed by."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from functions_in(child)


def test_no_file_is_longer_than_600_lines() -> None:
    counts = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCES}

    assert {name: count for name, count in counts.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    found = {f"{path.relative_to(ROOT)}: {name}": count for path in SOURCES for name, count in lengths(path).items()}

    assert {name: count for name, count in found.items() if count > MAX_FUNCTION_LINES} == {}


def test_the_dispatcher_takes_its_keywords_and_little_more() -> None:
    found = lengths(ROOT / "dispatchers" / "process" / "dispatcher.py")

    (count,) = [count for name, count in found.items() if name.startswith("__init__")]
    assert count <= MAX_DISPATCHER_LINES


def test_no_name_of_a_test_is_longer_than_70_characters() -> None:
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M)
    }

    assert {name for name in names if len(name) > MAX_NAME_LENGTH} == set()
