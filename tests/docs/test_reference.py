"""The site's menu and its API reference, which names every public name of `outbox`. (That the site builds: dev.py docs.)"""

import importlib.util
import re
from types import ModuleType

import griffe
import pytest
from support.docs_pages import ROOT
from support.public_api import MODULES

import outbox

REFERENCE = ROOT / "docs" / "reference"


def docstrings() -> ModuleType:
    """The site's extension, which lies beside its pages and is no package."""
    spec = importlib.util.spec_from_file_location("docstrings", REFERENCE / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_names_every_public_name_of_outbox() -> None:
    page = (REFERENCE / "outbox.md").read_text()

    named = set(re.findall(r"^::: outbox\.(\w+)$", page, re.M))

    methods = {name for name in outbox.__all__ if hasattr(outbox.Outbox, name)}
    others = {"configure", "default"}
    assert named == {*outbox.__all__} - methods - others | {"testing", "http", "django"}
    assert all(f"`{name}`" in page or f"`outbox.{name}`" in page for name in methods | others)


def test_the_reference_names_every_documented_module_for_tests() -> None:
    page = (REFERENCE / "dispatchers.md").read_text()
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]

    programs = {name for text in texts for name in re.findall(r"python -m (dispatchers\.testing\.\w+)", text)}

    assert "dispatchers.testing.stripe_service" in programs
    modules = {name for name in MODULES["dispatchers"] if name.startswith("dispatchers.testing")}
    assert modules | programs <= set(re.findall(r"^::: (\S+)$", page, re.M))


def test_the_menu_of_the_site_names_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]

    named = re.findall(r"(\S+\.md)$", menu, re.M)

    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.fixture(scope="module")
def packages() -> griffe.ModulesCollection:
    """All of both, read once: it takes most of a second."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)])
    for package in ("outbox", "dispatchers"):
        loader.load(package)
    return loader.modules_collection


@pytest.mark.parametrize(
    "package",
    [
        "dispatchers",
        "dispatchers.adapters",
        "dispatchers.dashboard",
        "dispatchers.testing",
        "outbox.http",
        "outbox.testing",
    ],
)
def test_every_public_name_has_a_docstring_and_so_is_shown(packages: griffe.ModulesCollection, package: str) -> None:
    loaded = packages[package]

    assert [name for name in loaded.exports or () if loaded[str(name)].docstring is None] == []


def test_a_line_that_describes_a_parameter_becomes_an_item() -> None:
    text = "Send.\n\nkey: the key; other: no item,\n    as it continues.\nfirst, second: two.\nRaises: nothing.\nnote: none."

    shown = docstrings().with_items(text, {"key", "first", "second", "other"})

    assert shown.splitlines() == [
        *("Send.", "", ""),
        "- `key`: the key; other: no item,",
        "    as it continues.",
        "- `first`, `second`: two.",
        *("", "Raises: nothing.", "note: none."),
    ]
