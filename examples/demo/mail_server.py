"""A mail server that fails as real ones do, and keeps a ledger of what it accepted.

    python -m examples.demo.mail_server --ledger FILE --seed 1      listens on a free port, printed as the first line

It may refuse a connection or a recipient, close the connection before the mail has arrived, or accept a mail and close the
connection without a reply.
"""

import argparse
import asyncio
import email
import signal
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from aiosmtpd.smtp import SMTP, Envelope

from examples.demo.mail_ledger import Mail, MailRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How often it misbehaves, as fractions.

    busy: of the connections. hang_up, greylist, lose: of the mails, after MAIL, at RCPT and after the final dot.
    latency_seconds: what accepting takes on average; each between half and one and a half of it.
    """

    busy: float
    hang_up: float
    greylist: float
    lose: float
    latency_seconds: float


class Doorkeeper:
    """The hooks that aiosmtpd calls."""

    def __init__(self, manners: Manners, record: MailRecord, random: Random) -> None:
        self._manners = manners
        self._record = record
        self._random = random

    def connected(self) -> asyncio.Protocol:
        if self._random.random() < self._manners.busy:
            self._record.turn_away("421 too many connections")
            return TooBusy()
        return SMTP(self, hostname="mail.example.com")

    async def handle_MAIL(  # noqa: N802  # aiosmtpd's name
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self._random.random() < self._manners.hang_up:
            self._record.turn_away("hung up")
            hang_up(server)
        envelope.mail_from = address
        return "250 2.1.0 OK"

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self._random.random() < self._manners.greylist:
            self._record.turn_away("450 greylisted")
            return "450 4.7.1 Greylisted, try again later"
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:  # noqa: N802  # aiosmtpd's name
        """Accept the mail first and answer later: a dispatcher that is killed while it waits has sent its mail."""
        headers = email.message_from_bytes(bytes(envelope.original_content or b""))
        lose = self._random.random() < self._manners.lose
        for recipient in envelope.rcpt_tos:
            mail = Mail(
                message_id=headers["Message-ID"],
                key=headers["Idempotency-Key"],
                recipient=recipient,
                order_id=headers["X-Order-Id"],
                subject=headers["Subject"],
                reply_lost=lose,
            )
            self._record.accept(mail)
        await asyncio.sleep(self._manners.latency_seconds * self._random.uniform(0.5, 1.5))
        if lose:
            hang_up(server)
        return "250 2.0.0 OK"


class TooBusy(asyncio.Protocol):
    """Greets with a refusal."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"421 4.3.2 Too many connections\r\n")
        transport.close()


def hang_up(server: SMTP) -> None:
    """Later input is ignored."""
    cast(asyncio.WriteTransport, server.transport).abort()


async def serve(doorkeeper: Doorkeeper) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    server = await loop.create_server(doorkeeper.connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stopping.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="mail_server")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--busy", type=float, default=0)
    parser.add_argument("--hang-up", type=float, default=0)
    parser.add_argument("--greylist", type=float, default=0)
    parser.add_argument("--lose", type=float, default=0)
    parser.add_argument("--latency", type=float, default=0, help="in seconds")
    given = parser.parse_args()
    manners = Manners(
        busy=given.busy,
        hang_up=given.hang_up,
        greylist=given.greylist,
        lose=given.lose,
        latency_seconds=given.latency,
    )
    asyncio.run(serve(Doorkeeper(manners, MailRecord(given.ledger), Random(given.seed))))


if __name__ == "__main__":
    main()
