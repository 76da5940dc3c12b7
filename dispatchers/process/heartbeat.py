"""The heartbeat of a running dispatcher: its process, its operations and what it has sent, for `outbox status` and the dashboard.

A heartbeat never stops a send. If it cannot be written, this is logged once, and the next heartbeat is written at its usual time.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields, is_dataclass
from datetime import date, timedelta
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.periodic.schedules import Schedule
from dispatchers.pipeline.routing import Route, Routes
from dispatchers.settings import Settings
from dispatchers.store.connections.outage_log import cause_of, is_outage
from dispatchers.store.protocol import Store
from dispatchers.store.records import heartbeats
from dispatchers.store.records.heartbeats import BEAT_SECONDS, DispatcherSeen, Heartbeat
from dispatchers.store.records.send_counts import add_counts
from dispatchers.telemetry.tally import Tallied, Tally
from dispatchers.time_limits import FOREVER, Window
from outbox.times import EPOCH

log = logging.getLogger("outbox.dispatcher")

LEAVE_SECONDS = 1.0  # less than the time in which a process must close its connections


def declared(
    settings: Settings,
    routes: Routes,
    callbacks: frozenset[str],
    max_connections: int | None,
    schedules: Collection[Schedule] = (),
) -> dict[str, Any]:
    """The settings that should be equal in all dispatchers of a fleet. Durations are seconds.

    The path of the identity file is left out, because it may differ between hosts, and so are the callbacks' transactions.
    """
    left_out = ("identity_file", "callback_transactions")
    own = {
        field.name: _plain(getattr(settings, field.name)) for field in fields(settings) if field.name not in left_out
    }
    return own | {
        "callback_timeout": _plain(settings.callback_deadline),
        "callbacks": sorted(callbacks),
        "max_connections": max_connections,
        "operations": {route.name: _operation(route) for route in routes.all},
        **({"schedules": {each.name: _schedule(each) for each in schedules}} if schedules else {}),
    }


def _schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "expression": schedule.expression,
        "jitter": _plain(schedule.jitter),
        "catch_up": schedule.catch_up,
    }


def _operation(route: Route) -> dict[str, Any]:
    memory = route.memory
    return {
        "window": _window(memory.window),
        "timeout": _plain(memory.timeout),
        "max_attempts": memory.max_attempts,
        "max_age": _plain(memory.max_age),
        "at_least_once": memory.at_least_once,
        "can_look_up": memory.can_look_up,
        "form": route.form,
        "search": getattr(route.adapter, "search", None),
        "as_of": _day(getattr(route.adapter, "as_of", None)),
        "failure_fields": list(getattr(route.adapter, "failure_fields", ())),  # it need not inherit from `Adapter`
    }


def _day(day: date | None) -> str | None:
    return None if day is None else day.isoformat()


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
    """Writes this process's heartbeat, and deletes it at a clean stop.

    in_flight: returns the number of sends in flight. tally: counts the attempts since the last heartbeat.
    used_up: returns the settings whose budgets are used up, and the destinations that wait for that.
    upcoming: returns the next instants of its schedules. failing: returns what has failed of those that fail.
    """

    def __init__(
        self,
        store: Store,
        new_id: Callable[[], UUID],
        declared: dict[str, Any],
        in_flight: Callable[[], int],
        tally: Tally,
        *,
        used_up: Callable[[], Mapping[str, list[str]]],
        upcoming: Callable[[], Mapping[str, list[str]]] = dict,
        failing: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._store = store
        self._declared = declared
        self._used_up = used_up
        self._upcoming = upcoming
        self._failing = failing
        self._in_flight = in_flight
        self._tally = tally
        self._new_id = new_id
        self._id = new_id()
        self._is_failing = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write heartbeats until the end of the block. Each run has its own id, because forks are several dispatchers."""
        self._id = self._new_id()
        beating = asyncio.ensure_future(self._beat_regularly())
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating

    async def leave(self) -> None:
        """Delete the heartbeat at a clean stop. If this fails, the process counts as crashed."""
        with suppress(Exception):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._store.run(partial(self._leave, self._tally.take()))

    async def _beat_regularly(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def as_seen(self) -> DispatcherSeen:
        """This process, as others read it from its heartbeat."""
        times = {"since": EPOCH, "seen_at": EPOCH}  # with equal times, `is_live` is true
        return heartbeats.seen(asdict(self._heartbeat()) | times, EPOCH)

    def _heartbeat(self) -> Heartbeat:
        now = {"used_up": self._used_up(), "upcoming": self._upcoming(), "failing": self._failing()}
        return Heartbeat(
            id=self._id,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            version=_version(),
            in_flight=self._in_flight(),
            declared=json.dumps(self._declared | {name: each for name, each in now.items() if each}, sort_keys=True),
        )

    async def beat(self) -> None:
        """Write the heartbeat once. A failure is logged, except an outage, which the claims log."""
        counts = self._tally.take()
        try:
            await self._store.run(partial(self._write, self._heartbeat(), counts))
        except Exception as error:
            self._tally.give_back(counts)
            if not (is_outage(error) or self._is_failing):
                self._is_failing = True
                log.warning(
                    "cannot write this dispatcher's heartbeat, so `outbox status` will not show it; sending continues: %s",
                    cause_of(error),
                )
        else:
            self._is_failing = False

    def _write(self, heartbeat: Heartbeat, counts: Mapping[Tallied, int], connection: Connection) -> None:
        heartbeats.beat(connection, self._store.tables, heartbeat)
        add_counts(connection, self._store.tables, counts)

    def _leave(self, counts: Mapping[Tallied, int], connection: Connection) -> None:
        heartbeats.leave(connection, self._store.tables, self._id)
        add_counts(connection, self._store.tables, counts)


@cache
def _version() -> str:
    """The version that runs, also after another was installed."""
    try:
        return version("sqlalchemy-outbox")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
