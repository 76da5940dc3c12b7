"""The play: who is started in which order, what happens to them, and when it is over."""

import base64
import secrets
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from sqlalchemy.orm import Session

import outbox
from dispatchers.testing.postgres import PostgresUnavailable, temporary_postgres
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo import shop
from examples.demo.audit import Audit, audit
from examples.demo.children import Child, Children, children
from examples.demo.effects import CONCURRENCY
from examples.demo.killer import Killer
from examples.demo.receipts import Receipt, read_receipts
from examples.demo.snapshot import OPEN, Service, Snapshot
from examples.demo.view import View
from outbox import migrations

MISBEHAVIOUR = {
    "--lose": 0.10,
    "--fail": 0.01,
    "--fail-before": 0.01,
    "--unavailable": 0.02,
    "--rate-limit": 0.01,
    "--slow": 0.02,
    "--slow-for": 5,  # longer than the adapter's timeout, so that a retry meets its own key executing
    "--latency": 0.25,
}
ORDERS_PER_SECOND = 15
RUSH_SECONDS_MIN = 20  # long enough for five kills, each with the recovery from it
CALM_SECONDS_MAX = 60  # after the last checkout; leases and retries take about fifteen
LOOK_EVERY_SECONDS = 0.1


class Stuck(RuntimeError):
    """The play cannot go on; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the command line asks for.

    database: a URL, or None for a temporary PostgreSQL, and SQLite where none can be had.
    forgetful: the payment service remembers no key, which shows what the keys are for, and that the audit can fail.
    """

    orders: int
    seed: int
    database: str | None
    sqlite: bool
    forgetful: bool = False

    @property
    def rush_seconds(self) -> float:
        return max(RUSH_SECONDS_MIN, self.orders / ORDERS_PER_SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is left when the processes have gone."""

    audit: Audit
    last: Snapshot
    receipts: Sequence[Receipt]
    database: str


def play(script: Script, view: View) -> Ending:
    """All of it. Every process has ended when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="outbox-demo-") as name:
        folder = Path(name)
        view.tell(0, "preparing the database")
        with database(script, folder) as (url, origin):
            view.tell(0, f"on {origin}")
            secret = "demo:" + base64.b64encode(secrets.token_bytes(32)).decode()
            outbox.configure(outbox.Keyring.from_text(secret), env="demo")
            migrations.upgrade(url)
            shop.Base.metadata.create_all(shop.connect(url))
            environment = {"DATABASE_URL": url, "OUTBOX_SECRET": secret, "OUTBOX_ENV": "demo"}
            with children(folder) as started:
                act = Act(script, view, started, environment, folder)
                last = act.run()
            receipts = read_receipts(folder / "receipts.jsonl")
            ledger = StripeLedger(folder / "ledger.sqlite")
            result = audit(
                orders=script.orders,
                receipts=receipts,
                charges=ledger.charges,
                states=states_of(url, receipts),
                uncertain_max=len(last.struck) * CONCURRENCY + last.service.stored_500,
                suppressed=last.service.replays,
            )
            ledger.close()
            return Ending(audit=result, last=last, receipts=receipts, database=origin)


@contextmanager
def database(script: Script, folder: Path) -> Iterator[tuple[str, str]]:
    """A database's URL, and the words for it."""
    if script.database is not None:
        yield script.database, "the given database"
        return
    origin = "SQLite"
    with ExitStack() as stack:
        if not script.sqlite:
            try:
                server = stack.enter_context(temporary_postgres())
            except PostgresUnavailable as unavailable:
                origin = f"SQLite, because {unavailable}"
            else:
                yield server.url, server.origin
                return
        yield f"sqlite:///{folder / 'shop.sqlite'}", origin


def states_of(url: str, receipts: Sequence[Receipt]) -> dict[str, str]:
    """What the outbox claims of each order's charge."""
    claimed: dict[str, str] = {}
    with Session(shop.connect(url)) as session:
        for receipt in receipts:
            parent = outbox.ParentKey(receipt.key, scope=receipt.customer, source="http")
            states = [entry.state for entry in outbox.status(session, parent)]
            claimed |= dict.fromkeys(receipt.order_ids, " and ".join(states) or "without an entry")
    return claimed


