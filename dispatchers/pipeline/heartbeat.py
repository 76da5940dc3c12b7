"""The heartbeat of a running dispatcher: who it is and what it serves, for `outbox status` and `outbox doctor`.

It never stops a send: a heartbeat that cannot be written is logged once, and tried again at its next time.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields, is_dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.delivery import FOREVER, Window
from dispatchers.pipeline.routing import Route, Routes
from dispatchers.settings import Settings
from dispatchers.store import heartbeats
from dispatchers.store.heartbeats import BEAT_SECONDS, DispatcherSeen, Heartbeat
from dispatchers.store.outage_log import cause_of, is_outage
from dispatchers.store.protocol import Store
from outbox.times import EPOCH

log = logging.getLogger("outbox.dispatcher")

LEAVE_SECONDS = 1.0  # of the time in which a process that ends closes its connections


def declared(
    settings: Settings, routes: Routes, callbacks: frozenset[str], connections_max: int | None
) -> dict[str, Any]:
    """What dispatchers of one fleet should have alike. Durations are seconds; the identity file's path is each host's own."""
    own = {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}
    del own["identity_file"]
    return own | {
        "callback_timeout": _plain(settings.callback_deadline),
        "callbacks": sorted(callbacks),
        "connections_max": connections_max,
        "operations": {route.name: _operation(route) for route in routes.all},
    }


def _operation(route: Route) -> dict[str, Any]:
    memory = route.memory
    return {
        "window": _window(memory.window),
        "timeout": _plain(memory.timeout),
        "attempts_max": memory.attempts_max,
        "age_max": _plain(memory.age_max),
        "at_least_once": memory.at_least_once,
        "can_look_up": memory.can_look_up,
        "form": route.form,
    }


def _window(window: Window) -> Any:
    return "forever" if window is FOREVER else _plain(window)


def _plain(value: Any) -> Any:
    match value:
        case timedelta():
            return value.total_seconds()
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return _plain(asdict(value))
        case _:
            return value


class Heartbeats:
    """Writes this process's heartbeat while it runs, and removes it when it stops cleanly. in_flight: how much it sends now."""

    def __init__(self, store: Store, id: UUID, declared: dict[str, Any], in_flight: Callable[[], int]) -> None:
        self._store = store
        self._declared = json.dumps(declared, sort_keys=True)
        self._in_flight = in_flight
        self._id = id
        self._is_failing = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write heartbeats until the end of the block."""
        beating = asyncio.ensure_future(self._beat_again_and_again())
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating

    async def leave(self) -> None:
        """Remove it: the process has stopped cleanly. Should that fail, it is taken for dead."""
        with suppress(Exception):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._store.run(partial(self._work, heartbeats.leave, self._id))

    async def _beat_again_and_again(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def as_seen(self) -> DispatcherSeen:
        """This process as the others will see it."""
        return heartbeats.seen(
            asdict(self._heartbeat()) | {"since": EPOCH, "seen_at": EPOCH}, EPOCH
        )  # alive, at any time

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            id=self._id,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            version=_version(),
            in_flight=self._in_flight(),
            declared=self._declared,
        )

    async def beat(self) -> None:
        """Write it once. A failure is logged, unless the claims log it too: an outage."""
        try:
            await self._store.run(partial(self._work, heartbeats.beat, self._heartbeat()))
        except Exception as error:
            if not (is_outage(error) or self._is_failing):
                self._is_failing = True
                log.warning(
                    "cannot write this dispatcher's heartbeat, so `outbox status` will not show it; sending continues: %s",
                    cause_of(error),
                )
        else:
            self._is_failing = False

    def _work(self, write: Callable[..., None], what: Any, connection: Connection) -> None:
        write(connection, self._store.tables, what)


def _version() -> str:
    try:
        return version("sqlalchemy-outbox")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
