"""Makes a `ClaimedEntry` of a claimed row, and parses the row's JSON."""

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
    """row: the fields of `ClaimedEntry` in their order, without the token; the last three are JSON texts.

    Raises `ValueError` for a text that cannot be read. The claim then fails, and the store suspends the entry.
    """
    if row[-3] is None and row[-2] == row[-1] == "{}":  # true of most rows
        return _make((*row[:-3], NOTHING_STORED, _EMPTY, _EMPTY, token))
    return _make((*row[:-3], read_outcome(row[-3]), read_object(row[-2]), read_object(row[-1]), token))


def read_object(text: str) -> Mapping[str, Any]:
    if text == "{}":
        return _EMPTY
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the stored JSON is not an object")  # the stored row is wrong, so no `InvalidValue`
    return value
