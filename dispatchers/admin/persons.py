"""Whether two names of operators are one person's. Pure."""

import unicodedata

INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me")
"""The general categories (Unicode, chapter 4) of what a reader cannot see, or may overlook: controls, zero-width characters,
combining marks."""


def is_same_person(first: str, second: str) -> bool:
    """Whether the names differ only in spelling: in case, width, accents, spaces, or in what cannot be seen."""
    return _folded(first) == _folded(second)


def _folded(name: str) -> str:
    parts = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).casefold())
    seen = "".join(char for char in parts if unicodedata.category(char) not in INVISIBLE)
    return " ".join(seen.split())
