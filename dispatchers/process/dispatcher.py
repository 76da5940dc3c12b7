"""The dispatcher as an app sees it. `DispatcherWork` does its work."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Unpack

from dispatchers.admin.check.doctor import Diagnosis
from dispatchers.delivery import Adapter
from dispatchers.operations import Operations
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.settings import GivenSettings
from dispatchers.telemetry.errors import Reporter
from dispatchers.telemetry.events import Observer
from dispatchers.telemetry.tracing import Trace
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.keys import Keyring


class Dispatcher:
    """Sends the entries of the outbox.

    target: a database URL, an Engine or an AsyncEngine.
    adapters: adapters by operation prefix. The longest dotted prefix wins.
    include: the app's own `Operations`.
    keyring, outbox: by default the configured ones.
    lease: how long a claim is valid. If a process crashes, its entries can be claimed again after this time.
    margin: the time that clock differences and pauses may take from a lease or a window.
    concurrency: sends at a time to one destination, by this dispatcher; `Limits(total_concurrency=...)` counts over all of them.
    max_in_flight: sends at a time to all destinations, by this dispatcher, with the entries that are claimed ahead.
    limits: concurrency, rate and circuit breaker of single destinations.
    callback_concurrency: how many callbacks run at a time, and how many functions of schedules. Each uses a connection of the
        engine's pool.
    callback_timeout: the deadline of a callback. After it the callback's transaction is rolled back. By default half of
        `lease - margin`.
    callback_transactions: where callbacks run instead of the engine's transactions: `dispatchers.django.DjangoTransactions()`.
    poll: how long an idle dispatcher waits while no hints of commits arrive. While they arrive it waits a second or longer.
    grace: how long a drain waits for the sends in flight.
    retention: how long a finished entry is kept.
    identity_file: a file outside the database that stores the last known database identity: see docs/restore.md.
    promotions_lose_nothing: declares that replication is synchronous. After the promotion of a standby the dispatchers then
        continue without an operator, and record it: see docs/restore.md.
    observe: called each second with what the dispatcher has done: see docs/monitoring.md.
    trace: called for each send, status lookup and callback, for a span: see docs/monitoring.md.
    report: called with each unexpected exception, for an error reporter: see docs/monitoring.md.

    Raises `ConfigurationError` for adapters that break the guarantees.
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
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._work = DispatcherWork(
            target,
            adapters=adapters,
            include=include,
            keyring=keyring,
            outbox=outbox,
            observe=observe,
            trace=trace,
            report=report,
            **settings,
        )

    @property
    def unready(self) -> str | None:
        """Why it sends nothing, for a health check; None while it is ready to send."""
        return self._work.unready

    async def check(self) -> Diagnosis:
        """Raise the error that would end this dispatcher at its start. Otherwise return the findings of `outbox doctor`, as if
        this dispatcher ran already. It writes nothing.
        """
        return await self._work.check()

    async def run_once(self) -> int:
        """Claim, send and settle all entries that are due now; returns how many were settled, with any outcome.

        The next call takes entries that become due again meanwhile. Raises `Suspended` after a failover or a restore of the
        database, until an operator resumes, what the database raises, and `RuntimeError` if this dispatcher is running already.
        """
        return await self._work.run_once()

    def run(self, *, http: str | None = None) -> None:
        """Work until SIGTERM or Ctrl-C, then drain. Needs the extra `dispatcher`.

        http: an address, such as 127.0.0.1:9464, at which to serve metrics and health: see docs/monitoring.md. Needs the extra
            `prometheus`. A dispatcher without an observer gets that of Prometheus.
        """
        daemon = load_daemon("Dispatcher.run()")
        daemon.run(self._work, None if http is None else self._work.http_server(http))

    async def serve(self) -> bool:
        """Work on a running event loop, in its main thread, until SIGTERM or Ctrl-C. Returns whether the dispatcher has drained:
        False after a second signal, or if the database had not answered when the grace period was over. Needs the extra
        `dispatcher`.

        While it works it handles both signals. A program that handles SIGTERM with `signal.signal`, such as uvicorn, gets them
        too. At its end it restores the handlers of `signal.signal`. If you use handlers of `loop.add_signal_handler`, add them
        again. It leaves no task running.
        """
        drained: bool = await load_daemon("Dispatcher.serve()").serve(self._work)
        return drained

    async def close(self) -> None:
        """Close the adapters' and the database's connections."""
        await self._work.close()


def work_of(dispatcher: Dispatcher) -> DispatcherWork:
    return dispatcher._work


def load_daemon(needed_by: str) -> ModuleType:
    """Import the daemon only when it is needed: it imports apscheduler, without which `run_once()` works."""
    try:
        from dispatchers.process import daemon
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "apscheduler":
            raise
        raise missing(needed_by, "dispatcher", error) from error
    return daemon
