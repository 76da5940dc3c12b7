"""Dispatchers as processes of their own, and services that they share through files."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

import outbox
from dispatchers import FOREVER, Adapter, Delivered, Delivery, Dispatcher, Outcome
from dispatchers.process.dispatcher_work import DispatcherWork, Simulation
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange, Store
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.time_limits import Window
from dispatchers.transitions import Ending
from support.database import IMPORT_PATH, Database
from support.entries import pauses, put
from support.python_processes import STDOUT, PythonProcess

# --- processes

FACTORY_HEAD = """
import os
import time
from datetime import timedelta
from pathlib import Path

import outbox
from dispatchers import *
from dispatchers.adapters import HttpAdapter, MemoryAdapter, SmtpAdapter, StripeAdapter

ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")
here = Path(__file__).parent
url = os.environ["SHOP_URL"]
"""


class Daemon:
    """`python -m dispatchers run factory:make` in a directory, its output in a file. start: PythonProcess or new_process."""

    def __init__(
        self,
        directory: Path,
        url: sa.URL,
        reference: str = "factory:make",
        *options: str,
        start: Callable[..., Any] = PythonProcess,
        **environment: str,
    ) -> None:
        self.log = directory / f"{uuid4().hex}.log"
        self.started = time.monotonic()
        shown = url.render_as_string(hide_password=False)
        with self.log.open("wb") as output:
            self.process = start(
                *("-m", "dispatchers", "run", reference, *options),
                cwd=directory,
                env=os.environ | {"SHOP_URL": shown, "PYTHONPATH": IMPORT_PATH} | environment,
                stdout=output,
                stderr=STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 60) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def daemon(directory: Path, url: sa.URL, *arguments: str, **settings: Any) -> Iterator[Daemon]:
    """A dispatcher's process for a block; killed at its end if it still runs."""
    running = Daemon(directory, url, *arguments, **settings)
    try:
        yield running
    finally:
        running.kill()


def write_factory(directory: Path, body: str, name: str = "factory") -> None:
    (directory / f"{name}.py").write_text(FACTORY_HEAD + body)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60, workers: Sequence[Daemon] = ()) -> Any:
    """Poll for something that other processes do; fails after `seconds`, or when one of the workers has ended."""
    latest = time.monotonic() + seconds
    longer = pauses()
    while not (found := condition()):
        over = time.monotonic() > latest or any(worker.process.poll() is not None for worker in workers)
        if over and not (found := condition()):
            output = "\n".join(worker.output[-2000:] for worker in workers)
            raise AssertionError(f"timed out waiting for {what}\n{output}")
        time.sleep(next(longer))
    return found


# --- a remote service that outlives its callers, and callers that do not live long

MOMENTS = (
    "after the claim",
    "on the way to the service",
    "on the way back",
    "before settling",
    "after settling",
)


def die_at(moment: str, *, here: str) -> None:
    if moment == here:
        os.kill(os.getpid(), signal.SIGKILL)


class FileService(Adapter):
    """A service that keeps its books in a directory: one file for each key that it executed, and all that it was sent."""

    timeout = timedelta(seconds=5)
    window: Window = FOREVER

    def __init__(self, books: Path, moment: str = "") -> None:
        self._books = books
        self._moment = moment

    @property
    def sent(self) -> list[str]:
        """The key of every request that came in."""
        log = self._books / "sent.txt"
        return log.read_text().split() if log.exists() else []

    @property
    def effects(self) -> list[str]:
        """The keys that were executed."""
        return [path.stem for path in self._books.glob("*.effect")]

    async def send(self, delivery: Delivery) -> Outcome:
        die_at(self._moment, here="on the way to the service")
        with (self._books / "sent.txt").open("a") as log:
            log.write(f"{delivery.key}\n")
        effect = self._books / f"{delivery.key}.effect"
        replayed = effect.exists()
        effect.touch()
        die_at(self._moment, here="on the way back")
        return Delivered({"key": delivery.key}, replayed=replayed)


class GatedService(FileService):
    """Lets no send through before its gate, a file, exists; reports which sends wait."""

    timeout = timedelta(seconds=30)

    @property
    def waiting(self) -> int:
        return len(list(self._books.glob("*.waiting")))

    def open(self) -> None:
        (self._books / "gate").touch()

    async def send(self, delivery: Delivery) -> Outcome:
        (self._books / f"{delivery.key}.waiting").touch()
        while not (self._books / "gate").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().send(delivery)


class ShortLivedClaims(DatabaseStore):
    """The real store of a process that dies at a given moment."""

    def __init__(self, target: Any, ob: outbox.Outbox, moment: str) -> None:
        super().__init__(target, ob.configuration)
        self._moment = moment

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        if settlements:
            die_at(self._moment, here="before settling")
        exchange = await super().exchange(settlements, request)
        if exchange.claimed:
            die_at(self._moment, here="after the claim")
        if exchange.settled:
            die_at(self._moment, here="after settling")
        return exchange


class OverStore(Dispatcher):
    """A dispatcher over a store of the test's own."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self._work = DispatcherWork(simulation=Simulation(store=store), **settings)


# --- a daemon that hangs in its sends

GATED = """
from support.daemons import GatedService

def make():
    grace = timedelta(seconds=float(os.environ.get("GRACE", "30")))
    return Dispatcher(url, outbox=ob, adapters={"crm": GatedService(here)}, concurrency=2, grace=grace)
"""


@contextmanager
def sending_two(
    database: Database, ob: outbox.Outbox, directory: Path, body: str, **environment: str
) -> Iterator[Daemon]:
    """A daemon that has five entries to send, two at the same time, and hangs in the first two."""
    put(database, ob, count=5)
    write_factory(directory, body)
    with daemon(directory, database.url, **environment) as process:
        wait_for(lambda: GatedService(directory).waiting == 2, "two to be sent", workers=[process])
        yield process
