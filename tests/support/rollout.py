"""Releases, secrets and data keys that are rolled out process by process under load: `python3 dev.py rollout`.

    python3 dev.py rollout                          all parts, on a PostgreSQL that is started for this, in about ten minutes
    python3 dev.py rollout --part upgrade --from v1.0.0    from the release of this tag to this checkout
    python3 dev.py rollout --database sqlite        or the URL of a server in which it may create databases

Two apps and two dispatchers run from wheels, each in its own environment. They are replaced one by one, the apps first and
then the dispatchers first. A receiver notes under which key it got each order, and loses some of its answers. At the end each
order that was committed has arrived under one key, nothing waits, and the outbox's own histories are consistent.

Part `upgrade` also goes back: the processes of the old release run on the new tables. Without --from the old release is this
checkout, and the new one is this checkout with one migration more.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from dispatchers.testing.postgres import temporary_postgres
from outbox import migrations
from support.daemons import wait_for
from support.docs_pages import ROOT
from support.installs import LEFTOVERS, UV, build, run
from support.migrations import NEXT

ORDERS = (("app", "dispatcher"), ("dispatcher", "app"))
MIXED_ORDERS = 20  # between two replacements, so that old and new processes meet
LOST_ANSWERS = 10  # one in as many
EACH = 2  # processes
EXTRAS = "[postgresql,mariadb,migrations,dispatcher,http,encryption]"
SECRETS = {f"k{number}": "A" * 42 + f"{number}=" for number in (1, 2)}
DATA_KEYS = {f"d{number}": "B" * 42 + f"{number}=" for number in (1, 2)}


class Release(NamedTuple):
    """An environment into which a wheel is installed."""

    name: str
    programs: Path

    def run(self, environment: Mapping[str, str], *command: str) -> str:
        done = subprocess.run(
            [self.programs / "outbox", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: outbox {' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout


class Receiver:
    """A service that remembers keys, and now and then loses its answer after it has done its work."""

    def __init__(self) -> None:
        self.keys: defaultdict[str, Counter[str]] = defaultdict(Counter)
        lock = threading.Lock()
        received = self.keys

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
                with lock:
                    sent = received[order]
                    sent[self.headers["Idempotency-Key"]] += 1
                    is_lost = sent.total() == 1 and len(received) % LOST_ANSWERS == 0
                if is_lost:
                    self.close_connection = True
                    return
                self.send_response(201)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Process(NamedTuple):
    """One app or dispatcher, with its log."""

    child: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def stop(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(60)
        assert status == 0, f"{self.log.name} ended with {status}\n{self.output[-3000:]}"
        assert "Traceback" not in self.output, self.output[-3000:]


class Shop:
    """The processes that run, in one folder and on one database."""

    def __init__(self, folder: Path, url: sa.URL) -> None:
        folder.mkdir()
        shutil.copy(Path(__file__).parent / "apps" / "rolling_shop.py", folder)
        self.folder = folder
        self.receiver = Receiver()
        self.engine = sa.create_engine(url, poolclass=sa.NullPool)
        ours = ("OUTBOX_", "PYTHON", "DATABASE_URL")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment |= {
            "DATABASE_URL": url.render_as_string(hide_password=False),
            "OUTBOX_ENV": "rollout",
            "OUTBOX_SECRET": ring(SECRETS, 1),
            "RECEIVER": f"http://127.0.0.1:{self.receiver.server.server_port}",
        }
        self.running: dict[str, list[Process]] = {"app": [], "dispatcher": []}
        self._number = 0

    def deploy(self, kind: str, release: Release, **changed: str) -> None:
        """Replace the processes of this kind one by one: the new one is ready before the old one stops."""
        replaced = list(self.running[kind])
        for number in range(EACH):
            self._start(kind, release, changed)
            if replaced:
                self.running[kind].remove(replaced[number])
                replaced[number].stop()
                self.wait_for_orders()

    def _start(self, kind: str, release: Release, changed: Mapping[str, str]) -> Process:
        self._number += 1
        name = f"{kind}-{self._number}-{release.name}"
        orders = self.folder / f"{name}.orders"
        command = ["outbox", "run", "rolling_shop:make_dispatcher"]
        if kind == "app":
            command = ["python", "rolling_shop.py", str(orders)]
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [release.programs / command[0], *command[1:]],
                cwd=self.folder,
                env=self.environment | changed,
                stdout=output,
                stderr=output,
            )
        process = Process(child, log)
        self.running[kind].append(process)
        is_ready = orders.exists if kind == "app" else lambda: "started" in process.output
        self._wait(is_ready, f"{name} to start")
        return process

    def wait_for_orders(self) -> None:
        """Until the receiver has got some more: old and new processes work together meanwhile."""
        enough = len(self.receiver.keys) + MIXED_ORDERS
        self._wait(lambda: len(self.receiver.keys) >= enough, "orders to arrive")

    def wait_for_none(self, rows: str) -> None:
        self._wait(lambda: self._count(rows) == 0, f"the end of {rows}")

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        everything = [process for processes in self.running.values() for process in processes]

        def ended() -> bool:
            return bool(condition()) or any(process.child.poll() is not None for process in everything)

        wait_for(ended, what, 120)
        for process in everything:
            assert process.child.poll() is None, f"{process.log.name} ended\n{process.output[-3000:]}"

    def finish(self, release: Release, **changed: str) -> str:
        """Stop the apps, let the dispatchers send the rest, and compare. Returns what was found."""
        for process in self.running.pop("app"):
            process.stop()
        self.wait_for_none("outbox_queue")
        for process in self.running.pop("dispatcher"):
            process.stop()
        committed = {line for path in self.folder.glob("*.orders") for line in path.read_text().splitlines()}
        keys = self.receiver.keys
        assert committed == keys.keys(), f"lost {committed - keys.keys()}, never ordered {keys.keys() - committed}"
        twice = {order: sent for order, sent in keys.items() if len(sent) != 1}
        assert not twice, f"sent under two keys: {twice}"
        delivered = self._count("outbox_settlement WHERE state = 'delivered'")
        assert delivered == self._count("outbox_entry") == len(committed)
        release.run(self.environment | changed, "verify")
        again = sum(sent.total() for sent in keys.values()) - len(keys)
        return f"{len(committed)} orders by {self._number} processes, each under one key; {again} were sent again"

    def _count(self, rows: str) -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(sa.text(f"SELECT count(*) FROM {rows}")) or 0)

    def close(self) -> None:
        for process in (process for processes in self.running.values() for process in processes):
            process.child.kill()
            process.child.wait()
        self.receiver.server.shutdown()
        self.receiver.server.server_close()


# --- the parts


def upgrade(shop: Shop, first: tuple[str, str], old: Release, new: Release) -> str:
    """To the new release, back to the old one, and to the new one again."""
    old.run(shop.environment, "db", "upgrade")
    for kind in first:
        shop.deploy(kind, old)
    new.run(shop.environment, "db", "upgrade")
    for release in (new, old, new):
        for kind in first:
            shop.deploy(kind, release)
    new.run(shop.environment, "db", "check")
    return shop.finish(new)


def rotate_secret(shop: Shop, first: tuple[str, str], _: Release, new: Release) -> str:
    """As the runbook of a leaked secret says: known to all, then used, then alone, when no unfinished entry needs the old one."""
    new.run(shop.environment, "db", "upgrade")
    for kind in first:
        shop.deploy(kind, new)
    for numbers in ((1, 2), (2, 1), (2,)):
        if numbers == (2,):
            shop.wait_for_none("outbox_queue JOIN outbox_entry USING (id) WHERE kid = 'k1'")
        secret = ring(SECRETS, *numbers)
        for kind in first:
            shop.deploy(kind, new, OUTBOX_SECRET=secret)
    return shop.finish(new, OUTBOX_SECRET=secret)


def rotate_data_keys(shop: Shop, first: tuple[str, str], _: Release, new: Release) -> str:
    """From plain values to encrypted ones, and from one data key to the next, with what was stored before."""
    new.run(shop.environment, "db", "upgrade")
    for kind in first:
        shop.deploy(kind, new)
    one, two = ring(DATA_KEYS, 1), ring(DATA_KEYS, 2)
    for keys in (f"none,{one}", one, f"{one},{two}", f"{two},{one}", two):
        if keys == two:
            new.run(shop.environment | {"OUTBOX_DATA_KEYS": f"{two},{one}"}, "keys", "reencrypt", "--plain")
        for kind in first:
            shop.deploy(kind, new, OUTBOX_DATA_KEYS=keys)
    return shop.finish(new, OUTBOX_DATA_KEYS=two)


def ring(keys: Mapping[str, str], *numbers: int) -> str:
    kids = [*keys]
    return ",".join(f"{kids[number - 1]}:{keys[kids[number - 1]]}" for number in numbers)


PARTS = {"upgrade": upgrade, "secret": rotate_secret, "data-keys": rotate_data_keys}


# --- wheels and databases


def installed(name: str, source: Path, folder: Path) -> Release:
    wheel = build("wheel", source, folder / f"{name}-wheel")
    home = folder / name
    run(UV, "venv", "--quiet", "--python", sys.executable, str(home))
    install = (UV, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"))
    run(*install, "--constraint", str(source / "requirements.lock"), f"{wheel}{EXTRAS}")
    return Release(name, home / "bin")


def checkout_of(revision: str, folder: Path) -> Path:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


def with_one_migration_more(folder: Path) -> Path:
    shutil.copytree(ROOT, folder, ignore=LEFTOVERS)
    text = NEXT.format(head=migrations.head(), tables=("queue",))
    (folder / "alembic" / "versions" / "9999_next.py").write_text(text)
    project = folder / "pyproject.toml"
    project.write_text(re.sub(r'^version = ".*"$', 'version = "9999.0.0"', project.read_text(), count=1, flags=re.M))
    return folder


@contextmanager
def new_database(server: sa.URL, folder: Path, name: str) -> Iterator[sa.URL]:
    if server.get_backend_name() == "sqlite":
        yield server.set(database=str(folder / f"{name}.db"))
        return
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    for statement in (f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}"):
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
    yield server.set(database=name)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="dev.py rollout", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--from", dest="old", metavar="REVISION", help="git's name of the old release, for the part upgrade"
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="one of them (default: all)")
    parser.add_argument("--database", metavar="URL", help="of a server, or `sqlite` (default: a temporary PostgreSQL)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end with it
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = given.database or stack.enter_context(temporary_postgres(durable=False)).url
        server = sa.make_url("sqlite://" if url == "sqlite" else url)
        if given.old is None:
            old = installed("old", ROOT, folder)
            new = installed("new", with_one_migration_more(folder / "next"), folder)
        else:
            old = installed("old", checkout_of(given.old, folder / "previous"), folder)
            new = installed("new", ROOT, folder)
        for part in given.part or PARTS:
            for first in ORDERS:
                name = f"rollout_{part.replace('-', '_')}_{first[0]}"
                began = time.monotonic()
                with new_database(server, folder, name) as database, ExitStack() as running:
                    shop = Shop(folder / name, database)
                    running.callback(shop.close)
                    found = PARTS[part](shop, first, old, new)
                print(f"{part}, {first[0]}s first: {found}; {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
