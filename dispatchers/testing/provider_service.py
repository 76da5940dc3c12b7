"""The fake of a provider on a real HTTP server: `with service_of(resend) as service: ...`."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dispatchers.adapters.providers.adapter import ProviderAdapter
from dispatchers.adapters.providers.profile import Profile
from dispatchers.testing.faulty_http import FaultyHttp, Request, faulty_http, reset_connection
from dispatchers.testing.provider_core import Execution, FakeProvider, Reply

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