class Act:
    """The processes at work: starts them, kills the dispatcher, looks on until every entry has ended."""

    def __init__(
        self, script: Script, view: View, started: Children, environment: Mapping[str, str], folder: Path
    ) -> None:
        self._script = script
        self._view = view
        self._children = started
        self._environment = dict(environment)
        self._folder = folder
        self._killer = Killer(script.orders)
        self._began = time.monotonic()

    def run(self) -> Snapshot:
        service = self._start_service()
        shop = self._children.start("shop", "examples.demo.shop", environment=self._environment)
        shop_url = f"http://127.0.0.1:{shop.first_line()}"
        dispatcher = self._start_dispatcher()
        with httpx.Client(base_url=shop_url, trust_env=False, timeout=10) as self._shop:
            self._before, _ = self._look()
            if any(self._before.get(state) for state in OPEN):
                raise Stuck(f"this database has entries of others that wait to be sent: {self._before}")
            self._ledger = StripeLedger(self._folder / "ledger.sqlite")
            self._began = time.monotonic()
            clients = self._start_clients(shop_url)
            try:
                return self._look_on(dispatcher, clients, others=[service, shop])
            finally:
                self._ledger.close()

    def _look_on(self, dispatcher: Child, clients: Child, others: list[Child]) -> Snapshot:
        deadline = time.monotonic() + self._script.rush_seconds + CALM_SECONDS_MAX
        while True:
            entries, leases = self._look()
            now = self._snapshot(entries)
            self._view.show(now)
            if not clients.running and clients.process.returncode != 0:
                raise clients.died()
            for child in (dispatcher, *others):
                if not child.running:
                    raise child.died()
            if not clients.running and now.open == 0:
                return now
            if time.monotonic() > deadline:
                self._tell("time is up")
                return now
            if self._killer.due(now.settled + now.uncertain, leases):
                dispatcher = self._kill(dispatcher)
            time.sleep(LOOK_EVERY_SECONDS)

    def _kill(self, dispatcher: Child) -> Child:
        dispatcher.kill()
        _, leases = self._look()
        in_flight = self._killer.strike(leases)
        self._tell(f"dispatcher killed with {in_flight} entries in its hands, and started again")
        return self._start_dispatcher()

    # --- who is started

    def _start_service(self) -> Child:
        arguments = ["--port", "0", "--seed", str(self._script.seed), "--ledger", str(self._folder / "ledger.sqlite")]
        for name, value in MISBEHAVIOUR.items():
            arguments += [name, str(value)]
        if self._script.forgetful:
            arguments += ["--window-hours", "0"]
        service = self._children.start("payment-service", "dispatchers.testing.stripe_service", arguments)
        self._environment["STRIPE_URL"] = f"http://127.0.0.1:{service.first_line()}"
        self._environment["STRIPE_API_KEY"] = API_KEY
        return service

    def _start_dispatcher(self) -> Child:
        arguments = ["run", "examples.demo.effects:make_dispatcher"]
        return self._children.start("dispatcher", "dispatchers", arguments, self._environment)

    def _start_clients(self, shop_url: str) -> Child:
        script = self._script
        arguments = [shop_url, "--orders", str(script.orders), "--seconds", str(script.rush_seconds)]
        arguments += ["--seed", str(script.seed), "--run", uuid.uuid4().hex[:12]]
        arguments += ["--receipts", str(self._folder / "receipts.jsonl")]
        return self._children.start("clients", "examples.demo.clients", arguments)

    # --- how things stand

    def _look(self) -> tuple[dict[str, int], list[str]]:
        """How many entries are in which state, and the lease of each that is being sent."""
        answer = self._shop.get("/progress")
        answer.raise_for_status()
        told = answer.json()
        return told["entries"], told["leases"]

    def _snapshot(self, entries: Mapping[str, int]) -> Snapshot:
        return Snapshot(
            seconds=time.monotonic() - self._began,
            orders=self._script.orders,
            answered=sum(bool(receipt.order_ids) for receipt in read_receipts(self._folder / "receipts.jsonl")),
            entries={state: count - self._before.get(state, 0) for state, count in entries.items()},
            service=Service.read(self._ledger),
            struck=list(self._killer.struck),
        )

    def _tell(self, event: str) -> None:
        self._view.tell(time.monotonic() - self._began, event)
