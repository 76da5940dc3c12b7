"""`demo --stay`: a shop that stays open until Ctrl-C, with decisions left for an operator, and the dashboard to make them in."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial

from rich.console import Console
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import outbox
from examples.demo.checkout_results import read_results
from examples.demo.children import Child, Children, children
from examples.demo.demo_run import database, prepare
from examples.demo.files import Files
from examples.demo.folder import temporary_folder
from examples.demo.operator_decision import resolve_one, run
from examples.demo.orders import connect
from examples.demo.processes import Processes
from examples.demo.progress import Progress, ProgressReader
from examples.demo.scenario import LOOK_EVERY_SECONDS, MAIL, STRIPE, DemoOptions, Stuck
from examples.demo.stay_effects import CONTACT
from examples.demo.view import Lines

# More faults than in the other demo: the first customers must leave something to decide.
PAYMENT_MISBEHAVIOUR = {"--lose": 0.1, "--fail": 0.06, "--fail-before": 0.05, "--unavailable": 0.02, "--latency": 0.15}
MAIL_MISBEHAVIOUR = {"--lose": 0.12, "--rate-limit": 0.03, "--latency": 0.3}
DECLINED = ("--declined", "0.06")  # of the cards

OPENING_SECONDS = 6
MAX_WAITING_SECONDS = 300  # leases and retries take about fifteen; a busy machine takes many times as long
LATER_ORDERS, LATER_SECONDS = 30, 60  # the customers of each later minute
OPERATOR = "mara"
EFFECTS = "examples.demo.stay_effects"
SENT = (STRIPE, MAIL, "courier")  # the destinations that are neither paused nor blocked
STAGING_MESSAGES = 3

ADDRESSES = """
The shop is open, and a customer comes in every two seconds. Some entries wait for an operator's decision.

  dashboard        {dashboard}

  shop             {shop}/checkout
  payment service  {payments}
  mail service     {mail}

The command line, in another terminal:

{exports}
  {outbox} status

