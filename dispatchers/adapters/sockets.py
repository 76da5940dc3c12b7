"""Asks the system about a connection what the event loop does not report."""

import asyncio
import termios
from fcntl import ioctl
from typing import Final

NONE: Final = bytes(4)


def has_unreceived(transport: asyncio.WriteTransport, descriptor: int) -> bool:
    """Whether a part of what was written is still here or on its way. descriptor: of the transport's socket, which is open.

    Each segment of an answer acknowledges the whole request. So bytes that come while this is True are no answer to it. False
    on systems that do not count such bytes; Linux does.
    """
    if transport.get_write_buffer_size():
        return True
    try:
        return ioctl(descriptor, termios.TIOCOUTQ, NONE) != NONE
    except OSError:
        return False
