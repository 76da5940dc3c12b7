"""The recipes of docs/inbox-recipes.md as modules: the tests execute the text that readers copy."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from support.docs_pages import ROOT, Snippet, snippets_of

PAGE = ROOT / "docs" / "inbox-recipes.md"


def recipe_of(broker: str, handle: Callable[..., None]) -> Any:
    """The one Python snippet under this heading, with `handle` in the place of the page's own."""
    markdown = PAGE.read_text()
    (section,) = (part for part in re.split(r"^##+ ", markdown, flags=re.M) if part.startswith(f"{broker}\n"))
    (snippet,) = (snippet for snippet in snippets_of(section) if snippet.language == "python")
    shop = ModuleType("shop")
    shop.handle = handle  # type: ignore[attr-defined]
    with _importable(shop, waiting()):
        return _run(snippet, "recipe")


def waiting() -> Any:
    """The page's `waiting.py`, which every recipe imports."""
    (snippet,) = (snippet for snippet in snippets_of(PAGE.read_text()) if snippet.text.startswith("# waiting.py\n"))
    return _run(snippet, "waiting")


def _run(snippet: Snippet, name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(snippet.text, f"{PAGE.name}: {name}", "exec"), module.__dict__)
    return module


@contextmanager
def _importable(*modules: ModuleType) -> Iterator[None]:
    names = {module.__name__: module for module in modules}
    assert not names.keys() & sys.modules.keys()
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class Pauses:
    """Replaces the `time` of a recipe: a pause is the moment at which something else happens."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.count = 0
        self._meanwhile = meanwhile

    def sleep(self, seconds: float) -> None:
        self.count += 1
        self._meanwhile()
