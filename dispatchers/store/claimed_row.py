"""A claimed row of the queue as a `ClaimedEntry`: its JSON is parsed here, and nowhere else."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import UUID

from dispatchers.stored_outcome import NOTHING_STORED, read_outcome
from dispatchers.transitions import ClaimedEntry

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_make = ClaimedEntry._make


def claimed_entry(row: Sequence[Any], token: UUID) -> ClaimedEntry:
    """row: the fields of `ClaimedEntry` in their order, without the token; its last three are texts of JSON.

    Raises `ValueError` for a text that cannot be read: the claim fails, and the row is then set aside.
    """
    if row[-3] is None and row[-2] == row[-1] == "{}":  # most
        return _make((*row[:-3], NOTHING_STORED, _EMPTY, _EMPTY, token))
    return _make((*row[:-3], read_outcome(row[-3]), read_object(row[-2]), read_object(row[-1]), token))


def read_object(text: str) -> Mapping[str, Any]:
    """A stored JSON object; most are empty."""
    if text == "{}":
        return _EMPTY
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the stored JSON is not an object")  # of a row, not of a caller
    return value
