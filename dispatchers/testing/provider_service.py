"""The fake of a provider on a real HTTP server: in a thread for tests, or as a process of its own.

with service_of(resend) as service: ...

python -m dispatchers.testing.provider_service postmark --ledger FILE --lose 0.1      # prints its port as the first line
"""

import argparse
import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from dispatchers.adapters.providers import PROVIDERS
from dispatchers.adapters.providers.adapter import ProviderAdapter
from dispatchers.adapters.providers.profile import Profile
from dispatchers.testing.faulty_http import FaultyHttp, Request, faulty_http, reset_connection
from dispatchers.testing.provider_core import Answered, Effect, Execution, FakeProvider, Reply
from dispatchers.testing.service_faults import Faults

HELD_SECONDS = 30.0  # a test that forgets to release its requests ends all the same


@dataclass(frozen=True, slots=True)
class RunningProvider:
    """The fake service of a profile.

        with service_of(resend) as mails:
            adapter = mails.adapter()                      # or resend(api_key=..., base_url=mails.url)
            mails.fake.force(ServiceFault.LOSE_RESPONSE)
            ...
            assert len(mails.fake.effects) == 1
            mails.fake.advance(timedelta(days=2))

    url: the `base_url` for an adapter or an SDK. fake: its effects, faults and clock. remote: the HTTP server.
    """

    url: str
    fake: FakeProvider
    remote: FaultyHttp
    _released: threading.Event

    def adapter(self, **settings: Any) -> ProviderAdapter:
        """An adapter for this service. settings: those of the profile's adapter; credentials are invented."""
        profile = self.fake.profile
        invented = {name: f"fake_{name}" for name in profile.settings(self.url)}
        return profile(**{"base_url": self.url, **invented, **settings})

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """In the block, no request that begins to execute ends: its key is in use."""
        self._released.clear()
        try:
            yield
        finally:
            self._released.set()


@contextlib.contextmanager
def service_of(profile: Profile, **settings: Any) -> Iterator[RunningProvider]:
    """A server on a free loopback port that does what the profile states. settings: those of `FakeProvider`."""
    fake = FakeProvider(profile, **settings)
    released = threading.Event()
    released.set()

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(fake.latency().total_seconds())
        received = fake.receive(request)
        if isinstance(received, Execution):
            await asyncio.sleep(received.takes.total_seconds())
            if not released.is_set():
                await asyncio.to_thread(released.wait, HELD_SECONDS)
            received = fake.execute(received)
        return await _write(received, writer)

    with faulty_http() as remote:
        remote.behave(behave)
        try:
            yield RunningProvider(f"{remote.url}{fake.base_path}", fake, remote, released)
        finally:
            released.set()


async def _write(reply: Reply, writer: asyncio.StreamWriter) -> bool:
    """Send the reply, or lose it. Returns whether the connection may be used again."""
    if reply.lost == "reset":
        reset_connection(writer)
    if reply.lost in ("reset", "closed"):
        return False
    body = b"" if reply.body is None else json.dumps(reply.body).encode()
    kind = {} if reply.body is None else {"Content-Type": "application/json"}
    headers = {**kind, **({} if reply.status == 204 else {"Content-Length": str(len(body))}), **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} Said", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    sent = body[: len(body) // 2] if reply.lost == "cut" else body
    writer.write("\r\n".join(lines).encode("latin-1") + sent)
    await writer.drain()
    return reply.lost != "cut"


# --- as a process


class Ledger:
    """A file with one line of JSON for each effect and each answer, written at once: another process reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, happened: Effect | Answered) -> None:
        kind = "effect" if isinstance(happened, Effect) else "answer"
        line = json.dumps({kind: {**asdict(happened), "at": happened.at.isoformat()}})
        with self._path.open("a") as file:
            file.write(f"{line}\n")


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="provider_service", description="The fake of a service that has a profile.")
    parser.add_argument("provider", choices=sorted(PROVIDERS))
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seed", type=int, help="for the faults")
    fractions = parser.add_argument_group("faults, as fractions of all requests")
    fractions.add_argument("--lose", type=float, default=0, help="execute, then drop the connection")
    fractions.add_argument("--rate-limit", type=float, default=0, help="429")
    parser.add_argument("--latency", type=float, default=0, help="of a request on average, in seconds")
    given = parser.parse_args()
    faults = Faults(lose_response=given.lose, rate_limit=given.rate_limit, latency=timedelta(seconds=given.latency))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    profile, record = PROVIDERS[given.provider], Ledger(given.ledger)
    with service_of(profile, faults=faults, random=Random(given.seed), record=record) as service:
        print(service.url.rpartition(":")[2].partition("/")[0], flush=True)
        stopped.wait()


if __name__ == "__main__":
    main()
