"""What is public has a docstring: for `help()`, editors and readers of the code."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("outbox", "dispatchers") for path in sorted((ROOT / package).rglob("*.py"))]

FACES = ("outbox", "outbox.http", "outbox.migrations", "dispatchers", "dispatchers.adapters")
"""Packages that hand out what lives elsewhere."""

OPEN = (
    *(f"outbox/http/{name}.py" for name in ("django", "fastapi", "flask", "starlette", "status_route")),
    *("outbox/inboxes.py", "outbox/metrics/prometheus.py", "outbox/metrics/opentelemetry.py", "outbox/testing.py"),
    *(f"dispatchers/testing/{name}.py" for name in ("draining", "failpoints", "faulty_http", "postgres")),
    "dispatchers/testing/stripe_service.py",
)
"""Modules whose functions apps import from where they are."""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if "overload" not in decorators:
                yield node


def test_every_module_and_every_class_in_it_says_what_it_is() -> None:
    silent = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent += [
            path.name if node is tree else f"{path.name}: {node.name}"
            for node in (tree, *classes)
            if not ast.get_docstring(node)
        ]

    assert len(SOURCES) > 100
    assert silent == []


@pytest.mark.parametrize("name", FACES)
def test_whatever_a_face_hands_out_says_what_it_is(name: str) -> None:
    face = import_module(name)
    handed_out = {each: getattr(face, each) for each in face.__all__}
    called = {each: value for each, value in handed_out.items() if callable(value)}

    assert called
    assert [each for each, value in called.items() if not inspect.getdoc(value)] == []


def test_every_function_that_is_imported_from_its_home_says_what_it_does() -> None:
    silent = []
    for path in OPEN:
        tree = ast.parse((ROOT / path).read_text())
        silent += [f"{path}: {node.name}" for node in functions(tree) if not ast.get_docstring(node)]

    assert silent == []
