"""The work of a dispatcher: how its parts are set up, in which order they work, and how they stop.

`pipeline.claim_loops` claims, sends and settles entries; `decide` decides what an attempt means. A test can replace the store,
the clock and the random source.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack
from uuid import UUID, uuid4

from dispatchers.admin.check.doctor import OF_SERVER, Context, Diagnosis, diagnose
from dispatchers.callbacks import Callbacks
from dispatchers.delivery import Adapter
from dispatchers.flow_control.surveys import Share
from dispatchers.maintenance.jobs import report_gauges, report_lag
from dispatchers.maintenance.retention import Retention
from dispatchers.operations import Operations
from dispatchers.periodic.schedules import Schedule
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.pipeline.app_transactions import CompletionWorker
from dispatchers.pipeline.claim_loops import ClaimLoops
from dispatchers.pipeline.failover_guard import FailoverGuard, IdentityFile
from dispatchers.pipeline.routing import Routes, merge, unmatched
from dispatchers.pipeline.schedule_worker import ScheduleWorker, first_async, merged_schedules
from dispatchers.process.heartbeat import Heartbeats, declared
from dispatchers.process.loop_watch import Watched, watching
from dispatchers.settings import GivenSettings, Settings
from dispatchers.steady_clock import steady_clock
from dispatchers.store.connections.outage_log import OutageLog
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Store
from dispatchers.store.records.gauges import count_blocked_groups
from dispatchers.telemetry.errors import Reporter
from dispatchers.telemetry.events import Backlog, Observer
from dispatchers.telemetry.http_server import HttpServer, address_of
from dispatchers.telemetry.tracing import Trace
from outbox.default_outbox import default
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.keys import Keyring

log = logging.getLogger("outbox.dispatcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a test may replace. store: used instead of the target. clock: monotonic seconds. rng: the source of randomness."""

    store: Store | None = None
    clock: Callable[[], float] = steady_clock
    rng: random.Random = field(default_factory=random.SystemRandom)


