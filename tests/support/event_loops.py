"""Which event loop a test runs on: asyncio's own, or uvloop, which many web servers choose if it is installed."""

import asyncio
import warnings
from zlib import crc32

import uvloop

LOOPS = ("mixed", "asyncio", "uvloop")


def loop_of(test: str, loops: str) -> str:
    """The loop of the test with this id. With `mixed` half of all tests run on each, always the same ones."""
    if loops == "mixed":
        return "uvloop" if crc32(test.encode()) % 2 else "asyncio"
    return loops


def set_loop(name: str) -> None:
    """Have each new event loop be of this kind, whichever function makes it."""
    with warnings.catch_warnings():
        # Python 3.14 deprecates policies, and 3.16 removes them. Nothing else reaches `asyncio.run`, anyio and the product.
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if name == "uvloop" else None)
