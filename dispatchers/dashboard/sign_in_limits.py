"""How often a wrong password may be tried: by each client, and for each name by each client."""

import ipaddress
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

MAX_TRIES = 10
"""How often one client may try one name within `SPAN_SECONDS`: a user with a forgotten password tries less often."""
MAX_CLIENT_TRIES = 30
"""How often one client may try all names: several people may share an address."""
SPAN_SECONDS = 60.0
REMEMBERED = 10_000
"""How many clients and names are remembered, those that tried last: some 10 MB."""
MAX_CHARS = 255
"""How many characters of a name or an address count: a header may have many more."""


class SignInLimits:
    """Counts tries within the last minute. A try counts from its start, so concurrent ones are counted too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: OrderedDict[tuple[str, str | None], deque[float]] = OrderedDict()

    def try_now(self, client: str, name: str) -> int | None:
        """Count a try. Returns None if it may be made, else after how many seconds the next one may be."""
        now, limits = self._clock(), tuple(zip(_keys(client, name), (MAX_CLIENT_TRIES, MAX_TRIES), strict=True))
        for key, most in limits:
            tries = self._recent(key, now)
            if len(tries) >= most:
                return math.ceil(tries[0] + SPAN_SECONDS - now) or 1
        for key, _ in limits:
            self._recent(key, now).append(now)
        return None

    def succeeded(self, client: str, name: str) -> None:
        """The last try had the right password: it counts for nothing."""
        for key in _keys(client, name):
            if tries := self._tries.get(key):
                tries.pop()

    def _recent(self, key: tuple[str, str | None], now: float) -> deque[float]:
        tries = self._tries.setdefault(key, deque())
        self._tries.move_to_end(key)
        while tries and tries[0] <= now - SPAN_SECONDS:
            tries.popleft()
        while len(self._tries) > REMEMBERED:
            self._tries.popitem(last=False)
        return tries


def _keys(client: str, name: str) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    network = network_of(client[:MAX_CHARS])
    return (network, None), (network, name[:MAX_CHARS])


def network_of(client: str) -> str:
    """The client's address; for IPv6 the network of 64 bits, because one client may use all its addresses."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Address(int(address) >> 64 << 64))
    return client
