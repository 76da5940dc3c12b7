"""Servers that fail over, are restored and copied: what the tests of that share."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from dispatchers.testing.postgres import Server, temporary_postgres
from support.copied_data import copied
from support.database import TABLES, Base, Database, is_alive


class Cluster(Database):
    """The shop's database on a server of its own."""

    def __init__(self, server: Server) -> None:
        super().__init__(sa.make_url(server.url))
        self.server = server
        self.data = server.directory / "data"

    def say(self, *statements: str) -> Any:
        """Run the statements, each for itself, in one session of a database that no test uses; returns the last one's value."""
        url = self.url.set(database="template1")
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            results = [connection.exec_driver_sql(statement) for statement in statements]
            return results[-1].scalar() if results[-1].returns_rows else None

    def stop(self) -> None:
        """As an administrator does it."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """As a crash does it."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        self.dispose()
        processes = self.say("SELECT array_agg(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        os.kill(self.server.pid, how)
        for pid in (self.server.pid, *processes):
            eventually(lambda pid=pid: not is_alive(pid))

    def backup(self, to: Path) -> Path:
        """A base backup of the running server, as pg_basebackup makes one with its log."""
        engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT pg_backup_start('tests', true)")
            copied(self.data, to)
            for file in to.glob("postmaster.*"):
                file.unlink()
            label = connection.exec_driver_sql("SELECT labelfile FROM pg_backup_stop(false)").scalar_one()
        for segment in (self.data / "pg_wal").iterdir():
            if segment.is_file():
                _copy_if_there(str(segment), str(to / "pg_wal" / segment.name))
        (to / "backup_label").write_text(label)
        return to

    def replayed(self, primary: "Cluster") -> bool:
        """Whether this standby has all that `primary` has committed by now."""
        committed = primary.say("SELECT pg_current_wal_flush_lsn()::text")
        return bool(self.say(f"SELECT pg_last_wal_replay_lsn() >= '{committed}'::pg_lsn"))

    def cut_off(self) -> None:
        """Let this standby hear nothing more of its primary."""
        self.say("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        eventually(lambda: not self.say("SELECT count(*) FROM pg_stat_wal_receiver"))

    def promote(self) -> None:
        assert self.say("SELECT pg_promote()")


def _copy_if_there(source: str, target: str) -> None:
    with suppress(FileNotFoundError):  # a running server removes files: its log reports this during recovery
        shutil.copy2(source, target)


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.02)


@contextmanager
def cluster(data: Path) -> Iterator[Cluster]:
    """A server on `data`, which it takes over."""
    with temporary_postgres(durable=False, data=data) as server:
        running = Cluster(server)
        yield running
        running.dispose()


def make_template(at: Path) -> Path:
    """The data of a stopped server that has the shop's tables."""
    with temporary_postgres(durable=False) as server:
        made = Cluster(server)
        TABLES.metadata.create_all(made.engine)
        Base.metadata.create_all(made.engine)
        made.stop()
        copied(made.data, at)
    return at


def recovering(backup: Path) -> Path:
    """Let the server on this backup recover it and begin a new timeline."""
    (backup / "recovery.signal").touch()
    _configure(backup, "restore_command = 'false'")
    return backup


def following(backup: Path, primary: Cluster) -> Path:
    """Let the server on this backup follow `primary`, asynchronously."""
    (backup / "standby.signal").touch()
    _configure(
        backup, f"primary_conninfo = 'host={primary.server.directory} port={primary.url.query['port']} user=postgres'"
    )
    return backup


def _configure(data: Path, line: str) -> None:
    with (data / "postgresql.auto.conf").open("a") as file:
        file.write(f"{line}\n")


class Address:
    """Where the database is now: an engine that works after the server has moved."""

    def __init__(self, database: Database) -> None:
        self.now = database
        self.engine = sa.create_engine("postgresql+psycopg://", creator=self._connect)

    def _connect(self) -> Any:
        query = self.now.url.query
        return psycopg.connect(
            host=str(query["host"]), port=str(query["port"]), user="postgres", dbname=self.now.url.database
        )
