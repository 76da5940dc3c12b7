"""The work of a fleet: it serves several databases with one set of adapters and of limits."""

import asyncio
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

from sqlalchemy import URL

from dispatchers.callbacks import Callbacks
from dispatchers.delivery import Adapter
from dispatchers.flow_control.shared import SharedLimits
from dispatchers.flow_control.surveys import Share, Surveys
from dispatchers.maintenance.retention import Retention
from dispatchers.operations import Operations
from dispatchers.pipeline.routing import Routes, merge
from dispatchers.pipeline.schedule_worker import first_async, merged_schedules
from dispatchers.process.databases_file import checked_databases, read_databases
from dispatchers.process.dispatcher_work import DispatcherWork, check_include
from dispatchers.settings import GivenSettings, Settings
from dispatchers.steady_clock import steady_clock
from dispatchers.store.connections.outage_log import cause_of
from dispatchers.telemetry.errors import ErrorReports, Reporter
from dispatchers.telemetry.events import UNSERVED, Observers
from dispatchers.telemetry.http_server import HttpServer, address_of
from dispatchers.telemetry.log_ids import work_on_database
from dispatchers.telemetry.tracing import Trace
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.keys import Keyring

log = logging.getLogger("outbox.fleet")

AGAIN_SECONDS = (5.0, 300.0)  # until the next try of a refused database: the first value, then doubled up to the second
CLOSE_SECONDS = 2.0  # for closing the adapters' connections

Databases = Mapping[str, str | URL] | str | os.PathLike[str]


