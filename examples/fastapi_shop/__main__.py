"""The stage: an imitation of Stripe, a mail server that prints, the web process and the sending one, until Ctrl-C.

python -m examples.fastapi_shop --port 8000
"""

import argparse
import asyncio
import base64
import os
import secrets
import signal
import sys
from asyncio.subprocess import Process
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiosmtpd.smtp import SMTP

from dispatchers.testing.stripe_core import API_KEY, FakeStripe
from dispatchers.testing.stripe_service import serving
from examples.fastapi_shop.orders import create_tables


class Mailbox:
    """Prints what it is handed in."""

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's name
        mail = message_from_bytes(envelope.content)
        body = mail.get_payload(decode=True)
        assert isinstance(body, bytes)
        print(f"mail to {mail['To']}: {body.decode().strip()}", flush=True)
        return "250 OK"


async def perform(folder: Path, port: int) -> None:
    loop = asyncio.get_running_loop()
    mails = await loop.create_server(lambda: SMTP(Mailbox(), hostname="mail.example.com"), "127.0.0.1", 0)
    stripe = FakeStripe()
    async with mails, serving(stripe, "127.0.0.1", 0) as stripe_port:
        os.environ.update(
            DATABASE_URL=f"sqlite:///{folder / 'shop.db'}",
            OUTBOX_SECRET=f"k1:{base64.b64encode(secrets.token_bytes(32)).decode()}",
            OUTBOX_ENV="example",
            STRIPE_API_KEY=API_KEY,
            STRIPE_URL=f"http://127.0.0.1:{stripe_port}",
            SMTP_HOST="127.0.0.1",
            SMTP_PORT=str(mails.sockets[0].getsockname()[1]),
        )
        create_tables()
        await run_until_stopped(port)
        print(f"{len(stripe.ledger.charges)} charged", flush=True)


async def run_until_stopped(port: int) -> None:
    """The shop's two processes."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    web = await python("uvicorn", "examples.fastapi_shop.app:app", "--port", str(port))
    sending = await python("dispatchers", "run", "examples.fastapi_shop.effects:make_dispatcher")
    waits = [asyncio.ensure_future(each) for each in (stopped.wait(), web.wait(), sending.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for process in (web, sending):
        if process.returncode is None:
            process.terminate()
    await asyncio.gather(*waits[1:])
    waits[0].cancel()


async def python(module: str, *arguments: str) -> Process:
    # In a session of its own, so that Ctrl-C reaches it once, through us: a second signal would cut its drain short.
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, start_new_session=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.fastapi_shop")
    parser.add_argument("--port", type=int, default=8000)
    with TemporaryDirectory() as folder:
        asyncio.run(perform(Path(folder), parser.parse_args().port))
