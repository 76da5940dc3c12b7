"""What the dispatcher keeps of an adapter's result."""

import math
from typing import Any

import pytest

from dispatchers import Delivered
from dispatchers.sanitize import storable


@pytest.mark.parametrize(
    ("result", "stored"),
    [
        ({"offset": math.nan}, {"unstorable": "dict"}),
        ({"offset": 10**5000}, {"unstorable": "dict"}),
        ({"offset": {"at": object()}}, {"unstorable": "dict"}),
        ({"text": "x" * 70_000}, {"unstorable": "70012 bytes of JSON"}),
        ({"x" * 70_000: 1}, {"unstorable": "70007 bytes of JSON"}),
        ({f"field {number:04}": 1 for number in range(5_000)}, {"unstorable": "85000 bytes of JSON"}),
    ],
    ids=["not a number", "too many digits", "no JSON", "a long text", "a long name", "many fields"],
)
def test_a_result_that_cannot_be_kept_is_replaced_by_what_it_was(result: Any, stored: Any) -> None:
    assert storable(Delivered(result)) == Delivered(stored)


@pytest.mark.parametrize("result", [{"stream": "ORDERS", "seq": 7}, {"at": [1.5, None, True]}, {7: "x"}, "text", None])
def test_a_result_that_can_be_kept_is_kept(result: Any) -> None:
    assert storable(Delivered(result)) == Delivered(result)
