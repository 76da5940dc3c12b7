"""Looks up the addresses of hosts. Each lookup has a thread of its own, so one that hangs delays only sends to its host.

The event loop's own lookups share a few threads. Lookups of one host that hangs would occupy all of them, and would delay the
end of the process.
"""

import asyncio
import socket
from concurrent.futures import Future
from itertools import chain, zip_longest
from threading import Lock, Thread
from typing import NamedTuple


class Address(NamedTuple):
    """Where to connect. ip: with its zone, if it has one."""

    ip: str
    port: int
    family: int


class Resolver:
    """Sends to one host share one lookup: if it hangs, only one thread waits. It may be used from several event loops."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], Future[list[Address]]] = {}
        self._lock = Lock()

    async def addresses(self, host: str, port: int) -> list[Address]:
        """The addresses in the order in which to try them: at least one. The caller limits the time.

        Raises: OSError; `UnicodeError` for a name that DNS cannot have.
        """
        with self._lock:
            running = self._running.get((host, port)) or self._begin(host, port)
        return await asyncio.wrap_future(running)

    def _begin(self, host: str, port: int) -> "Future[list[Address]]":
        lookup: Future[list[Address]] = Future()
        lookup.set_running_or_notify_cancel()  # so a send that gives up cancels it for no other
        Thread(target=self._look_up, args=(lookup, host, port), name="outbox-resolve", daemon=True).start()
        self._running[host, port] = lookup
        return lookup

    def _look_up(self, lookup: "Future[list[Address]]", host: str, port: int) -> None:
        found: list[Address] = []
        error: Exception | None = None
        try:
            found = _found(host, port)
        except Exception as raised:
            error = raised
        with self._lock:
            del self._running[host, port]
        if error is None:
            lookup.set_result(found)
        else:
            lookup.set_exception(error)


def _found(host: str, port: int) -> list[Address]:
    """The addresses, their families in turn, because often all of one family are unreachable: RFC 8305, 4."""
    families: dict[int, list[Address]] = {}
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        ip, zone = str(address[0]), address[3] if len(address) == 4 else 0
        families.setdefault(family, []).append(Address(f"{ip}%{zone}" if zone else ip, port, family))
    return [each for each in chain.from_iterable(zip_longest(*families.values())) if each is not None]
