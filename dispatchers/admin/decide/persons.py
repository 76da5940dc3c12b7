"""Whether two names of operators are one person's. Pure."""

import unicodedata
from typing import Final

_INVISIBLE: Final = ("Cc", "Cf", "Cs", "Co", "Cn")
"""The general categories of what cannot be seen: controls, zero-width characters, unassigned ones."""

_IGNORED: Final = (
    *((0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x3164, 0x3164), (0xFE00, 0xFE0F)),
    *((0xFFA0, 0xFFA0), (0xE0100, 0xE01EF)),
)
"""Further ranges that cannot be seen: letters and marks without a shape of their own. Source: Unicode,
DerivedCoreProperties.txt, Default_Ignorable_Code_Point."""


def is_same_person(first: str, second: str) -> bool:
    """Whether the names differ only in spelling: in case, width, composition, spaces, or in what cannot be seen.

    Letters of two scripts that look alike differ.
    """
    return _folded(first) == _folded(second)


def _folded(name: str) -> str:
    parts = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    seen = "".join(char for char in parts if not _is_invisible(char))
    return " ".join(unicodedata.normalize("NFKC", seen).split())


def _is_invisible(char: str) -> bool:
    is_ignored = any(first <= ord(char) <= last for first, last in _IGNORED)
    return is_ignored or (unicodedata.category(char) in _INVISIBLE and not char.isspace())
