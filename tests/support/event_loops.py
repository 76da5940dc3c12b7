"""Which event loop a test runs on: asyncio's own, or uvloop, which many web servers choose if it is installed."""

import asyncio
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import uvloop

from support.cases import by_test

KINDS = ("asyncio", "uvloop")
LOOPS = ("mixed", "other", *KINDS)
LOOP = pytest.StashKey[str]()
"""Of an item: its loop."""


def loops_of(items: Sequence[pytest.Item], loops: str) -> Iterator[tuple[pytest.Item, str]]:
    """Each case with its loop. With `mixed` a test's cases alternate, and the next test of the module begins with the other loop.

    With `other` each case gets the loop that it does not get with `mixed`. A case's place decides, not its name: a rename changes
    nothing.
    """
    first = LOOPS.index(loops)
    numbers: Counter[str] = Counter()
    for test, cases in by_test(items).items():
        module = test.partition("::")[0]
        for number, case in enumerate(cases, numbers[module]):
            yield case.item, loops if loops in KINDS else KINDS[(first + number) % 2]
        numbers[module] += 1


def set_loop(name: str) -> None:
    """Have each new event loop be of this kind, whichever function makes it."""
    with warnings.catch_warnings():
        # Python 3.14 deprecates policies, and 3.16 removes them. Nothing else reaches `asyncio.run`, anyio and the product.
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if name == "uvloop" else None)
