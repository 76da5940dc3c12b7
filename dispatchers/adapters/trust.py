"""Whom the adapters trust that were given no TLS context."""

import ssl
from functools import cache


@cache
def trusting(cafile: str | None = None) -> ssl.SSLContext:
    """For connections to servers whose certificate an authority of this file has signed; left out, one of the system's.

    The adapters of a process share it, and none changes it: to read the authorities takes longer than to send.
    """
    return ssl.create_default_context(cafile=cafile)
