"""A fleet as an app sees it: one process that serves several databases. `FleetWork` does its work."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from dispatchers.delivery import Adapter
from dispatchers.operations import Operations
from dispatchers.process.dispatcher import load_daemon
from dispatchers.process.fleet_work import Databases, FleetWork, ignore_hangups
from dispatchers.settings import GivenSettings
from dispatchers.telemetry.errors import Reporter
from dispatchers.telemetry.events import Observers
from dispatchers.telemetry.tracing import Trace
from outbox.instance import Outbox
from outbox.keys import Keyring

if TYPE_CHECKING:
    from dispatchers.process.daemon import Stop


class Fleet:
    """Sends the entries of several databases, in one process.

    databases: the URL of each database by its name, or the path of a file with lines `name = url`, which SIGHUP reads again.
    adapters, include, keyring, outbox, trace, report, settings: those of a `Dispatcher`, for all databases. `concurrency`,
        `max_in_flight` and `limits` hold over all of them together, and the databases share them fairly.
        `identity_file` is a folder, with one file for each database.
    observe: a function that returns the observer of a database, such as `dispatchers.telemetry.prometheus.observers()`.

    The databases are independent: if one does not answer or is refused, the others continue. Raises `ConfigurationError` for
    adapters that break the guarantees, and for wrong names and URLs.
    """

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
        self._work = FleetWork(
            databases,
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
        """Why it sends nothing, for a health check; None while at least one database is served."""
        return self._work.unready

    def run(self, *, http: str | None = None) -> None:
        """Work until SIGTERM or Ctrl-C, then drain. SIGHUP reads the file again. Needs the extra `dispatcher`.

        A second signal ends the process immediately, as for a `Dispatcher`.
        http: an address at which to serve metrics and health. Needs the extra `prometheus`. A fleet without `observe` gets
            Prometheus's observers.
        """
        daemon = load_daemon("Fleet.run()")
        ignore_hangups()  # they stay ignored after the drain
        daemon.run_process(self._work, self._pump, None if http is None else self._work.http_server(http))

    async def serve(self) -> bool:
        """Work on a running event loop, in its main thread, until SIGTERM or Ctrl-C, as `Dispatcher.serve` does. SIGHUP reads the
        file again. Needs the extra `dispatcher`.
        """
        drained: bool = await load_daemon("Fleet.serve()").serve_process(self._work, self._pump)
        return drained

    async def _pump(self, stop: "Stop") -> None:
        await self._work.pump(stop.stopping)


def fleet_work_of(fleet: Fleet) -> FleetWork:
    return fleet._work