Ctrl-C stops every process and removes the database."""


def stay(options: DemoOptions, console: Console) -> None:
    """Keep the shop open until Ctrl-C. Every process has ended when this returns or raises."""
    with (
        temporary_folder("outbox-demo-") as folder,
        database(options, folder) as (url, origin),
        children(folder) as started,
        ExitStack() as stack,
    ):
        console.print(f"The shop opens, on {origin}. Its first {options.orders} customers check out.", highlight=False)
        environment, engine = prepare(url), connect(url)
        stack.callback(engine.dispose)
        shop = OpenShop(options, started, environment, engine, Files(folder), Lines(console))
        stack.enter_context(closing(shop))
        shop.open()
        customers = shop.start_customers()  # before the last line: no process starts while a test presses Ctrl-C
        with suppress(KeyboardInterrupt):
            console.print(shop.addresses(), highlight=False, markup=False, soft_wrap=True)
            shop.serve(customers)
        console.print("Stopping every process.")


class OpenShop:
    """The processes of a shop whose services fail often, and the operator who works there."""

    def __init__(
        self,
        options: DemoOptions,
        started: Children,
        environment: Mapping[str, str],
        engine: Engine,
        files: Files,
        view: Lines,
    ) -> None:
        self._options = options
        self._engine = engine
        self._files = files
        self._view = view
        self._processes = Processes(started, environment, files, seed=options.seed)
        self._others = [
            self._processes.start_payment_service(PAYMENT_MISBEHAVIOUR),
            self._processes.start_mail_service(MAIL_MISBEHAVIOUR),
            self._processes.start_shop(),
        ]
        dashboard, self._dashboard_url = self._processes.start_dashboard()
        self._others.append(dashboard)
        self._progress = ProgressReader(self._processes.shop_url)

    def close(self) -> None:
        self._progress.close()

    def open(self) -> None:
        """Serve the first customers. Return when all that can be sent has ended, and the operator has resolved one entry."""
        enqueue_as_staging(self._engine, self._processes.environment)
        self._operate("resume", "--after-restore", "--nothing-lost", reason="this database was staging's until today")
        dispatcher = self._processes.start_dispatcher(EFFECTS)
        self._others.append(dispatcher)
        clients = self._start_clients(self._options.orders, OPENING_SECONDS)
        self._wait(lambda now: is_sending_mail(now) or is_all_sent(now, clients), clients)
        self._others.remove(dispatcher)
        dispatcher.kill()
        self._view.print_line("The dispatcher is killed while it sends, and another one starts.")
        self._others.append(self._processes.start_dispatcher(EFFECTS))
        self._operate("pause", CONTACT.partition(".")[0], reason="the CRM moves to another data centre")
        self._wait(lambda now: is_all_sent(now, clients), clients)
        results = read_results(self._files.results)
        resolve_one(self._engine, self._files, results, self._processes.environment, self._view)

    def start_customers(self) -> Child:
        """Start the customers of the next minute."""
        return self._start_clients(LATER_ORDERS, LATER_SECONDS)

    def serve(self, customers: Child) -> None:
        """Let customers come in until Ctrl-C."""
        while True:
            self._wait(partial(has_ended, customers), customers, max_seconds=2 * LATER_SECONDS)
            customers = self.start_customers()

    def addresses(self) -> str:
        """The addresses of its parts, and how to use the command line."""
        environment = self._processes.environment
        names = ("DATABASE_URL", "OUTBOX_SECRET", "OUTBOX_ENV")
        exports = "\n".join(f"  export {name}={shlex.quote(environment[name])}" for name in names)
        return ADDRESSES.format(
            dashboard=self._dashboard_url,
            shop=self._processes.shop_url,
            payments=environment["STRIPE_URL"],
            mail=environment["MAIL_URL"],
            exports=exports,
            outbox=shlex.join([sys.executable, "-m", "dispatchers"]),
        )

    def _start_clients(self, orders: int, seconds: float) -> Child:
        return self._processes.start_clients(orders, seconds, DECLINED)

    def _operate(self, *command: str, reason: str) -> None:
        """What an operator types, by the real command."""
        given = [*command, "--reason", reason, "--actor", OPERATOR]
        self._view.print_line(f"$ outbox {shlex.join(given)}")
        self._view.print_line(run(given, self._processes.environment))

    def _wait(
        self, is_done: Callable[[Progress], bool], clients: Child, max_seconds: float = MAX_WAITING_SECONDS
    ) -> None:
        """Raises: ChildDied if a process ended that should not have; Stuck after `max_seconds`."""
        deadline = time.monotonic() + max_seconds
        while not is_done(now := self._progress.read()):
            for child in self._others:
                if not child.running:
                    raise child.died()
            if not clients.running and clients.process.returncode != 0:
                raise clients.died()
            if time.monotonic() > deadline:
                raise Stuck(f"after {max_seconds} s there is still something to send: {now.tallies}")
            time.sleep(LOOK_EVERY_SECONDS)


def is_sending_mail(now: Progress) -> bool:
    return any(lease.destination == MAIL for lease in now.leases)


def is_all_sent(now: Progress, clients: Child) -> bool:
    """Whether all that can be sent has ended, after the last customer."""
    return not clients.running and not any(now.tallies[name].open for name in SENT)


def has_ended(clients: Child, now: Progress) -> bool:
    return not clients.running


def enqueue_as_staging(engine: Engine, environment: Mapping[str, str]) -> None:
    """Leave messages of another environment in the queue, as a copied database has them."""
    staging = outbox.Outbox(outbox.Keyring.from_text(environment["OUTBOX_SECRET"]), env="staging")
    with Session(engine) as session, session.begin():
        for number in range(STAGING_MESSAGES):
            message = {"to": f"+49 30 23125 {number:03}", "text": "A test of staging. Please ignore."}
            staging.enqueue(session, "sms.send", message, parent=f"test:{number}")
