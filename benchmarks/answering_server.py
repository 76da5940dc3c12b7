"""The server of `bench sends`, in a process of its own: it answers each request after 20 ms, in clear and over TLS.

It prints one line, its two ports. It does as little as it can, so that the clients are what is measured.
"""

import asyncio
import re
import resource
import ssl
import sys

ANSWER_SECONDS = 0.02
BODY = b'{"id": "pi_1", "object": "payment_intent", "status": "requires_payment_method", "amount": 2000}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)


class Answering(asyncio.Protocol):
    """Reads requests whole, whatever they are, and answers each."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.unread += data
        while (head := self.unread.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self.unread, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self.unread) < end:
                return
            self.unread = self.unread[end:]
            self.loop.call_later(ANSWER_SECONDS, self.answer)

    def answer(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(ANSWER)


async def serve(certificate: str, key: str) -> None:
    loop = asyncio.get_running_loop()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    servers = [await loop.create_server(Answering, "127.0.0.1", 0, ssl=each, backlog=4096) for each in (None, tls)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the benchmark ends, however it ends


def raise_file_limit() -> None:
    """As many files as the system allows: the usual 1,024 are too few for a thousand connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    raise_file_limit()
    asyncio.run(serve(*sys.argv[1:]))
