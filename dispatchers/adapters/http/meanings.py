"""The names of an HTTP answer's outcomes, for settings and profiles."""

from typing import Final, Literal, TypeAlias, get_args

Meaning: TypeAlias = Literal[
    "delivered", "rejected", "conclusive", "key_conflict", "deferred", "in_progress", "unknown", "final"
]
"""The outcomes by name; "conclusive" is a rejection, and "final" an unknown, that the service stores under the key."""

MEANINGS: Final = frozenset(get_args(Meaning))
