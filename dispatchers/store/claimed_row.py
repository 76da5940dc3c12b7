"""A claimed row of the queue as a `ClaimedEntry`: its JSON is parsed here, and nowhere else."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import UUID

from dispatchers.stored_outcome import read_outcome
from dispatchers.transitions import ClaimedEntry

_EMPTY: Mapping[str, Any] = MappingProxyType({})


def claimed_entry(row: Sequence[Any], token: UUID) -> ClaimedEntry:
    """row: the fields of `ClaimedEntry` in their order, without the token; its last three are texts of JSON.

    Raises `ValueError` for a text that cannot be read: the claim fails, and the row is then set aside.
    """
    texts = row[-3:]
    return ClaimedEntry._make((*row[:-3], read_outcome(texts[0]), read_object(texts[1]), read_object(texts[2]), token))


def read_object(text: str) -> Mapping[str, Any]:
    """A stored JSON object; most are empty."""
    if text == "{}":
        return _EMPTY
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the stored JSON is not an object")  # of a row, not of a caller
    return value
