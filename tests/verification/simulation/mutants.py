"""How a guard is removed: something of the code is replaced for a while."""

from collections.abc import Callable
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


def without(owner: Any, name: str, replacement: Any) -> Patch:
    """Replace a method, a function or a constant."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, replacement)


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> Patch:
    """Replace a method by `wrap(original, *arguments)`."""
    original = getattr(owner, name)
    return without(owner, name, lambda *arguments: wrap(original, *arguments))
