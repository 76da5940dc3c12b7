"""The running processes: started, killed and observed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.checkout_results import read_results
from examples.demo.children import Child, Children
from examples.demo.files import Files
from examples.demo.killer import Killer, Lease
from examples.demo.mail_ledger import read_mails
from examples.demo.processes import Processes
from examples.demo.progress import ProgressReader
from examples.demo.snapshot import PaymentService, Snapshot, Tally
from examples.demo.view import View

PAYMENT_MISBEHAVIOUR = {
    "--lose": 0.10,
    "--fail": 0.01,
    "--fail-before": 0.01,
    "--unavailable": 0.02,
    "--rate-limit": 0.01,
    "--slow": 0.02,
    "--slow-for": 5,  # longer than the adapter's timeout, so that a retry meets its own key executing
    "--latency": 0.15,
}
MAIL_MISBEHAVIOUR = {
    "--rate-limit": 0.03,
    "--lose": 0.01,
    "--latency": 0.05,
}
ORDERS_PER_SECOND = 15
RUSH_SECONDS_MIN = 20  # long enough for five kills, each with the recovery from it
MAX_STALL_SECONDS = 180  # without any entry that ends, after the last checkout; leases and retries take about fifteen
LOOK_EVERY_SECONDS = 0.1
QUIET_SECONDS = 0.3  # a COMMIT takes milliseconds, and on a crowded disk some tens of them

STRIPE, MAIL = "stripe", "postmark"  # the destinations: what the operations' names begin with


class Stuck(RuntimeError):
    """The demo cannot continue; the text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line.

    database: a URL. None: a temporary PostgreSQL, or SQLite if no PostgreSQL can be started.
    forgetful: the payment service remembers no key. This shows why keys are needed, and that the audit can fail.
    """

    orders: int
    seed: int
    database: str | None
    sqlite: bool
    forgetful: bool = False

    @property
    def rush_seconds(self) -> float:
        return max(RUSH_SECONDS_MIN, self.orders / ORDERS_PER_SECOND)


class Scenario:
    """Starts the processes, kills the dispatcher, and waits until every entry has ended. The processes then still run.

    `started` ends the processes. `close` closes what this object opened to observe them.
    """

    def __init__(
        self, options: DemoOptions, view: View, started: Children, environment: Mapping[str, str], files: Files
    ) -> None:
        self._options = options
        self._view = view
        self._processes = Processes(started, environment, files, seed=options.seed)
        self._files = files
        self._killer = Killer(2 * options.orders)  # a charge and a receipt each
        self._ledger = StripeLedger(files.payments)
        self._began = time.monotonic()
        window_hours = 0 if options.forgetful else None
        self._others = [
            self._processes.start_payment_service(PAYMENT_MISBEHAVIOUR, window_hours=window_hours),
            self._processes.start_mail_service(MAIL_MISBEHAVIOUR),
            self._processes.start_shop(),
        ]
        self._progress = ProgressReader(self._processes.shop_url)
        self._before: dict[str, Tally] = {}

    def close(self) -> None:
        self._progress.close()
        self._ledger.close()

    def rush(self) -> Snapshot:
        """Start the clients. Return the state when every entry has ended, or when none has ended for three minutes."""
        self._before, _ = self._progress.read()
        if any(tally.open for tally in self._before.values()):
            raise Stuck(f"this database already has entries that wait to be sent: {self._before}")
        dispatcher = self._processes.start_dispatcher()
        self._began = time.monotonic()
        clients = self._processes.start_clients(self._options.orders, self._options.rush_seconds)
        ended, ended_at = 0, self._began
        while True:
            tallies, leases = self._progress.read()
            now = self._snapshot(tallies)
            self._view.show(now)
            if not clients.running and clients.process.returncode != 0:
                raise clients.died()
            self._require_alive(dispatcher)
            if not clients.running and now.entries.open == 0:
                return now
            if clients.running or now.entries.ended != ended:
                ended, ended_at = now.entries.ended, time.monotonic()
            if time.monotonic() > ended_at + MAX_STALL_SECONDS:
                self.report_event(f"no entry has ended for {MAX_STALL_SECONDS} s: the demo stops")
                return now
            if self._killer.due(now.entries.ended, leases):
                dispatcher = self._kill(dispatcher)
            time.sleep(LOOK_EVERY_SECONDS)

    def snapshot(self) -> Snapshot:
        return self._snapshot(self._progress.read().tallies)

    def report_event(self, event: str) -> None:
        self._view.report_event(time.monotonic() - self._began, event)

    @property
    def interrupted(self) -> set[UUID]:
        """The entries that the dispatcher was sending at one of the kills."""
        return {lease.entry_id for interrupted in self._killer.interrupted for lease in interrupted}

    def _require_alive(self, dispatcher: Child) -> None:
        for child in (dispatcher, *self._others):
            if not child.running:
                raise child.died()

    def _kill(self, dispatcher: Child) -> Child:
        dispatcher.kill()
        interrupted = self._killer.record_kill(self._leases_left())
        mails = sum(lease.destination == MAIL for lease in interrupted)
        charges = len(interrupted) - mails
        self.report_event(f"dispatcher killed, and started again: it was sending {charges} charges and {mails} mails")
        return self._processes.start_dispatcher()

    def _leases_left(self) -> list[Lease]:
        """The leases of a killed dispatcher, once they no longer change: the database may still execute the COMMIT of a claim."""
        _, leases = self._progress.read()
        while True:
            time.sleep(QUIET_SECONDS)
            _, later = self._progress.read()
            if set(later) == set(leases):
                return leases
            leases = later

    # --- the current state

    def _snapshot(self, tallies: Mapping[str, Tally]) -> Snapshot:
        return Snapshot(
            seconds=time.monotonic() - self._began,
            orders=self._options.orders,
            answered=sum(bool(checkout.order_ids) for checkout in read_results(self._files.results)),
            charges=self._ours(tallies, STRIPE),
            receipts=self._ours(tallies, MAIL),
            payments=PaymentService.read(self._ledger),
            mails=read_mails(self._files.mails),
            interrupted=list(self._killer.interrupted),
        )

    def _ours(self, tallies: Mapping[str, Tally], destination: str) -> Tally:
        """Without those of an earlier run on the same database."""
        return Tally(tallies.get(destination, Tally()) - self._before.get(destination, Tally()))