class FleetWork:
    """The work of a fleet. A `Fleet` shows the methods that an app may call. The arguments are those of a `Fleet`."""

    def __init__(
        self,
        databases: Databases | None = None,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        include: Sequence[Operations] = (),
        keyring: Keyring | None = None,
        outbox: Outbox | None = None,
        observe: Observers | None = None,
        trace: Trace | None = None,
        report: Reporter | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._given: dict[str, Any] = {"adapters": adapters, "include": include, "keyring": keyring, "outbox": outbox}
        self._given |= {"trace": trace, "report": report}
        self._settings = settings
        self._observe = observe
        check_include(include)
        _require_sync(Callbacks(operations.callbacks for operations in include).first_async())
        _require_sync(first_async(merged_schedules(include)))
        checked = Settings.of(settings)
        if checked.callback_transactions is not None:
            raise ConfigurationError(
                "a fleet serves several databases, so it has no callback_transactions: use a Dispatcher"
            )
        self.grace = checked.grace
        self._lease = checked.lease
        routes = Routes(
            merge(adapters or {}, *(each.adapters for each in include)),
            lease=checked.lease,
            margin=checked.margin,
            errors=ErrorReports(report),
        )
        self.retention = Retention.of(checked.retention, routes.windows)
        self._closing = routes.closing()
        self._shared = SharedLimits(
            checked.limits,
            concurrency=checked.concurrency,
            max_in_flight=checked.max_in_flight,
            clock=steady_clock,
            wake=self._wake,
        )
        self._surveys = Surveys()
        self._path: Path | None = None
        self.databases: Mapping[str, URL] = {}
        self._served: dict[str, _Served] = {}
        self._to_wake: dict[str, None] = {}  # databases, in the order of their permits
        self.is_abandoned = False
        if databases is not None:
            self.use(databases)

    def use(self, databases: Databases) -> None:
        """Serve these databases. Raises `ConfigurationError`."""
        if isinstance(databases, Mapping):
            self.databases = checked_databases(databases)
        else:
            self._path = Path(databases)
            self.databases = read_databases(self._path)

    @property
    def callbacks(self) -> frozenset[str]:
        """The names of its callbacks, as the dispatcher of each database records them."""
        return Callbacks(operations.callbacks for operations in self._given["include"]).to_record

    @property
    def unready(self) -> str | None:
        """Why it sends nothing, for a health check; None while at least one database is served."""
        reasons = {name: served.unready for name, served in self._served.items()}
        if not reasons:
            return "starting: no database has been checked yet"
        return None if None in reasons.values() else "; ".join(f"{name}: {why}" for name, why in reasons.items())

    def http_server(self, http: str) -> HttpServer:
        """The server of metrics and health at this address. A fleet without an observer gets Prometheus's observers."""
        from dispatchers.telemetry import prometheus  # needs an extra

        server = HttpServer(address_of(http), page=prometheus.page, unready=lambda: self.unready)
        if self._observe is None:
            self._observe = prometheus.observers()
        return server

    async def pump(self, stopping: asyncio.Event) -> None:
        """Serve the databases until `stopping` is set; then finish the sends in flight and settle them. Closes the adapters.

        If a database could not store its last outcomes, this raises its error after the other databases have ended.
        """
        if not self.databases:
            raise ConfigurationError(
                "a fleet needs databases: Fleet('databases.conf', ...), or `outbox run --databases FILE`"
            )
        changed, hung_up = asyncio.Event(), asyncio.Event()
        self._to_wake.clear()  # it belongs to an earlier event loop
        try:
            with _hearing_hangups(hung_up):
                if self._path is not None:
                    self.use(self._path)  # `run` has ignored the signal so far
                while not stopping.is_set():
                    changed.clear()
                    self._serve_what_is_named(changed)
                    await _first_set(stopping, changed, hung_up, seconds=math.inf)
                    if hung_up.is_set():
                        hung_up.clear()
                        self.reread()
                await self._leave_all()
        finally:
            await self._cancel_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    for close in self._closing:
                        await close()

    async def _leave_all(self) -> None:
        for served in self._served.values():
            served.leave()
        await asyncio.gather(*(served.task for served in self._served.values()))
        for served in self._served.values():
            if served.failure is not None:
                raise served.failure

    async def _cancel_all(self) -> None:
        """Cancel the remaining tasks if an error or a cancellation ended `pump`."""
        tasks = [served.task for served in self._served.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reread(self) -> None:
        """Read the file again, and try refused databases immediately. A wrong file is logged, and changes nothing."""
        for served in self._served.values():
            served.again.set()
        if self._path is None:
            log.warning("SIGHUP: the databases were not given in a file, so they stay the same")
            return
        try:
            self.databases = read_databases(self._path)
        except ConfigurationError as error:
            log.error("SIGHUP: %s; the fleet continues with the %d databases that it has", error, len(self.databases))
        else:
            log.info("SIGHUP: %s names %d databases", self._path, len(self.databases))

    async def abandon(self) -> None:
        """Stop sending immediately. The sends in flight are then in doubt until their leases have expired."""
        self.is_abandoned = True
        members = [served.member for served in self._served.values() if served.member is not None]
        await asyncio.gather(*(member.abandon() for member in members))

    def _serve_what_is_named(self, changed: asyncio.Event) -> None:
        """Serve new databases, and drain those that are not named any more. A database with a new URL is drained first."""
        self._served = {name: served for name, served in self._served.items() if not served.task.done()}
        for name, served in self._served.items():
            if self.databases.get(name) != served.url and not served.leaving.is_set():
                log.info(
                    "database %r has %s: draining", name, "moved" if name in self.databases else "gone from the file"
                )
                served.leave()
        for name, url in self.databases.items():
            if name not in self._served:
                served = self._served[name] = _Served(self, name, url)
                served.task.add_done_callback(lambda task: changed.set())

    def _wake(self, database: str) -> None:
        """Wake the database's dispatcher once in each turn of the event loop, even if many sends end in it and free permits."""
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_all)
        self._to_wake[database] = None

    def _wake_all(self) -> None:
        woken, self._to_wake = self._to_wake, {}
        for database in woken:
            served = self._served.get(database)
            if served is not None and served.member is not None:
                served.member.wake()

    # --- called for each database

    def share_of(self, name: str) -> Share:
        return Share(name, self._shared, self._surveys, self._lease)

    def member(self, url: URL, share: Share) -> "Member":
        """A new dispatcher for one database."""
        settings = self._settings.copy()
        if (folder := settings.get("identity_file")) is not None:
            settings["identity_file"] = Path(folder) / share.database
        observer = None if self._observe is None else self._observe.of(share.database)
        return Member(share, url, observe=observer, **self._given, **settings)

    def show_unserved(self, database: str) -> None:
        """Report that a database is named and not served."""
        self.left(database)
        if self._observe is not None:
            with _sending_unaffected():
                self._observe.of(database)(UNSERVED)

    def left(self, database: str) -> None:
        """Stop reporting a database: it is no longer served."""
        if self._observe is not None:
            with _sending_unaffected():
                self._observe.forget(database)


def _require_sync(callback: str | None) -> None:
    if callback is not None:
        raise ConfigurationError(f"the callback {callback} is async: a fleet has synchronous drivers, so make it sync")


class Member(DispatcherWork):
    """The work of one database. The fleet closes the adapters."""

    def __init__(self, share: Share, target: Any, **given: Any) -> None:
        self._is_closed = False
        super().__init__(target, share=share, **given)

    def wake(self) -> None:
        self._loops.wake()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self.store.close()


class _Served:
    """Serves one database until `leave`. A new dispatcher replaces one that the database has refused.

    leaving: set to serve the database no longer. stopping: set when the present dispatcher must drain.
    again: set to try a refused database immediately. failure: why the last outcomes were not stored.
    """

    def __init__(self, fleet: FleetWork, name: str, url: URL) -> None:
        self.url = url
        self.leaving, self.stopping, self.again = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.member: Member | None = None
        self.failure: Exception | None = None
        self._fleet = fleet
        self._name = name
        self._reason: str | None = None
        self.task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def cut_short(self) -> bool:
        return self._fleet.is_abandoned

    @property
    def unready(self) -> str | None:
        return self._reason if self.member is None else self.member.unready

    def leave(self) -> None:
        self.leaving.set()
        self.stopping.set()

    async def _serve(self) -> None:
        from dispatchers.process import daemon

        work_on_database(self._name)
        share = self._fleet.share_of(self._name)
        clock, seconds = asyncio.get_running_loop().time, 0.0
        first, most = AGAIN_SECONDS
        while not self.leaving.is_set():
            self.stopping, began = asyncio.Event(), clock()
            self.again.clear()
            try:
                self._fleet.show_unserved(self._name)
                self.member = self._fleet.member(self.url, share)
                await daemon.work_on(self.member, self)
            except Exception as error:  # a wrong password, missing tables, another env: the others continue
                was_served_long = clock() - began > most
                seconds = first if was_served_long or not seconds else min(2 * seconds, most)
                self._report(error, seconds)
            finally:
                await self._close()
                share.detach()
                self.member = None
            self._fleet.show_unserved(self._name)
            await _first_set(self.leaving, self.again, seconds=seconds)
        share.forget()
        if self.failure is None and not self.cut_short:
            log.info("drained")
        self._fleet.left(self._name)

    def _report(self, error: Exception, seconds: float) -> None:
        self._reason = cause_of(error)
        if self.leaving.is_set():
            self.failure = error
            log.error("not drained: %s; entries in flight stay in doubt until their leases expire", self._reason)
        else:
            log.error("not served: %s; trying again after %g s", self._reason, seconds)

    async def _close(self) -> None:
        if self.member is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.member.close()


@contextmanager
def _sending_unaffected() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("observe= raised; sending is not affected")


def ignore_hangups() -> None:
    """Ignore SIGHUP, which would otherwise end the process."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def _hearing_hangups(hung_up: asyncio.Event) -> Iterator[None]:
    """Set `hung_up` at each SIGHUP, if the system has this signal and the main thread runs the event loop."""
    number, loop = getattr(signal, "SIGHUP", None), asyncio.get_running_loop()
    try:
        before = signal.signal(number, lambda *_: loop.call_soon_threadsafe(hung_up.set)) if number else None
    except ValueError:  # not in the main thread
        number = before = None
    try:
        yield
    finally:
        if number is not None:
            signal.signal(number, before)


async def _first_set(*events: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most `seconds`, which may be infinity."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=None if seconds == math.inf else seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
