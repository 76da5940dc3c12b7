"""A real Galera cluster of three MariaDB nodes, on loopback ports and in a folder of its own: `python3 dev.py galera`."""

import argparse
import os
import pwd
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pymysql
import sqlalchemy as sa

from support.free_ports import free_ports
from support.mariadb_server import FAST, SERVERS, inside, install, missing_program
from support.server_process import ServerProcess

PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
GROUP = {
    # A node that is silent leaves the group after 2 to 3 seconds, not after 15
    **{"evs.keepalive_period": "PT0.3S", "evs.suspect_timeout": "PT2S", "evs.inactive_timeout": "PT3S"},
    **{"evs.inactive_check_period": "PT0.3S", "evs.install_timeout": "PT3S", "gcache.size": "64M"},
}
NEW_CLUSTER = "--wsrep-new-cluster"
MAX_SECONDS = 120
MAX_LOG_CHARS = 3000
SLEEP = 0.1


def missing_part() -> str | None:
    """What this machine lacks for a cluster."""
    if missing_program() is not None:
        return missing_program()
    if _provider() is None:
        return "libgalera_smm.so (the package galera-4)"
    return None if shutil.which("rsync") else "rsync"


class Node(ServerProcess):
    """One server of the cluster. url: of its own socket, so that a client of it is a client of no other node."""

    def __init__(self, folder: Path, number: int, group: Sequence[int], ist_port: int, sst_port: int) -> None:
        self.name = f"n{number}"
        self.folder = folder
        self._socket = folder / f"{self.name}.sock"
        self.data = folder / self.name
        query = {"unix_socket": str(self._socket), "ssl_disabled": "1"}
        self.url = sa.URL.create("mariadb+pymysql", "root", query=query)
        options = GROUP | {
            "gmcast.listen_addr": f"tcp://127.0.0.1:{group[number]}",
            "ist.recv_addr": f"127.0.0.1:{ist_port}",
        }
        members = ",".join(f"127.0.0.1:{port}" for port in group)
        command = [
            *(*_as_its_user(), _server(), "--no-defaults", *FAST, f"--datadir={self.data}", f"--socket={self._socket}"),
            *("--skip-networking", "--default-storage-engine=InnoDB", "--binlog-format=ROW"),
            *("--innodb-autoinc-lock-mode=2", "--wsrep-on=ON", f"--wsrep-provider={_provider()}"),
            *("--wsrep-cluster-name=outbox", f"--wsrep-cluster-address=gcomm://{members}"),
            *(f"--wsrep-node-name={self.name}", "--wsrep-node-address=127.0.0.1", "--wsrep-slave-threads=2"),
            *("--wsrep-sst-method=rsync", f"--wsrep-sst-receive-address=127.0.0.1:{sst_port}"),
            "--wsrep-provider-options=" + ";".join(f"{name}={value}" for name, value in options.items()),
        ]
        super().__init__(command, folder / f"{self.name}.log", **inside(folder))

    def start(self, *more: str) -> None:
        """more: `NEW_CLUSTER`, to make a new cluster instead of joining the others."""
        if self.data.exists():
            (self.data / "rsync_sst_complete").unlink(missing_ok=True)
        super().start(*more)

    def split(self) -> None:
        """Cut its links to all other nodes. Its clients stay connected."""
        self.execute("SET GLOBAL wsrep_provider_options = 'gmcast.isolate=1'")

    def heal(self) -> None:
        self.execute("SET GLOBAL wsrep_provider_options = 'gmcast.isolate=0'")

    def lose_data(self) -> None:
        """Forget its place in the cluster's history, so that the next start copies a whole node. It must not run."""
        (self.data / "grastate.dat").unlink(missing_ok=True)

    def execute(self, statement: str) -> list[Any]:
        """On a connection of its own, in autocommit: a node that is cut off refuses even a ROLLBACK."""
        settings = {"unix_socket": str(self._socket), "user": "root", "autocommit": True, "read_timeout": 5}
        # Without this, PyMySQL reads all certificates for each connection, which takes 40 ms
        with pymysql.connect(**settings, ssl_disabled=True) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())

    def status(self, name: str) -> str | None:
        """One of its status variables, such as `wsrep_cluster_size`; None if it does not answer."""
        return self.statuses([name]).get(name)

    def statuses(self, names: Iterable[str]) -> dict[str, str]:
        """Those of these names; none if it does not answer."""
        asked = ", ".join(f"'{name}'" for name in names)
        try:
            found = self.execute(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({asked})")
        except pymysql.Error:
            return {}
        return {str(name).lower(): str(value) for name, value in found}

    def until(self, name: str, value: str) -> None:
        """Until a status variable has this value."""

        def has() -> bool:
            if self.has_ended_by_itself:
                raise RuntimeError(f"{self.name} ended by itself")
            return self.status(name) == value

        wait_until(has, f"{name} = {value} on {self.name}")

    def until_synced(self) -> None:
        self.until("wsrep_local_state_comment", "Synced")


class Cluster:
    def __init__(self, folder: Path, size: int = 3) -> None:
        ports = free_ports(3 * size)
        self.nodes = [
            Node(folder, number, ports[:size], ports[size + number], ports[2 * size + number]) for number in range(size)
        ]

    def start(self, database: str) -> None:
        """Start the first node, and let the others copy it."""
        first, *others = self.nodes
        install(first.data, ["--user=mysql"] if _is_root() else [], **inside(first.folder))
        first.start(NEW_CLUSTER)
        first.until_synced()
        first.execute(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
        for node in others:
            _make_folder(node.data)
            node.start()
        self.until_whole()

    def until_whole(self) -> None:
        """Until all nodes are whole at the same time: on a busy machine one that was Synced may leave the majority for a moment
        while the next one joins, and then refuses statements with 1047.
        """
        expected = {
            "wsrep_ready": "ON",
            "wsrep_cluster_status": "Primary",
            "wsrep_local_state_comment": "Synced",
            "wsrep_cluster_size": str(len(self.nodes)),
        }

        def is_whole() -> bool:
            if any(node.has_ended_by_itself for node in self.nodes):
                raise RuntimeError("a node ended by itself")
            return all(expected.items() <= node.statuses(expected).items() for node in self.nodes)

        wait_until(is_whole, "all nodes are ready and Synced")

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()  # nothing of them is kept

    def urls(self, database: str) -> list[sa.URL]:
        return [node.url.set(database=database) for node in self.nodes]


@contextmanager
def running_cluster(database: str = "shop", size: int = 3) -> Iterator[Cluster]:
    """A cluster for the length of the block, with an empty database."""
    with TemporaryDirectory(prefix="galera", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        place.chmod(0o755)  # the servers may run as another user than this process
        cluster = Cluster(place, size)
        if _is_root():
            shutil.chown(place, "mysql")
        try:
            cluster.start(database)
            yield cluster
        except Exception as error:
            for node in cluster.nodes:
                error.add_note(f"the last lines of the log of {node.name}:\n{node.log[-MAX_LOG_CHARS:]}")
            raise
        finally:
            cluster.stop()


def wait_until(condition: Callable[[], bool], what: str, max_seconds: float = MAX_SECONDS) -> None:
    until = time.monotonic() + max_seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {max_seconds:.0f} s: {what}")
        time.sleep(SLEEP)


def _make_folder(data: Path) -> None:
    data.mkdir(mode=0o700)
    if _is_root():
        shutil.chown(data, "mysql", "mysql")


def _is_root() -> bool:
    return os.geteuid() == 0


def _as_its_user() -> list[str]:
    """A server of root would receive another node's files as a user who may not write them. Linux ends the server with us."""
    ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
    if not _is_root():
        return ends_with_us if shutil.which("setpriv") else []
    pwd.getpwnam("mysql")  # Debian's package makes it
    return [*ends_with_us, "--reuid=mysql", "--regid=mysql", "--clear-groups"]


def _server() -> str:
    found = next(filter(None, map(shutil.which, SERVERS)), None)
    assert found is not None
    return found


def _provider() -> str | None:
    return next((path for path in PROVIDERS if Path(path).exists()), None)


def end_on_signals() -> None:
    """Let SIGTERM and a closed terminal do what Ctrl-C does: the nodes and their folder are removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="dev.py galera", description=__doc__).parse_args(arguments)
    if (missing := missing_part()) is not None:
        print(f"a Galera cluster needs {missing}, which is not installed here", file=sys.stderr)
        return 1
    end_on_signals()
    with suppress(KeyboardInterrupt):
        print("starting three nodes ...", flush=True)
        with running_cluster() as cluster:
            for url in cluster.urls("shop"):
                print(f"    {url.render_as_string()}")
            print("Ctrl-C stops and removes them", flush=True)
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
