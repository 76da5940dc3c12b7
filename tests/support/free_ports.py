"""Free ports at 127.0.0.1 for servers that a test starts.

They are below those from which Linux chooses for a client's connection: such a connection could take the port of a server while
it is stopped, and the server could not start again.
"""

import random
import socket
from itertools import islice
from pathlib import Path

FIRST = 10_000
CHOSEN_BY_LINUX = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    end = int(CHOSEN_BY_LINUX.read_text().split()[0]) if CHOSEN_BY_LINUX.exists() else 0
    ports = range(FIRST, max(end, 2 * FIRST))
    return list(islice(filter(_is_free, random.sample(ports, len(ports))), count))


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