class DispatcherWork:
    """The work of a dispatcher. A `Dispatcher` shows the methods that an app may call; the process and a fleet call the others.

    The arguments are those of a `Dispatcher`. simulation: what a test replaces.
    share: this database's part of limits that several databases share.
    """

    def __init__(
        self,
        target: Any = None,
        *,
        adapters: Mapping[str, Adapter] | None = None,
        include: Sequence[Operations] = (),
        keyring: Keyring | None = None,
        outbox: Outbox | None = None,
        observe: Observer | None = None,
        trace: Trace | None = None,
        report: Reporter | None = None,
        simulation: Simulation | None = None,
        share: Share | None = None,
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._share = share
        self._activity = ActivityLog(observe, trace, report)
        self._keyring, self._outbox = keyring, outbox or default
        self._set_up(Settings.of(settings), target, adapters or {}, include, simulation or Simulation())

    def _set_up(
        self,
        settings: Settings,
        target: Any,
        adapters: Mapping[str, Adapter],
        include: Sequence[Operations],
        simulation: Simulation,
    ) -> None:
        check_include(include)
        clock, rng = simulation.clock, simulation.rng
        self._settings = settings
        self._callbacks = Callbacks(operations.callbacks for operations in include)
        self._routes = Routes(
            merge(adapters, *(o.adapters for o in include)),
            lease=settings.lease,
            margin=settings.margin,
            errors=self._activity.errors,
        )
        schedules = merged_schedules(include)
        for warning in unmatched(self._routes, self._callbacks.names, settings.limits):
            log.warning("%s", warning)
        self.grace = settings.grace
        self.retention = Retention.of(settings.retention, self._routes.windows)
        self.store: Store = simulation.store or self._database_store(target)
        self._require_async_for(self._callbacks.first_async())
        self._require_async_for(first_async(schedules))
        self.errors = self._activity.errors
        self.outages = OutageLog(clock, report=partial(self.errors.report, "dispatcher"))
        self._guard = FailoverGuard(
            self.store,
            env=self._env,
            clock=clock,
            file=None if settings.identity_file is None else IdentityFile(Path(settings.identity_file)),
        )
        self._loops = self._claim_loops(settings, simulation)
        self._watched = None if simulation.store else Watched(self._loops, self.store, self._activity, settings.lease)
        self._schedules = ScheduleWorker(
            self.store,
            schedules,
            at_once=settings.callback_concurrency,
            clock=clock,
            may_enqueue=self._is_trusted,
            away=self.outages.failed,
            skipped=self._activity.note_skipped,
            errors=self.errors,
        )
        self.heartbeats = self._reports(settings, schedules)
        self._completion = CompletionWorker(
            self.store, self._callbacks, clock=clock, rng=rng, away=self.outages.failed, errors=self.errors
        )
        self._sought: UUID | None = None
        self._stopping: asyncio.Event | None = None
        self._is_running = False

    def _claim_loops(self, settings: Settings, simulation: Simulation) -> ClaimLoops:
        return ClaimLoops(
            settings,
            self.store,
            self._routes,
            self._callbacks,
            self._guard,
            self.outages,
            self._activity,
            env=self._env,
            keyring=lambda: self.keyring,
            clock=simulation.clock,
            rng=simulation.rng,
            share=self._share,
        )

    def _reports(self, settings: Settings, schedules: Sequence[Schedule]) -> Heartbeats:
        shown = declared(settings, self._routes, self._callbacks.to_record, self.store.max_connections, schedules)
        return Heartbeats(
            self.store,
            uuid4,
            shown,
            self._loops.in_flight,
            self._activity.tally,
            used_up=self._loops.used_up,
            upcoming=self._schedules.upcoming,
            failing=self._schedules.failing,
        )

    def _database_store(self, target: Any) -> DatabaseStore:
        settings = self._settings
        return DatabaseStore(
            target,
            self._outbox.configuration,
            lease=settings.lease,
            callback_timeout=settings.callback_deadline,
            callback_transactions=settings.callback_transactions,
            promotions_lose_nothing=settings.promotions_lose_nothing,
        )

    def _env(self) -> str:
        return self._outbox.configuration.env

    @property
    def keyring(self) -> Keyring:
        return self._keyring or self._outbox.configuration.keyring

    def serves(self, operation: str) -> bool:
        """Whether one of its adapters sends entries of this operation."""
        return self._routes.find(operation) is not None

    @property
    def callbacks(self) -> frozenset[str]:
        """The names of its callbacks, such as `on_settled bank.charge`. The dispatcher records them when it starts."""
        return self._callbacks.to_record

    @property
    def described(self) -> str:
        """Its env, its database and its adapters, for the log at the start."""
        prefixes, callbacks = len(self._routes.forms), len(self._callbacks.names)
        env, place = self._env(), self.store.place
        return f"env {env}, database {place}; operations or prefixes: {prefixes}, callbacks: {callbacks}"

    @property
    def unready(self) -> str | None:
        """Why it sends nothing, for a health check; None while it is ready to send."""
        if self._stopping is None:
            return "starting: the database has not been checked yet"
        if self._stopping.is_set():
            return "draining"
        if self._guard.suspended is not None:
            return f"sending is suspended: {self._guard.suspended}"
        return None if self._guard.is_current else "the database does not answer"

    async def run_once(self) -> int:
        """Claim, send and settle all entries that are due now; returns how many were settled, with any outcome.

        The next call takes entries that become due again meanwhile. Raises `Suspended` after a failover or a restore of the
        database, until an operator resumes, what the database raises, and `RuntimeError` if this dispatcher is running already.
        """
        with self._alone():
            self._loops.begin()
            async with self._activity.reporting():
                with watching(self._watched):
                    await self._loops.sweep()
                    self._guard.require_trust()
                    await self.reconcile()
                    await self._completion.run_once()
                    await self._schedules.run_once()
                    return await self._loops.run_once()

    async def pump(self, stopping: asyncio.Event) -> None:
        """Claim, send and settle until `stopping` is set. Then finish the sends in flight and settle them.

        If the database does not answer, this waits for it, and keeps the outcomes. A cancellation abandons the sends in flight.
        Raises `ConfigurationError`, after the sends in flight were settled, if the database gets another env, and `RuntimeError`
        if this dispatcher is running already.
        """
        with self._alone():
            self._loops.begin()
            self._stopping = stopping
            async with self._activity.reporting():
                try:
                    with watching(self._watched):
                        await asyncio.gather(*self._loops.until(stopping), *self._pumps(stopping))
                        await self._loops.drain(self.grace)
                except asyncio.CancelledError:
                    await self.abandon()
                    raise
        if self._loops.refusal is not None:
            raise self._loops.refusal

    def _pumps(self, stopping: asyncio.Event) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._completion.pump(stopping)
        yield self._schedules.pump(stopping)

    def _is_trusted(self) -> bool:
        return self._guard.is_current and self._guard.suspended is None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second call meanwhile: two calls at the same time would wait for each other's events without end."""
        if self._is_running:
            raise RuntimeError(
                "this dispatcher is running already: await that call first, or give each call a dispatcher of its own"
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    async def reconcile(self) -> None:
        """Request lookups for a page of entries that became uncertain without a lookup; the schedule repeats this."""
        if self._routes.can_look_up:
            self._sought = await self.store.request_lookups(
                self._routes.may_look_up, self._settings.fencing_delay, self._sought
            )

    async def report_backlog(self) -> None:
        """Log the waiting entries of each destination, and report them to the observer; the schedule repeats this."""
        gauges = await report_gauges(self.store.run, self.store.tables)
        lags = await report_lag(self.store.run, self.store.tables)
        if self._activity.is_observed:
            blocked_groups = await self.store.run(partial(count_blocked_groups, tables=self.store.tables))
            counts = {(name, state): n for name, gauge in gauges.items() for state, n in gauge.states.items()}
            oldest = {name: lag.total_seconds() for name, lag in lags.items()}
            behind = await self._schedules.lags() if self._schedules else {}
            self._activity.report(
                Backlog(
                    entries=counts,
                    oldest_due_seconds=oldest,
                    blocked_groups=blocked_groups,
                    schedule_lag_seconds=behind,
                )
            )

    async def report_server(self) -> None:
        """Log what `outbox doctor` finds in the server's settings. There is no such check for PostgreSQL and SQLite."""
        if self.store.has_server_checks:
            context = Context(tables=self.store.tables, prefix=self._outbox.configuration.prefix)
            for finding in (await diagnose(self.store.run, context, OF_SERVER)).findings:
                log.warning("database server: %s: %s; %s", finding.text, finding.meaning, finding.remedy)

    def _require_async_for(self, callback: str | None) -> None:
        if callback is not None and not self.store.takes_async_callbacks:
            raise ConfigurationError(
                f"the callback {callback} is async: give the dispatcher an AsyncEngine (create_async_engine), or make the"
                " callback sync"
            )

    async def check(self) -> Diagnosis:
        """Raise the error that would end this dispatcher at its start. Otherwise return the findings of `outbox doctor`, as if
        this dispatcher ran already. It writes nothing.
        """
        await self.require_usable()
        context = Context(
            tables=self.store.tables,
            prefix=self._outbox.configuration.prefix,
            env=self._env(),
            keyring=self.keyring,
            encryption=self._outbox.configuration.encryption,
            own=self.heartbeats.as_seen(),
        )
        return await diagnose(self.store.run, context)

    async def require_usable(self) -> None:
        """Raise if this dispatcher cannot work: tables are missing or outdated, the database or unsettled entries belong to
        another env, a secret differs under its kid, or entries have an unknown kid. Writes nothing.
        """
        await self.store.require_usable(self._env(), self.keyring)

    def http_server(self, http: str) -> HttpServer:
        """The server of metrics and health at this address. A dispatcher without an observer gets Prometheus's."""
        from dispatchers.telemetry import prometheus  # needs an extra

        server = HttpServer(address_of(http), page=prometheus.page, unready=lambda: self.unready)
        if not self._activity.is_observed:
            self._activity.observe(prometheus.observer())
        return server

    async def close(self) -> None:
        """Close the adapters' and the store's connections."""
        for closing in (*self._routes.closing(), self.store.close):
            await closing()

    async def abandon(self) -> None:
        """Stop sending immediately. The sends in flight are then in doubt, and another dispatcher takes them over when their
        leases have expired.
        """
        await self._loops.abandon()


def check_include(include: object) -> None:
    """Raise `ConfigurationError` unless it is a list of `Operations`."""
    if not isinstance(include, Sequence) or not all(isinstance(each, Operations) for each in include):
        raise ConfigurationError(
            f"include must be a list of dispatchers.Operations, such as [effects], not {include!r}"
        )
