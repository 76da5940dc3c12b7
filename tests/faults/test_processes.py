"""Dispatchers as processes on a faulty ground: they are stopped, and their database swallows everything, or crashes.

Of every one: nothing is lost, and nothing happens twice. The whole list, with what shows each row: docs/verification.md.
"""

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.apps.oom_sender import MAX_ATTEMPTS
from support.daemons import Daemon, FileService, GatedService, daemon, wait_for, write_factory
from support.database import IMPORT_PATH, TABLES, Database
from support.entries import HOUR, age, put, put_one, queue_row, run_once, settlement_row, state, states
from support.python_processes import run_python
from support.relays import relay
from support.verify import broken_rules

import outbox
from dispatchers import FOREVER
from dispatchers.adapters import MemoryAdapter
from dispatchers.process.daemon import REPEAT_SECONDS
from dispatchers.testing.postgres import temporary_postgres
from dispatchers.time_limits import Window
from outbox.sessions.session import flush_all

# --- processes that stop for a while

GATED = """
from support.daemons import GatedService

def make():
    service = GatedService(here)
    service.window = FOREVER if os.environ["WINDOW"] == "forever" else None
    return Dispatcher(
        url, outbox=ob, adapters={"crm": service}, grace=timedelta(seconds=1), poll=timedelta(hours=1)
    )
"""


@pytest.mark.parametrize(
    ("window", "meanwhile", "sent"), [(FOREVER, "delivered", 2), (None, "uncertain", 1)], ids=["keys", "no keys"]
)
def test_a_process_stopped_in_a_send_beyond_its_lease_does_no_harm_later(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, window: Window, meanwhile: str, sent: int
) -> None:
    id = put_one(postgresql, ob, parent="invoice:42")
    key = ob.child_key("invoice:42", "crm.upsert")
    write_factory(tmp_path, GATED)
    service = FileService(tmp_path)
    service.window = window

    with daemon(tmp_path, postgresql.url, WINDOW="none" if window is None else "forever") as stopped:
        wait_for(lambda: GatedService(tmp_path).waiting, "the send", workers=[stopped])
        stop_between_transactions(postgresql, stopped)
        age(postgresql, HOUR)
        assert run_once(postgresql, ob, adapters={"crm": service}) == 1
        assert state(postgresql, id) == meanwhile
        settled = settlement_row(postgresql, id)
        GatedService(tmp_path).open()
        stopped.process.send_signal(signal.SIGCONT)
        if window is None:  # its success is proof, however late
            wait_for(lambda: state(postgresql, id) == "delivered", "the late proof", workers=[stopped])
        else:
            wait_for(
                lambda: "their leases were lost" in stopped.output,
                "a word",
                workers=[stopped],
            )
            assert settlement_row(postgresql, id) == settled
        stopped.terminate()
        assert stopped.wait() == 0, stopped.output

    assert state(postgresql, id) == "delivered"
    assert service.effects == [key]
    assert service.sent == [key] * sent


def stop_between_transactions(database: Database, worker: Daemon) -> None:
    """Nothing but the send is under way then: no other process gets a lock that a stopped one has."""
    while True:
        wait_for(lambda: not transactions(database), "nothing but the send to be under way", workers=[worker])
        worker.process.send_signal(signal.SIGSTOP)
        if not transactions(database):
            return
        worker.process.send_signal(signal.SIGCONT)


def transactions(database: Database) -> int:
    """How many of the others are at work."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with database.engine.connect() as connection:
        found: int = connection.execute(sa.text(f"{others} AND state <> 'idle'")).scalar_one()
        return found


# --- a payload that kills its process


def supervised(database: Database, directory: Path, keys: str) -> list[int]:
    """How each of the dispatchers ended that were started, one after another, until nothing waited any more."""
    script = Path(__file__).parents[1] / "support" / "apps" / "oom_sender.py"
    url = database.url.render_as_string(hide_password=False)
    environment = os.environ | {"PYTHONPATH": IMPORT_PATH}
    ended = run_python(script, url, directory, keys, env=environment, check=True, timeout=300).stdout
    return [int(line) for line in ended.split()]


def put_poison_first(database: Database, ob: outbox.Outbox) -> tuple[UUID, str]:
    """Ten entries, which are claimed together; returns the first, which kills, and its key."""
    with database.begin() as session:
        poison, *_ = [
            ob.enqueue(session, "crm.upsert", "poison" if not number else "", parent=f"order:{number}")
            for number in range(10)
        ]
    return poison.id, poison.child_key


@pytest.mark.parametrize(
    ("keys", "sends", "ends"),
    [("keys", MAX_ATTEMPTS, {"delivered": 9, "uncertain": 1}), ("no keys", 1, {"uncertain": 10})],
    ids=["keys", "no keys"],
)
def test_a_payload_that_kills_its_sender_ends_uncertain(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, keys: str, sends: int, ends: dict[str, int]
) -> None:
    """Where no keys are kept, none of those that were claimed with it can be distinguished from what had been sent."""
    id, key = put_poison_first(postgresql, ob)

    ended = supervised(postgresql, tmp_path, keys)

    sent = Counter(FileService(tmp_path).sent)
    assert ended == [-signal.SIGKILL] * sends + [0]
    assert states(postgresql) == ends
    assert (state(postgresql, id), queue_row(postgresql, id).attempts, sent[key]) == ("uncertain", sends, sends)
    assert len(sent) == 1 + ends.get("delivered", 0)
    assert broken_rules(postgresql) == {}


# --- a database that swallows everything


@pytest.mark.parametrize(
    ("signals", "logged"), [(1, "grace period over and the database does not answer"), (2, "second SIGTERM")]
)
def test_a_daemon_whose_database_is_silent_ends_and_loses_nothing(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path, signals: int, logged: str
) -> None:
    put(postgresql, ob, count=3)
    write_factory(tmp_path, GATED)

    with relay(postgresql.url) as (between, url), daemon(tmp_path, url, WINDOW="forever") as process:
        wait_for(lambda: GatedService(tmp_path).waiting == 3, "the sends", workers=[process])
        between.swallow()
        GatedService(tmp_path).open()
        for number in range(signals):
            process.terminate()
            wait_for(lambda number=number: process.output.count("SIGTERM") > number, "the signal to be heard")
            time.sleep(REPEAT_SECONDS)
        assert process.wait(60) == 1, process.output

    assert logged in process.output
    assert states(postgresql) == {"sending": 3}
    age(postgresql, HOUR)
    assert run_once(postgresql, ob, adapters={"crm": FileService(tmp_path)}) == 3
    assert states(postgresql) == {"delivered": 3}
    assert len(FileService(tmp_path).effects) == 3


# --- a database that is restarted again and again

QUICK = """
from support.daemons import FileService

def make():
    service = FileService(here)
    service.timeout = timedelta(seconds=1)
    return Dispatcher(
        url,
        outbox=ob,
        adapters={"crm": service},
        lease=timedelta(seconds=5),
        margin=timedelta(seconds=0.2),
        poll=timedelta(seconds=0.05),
        concurrency=4,
    )
"""


def test_a_database_that_crashes_repeatedly_loses_nothing_that_was_sent(ob: outbox.Outbox, tmp_path: Path) -> None:
    write_factory(tmp_path, QUICK)
    with temporary_postgres(durable=False) as server:
        database = Database(sa.make_url(server.url))
        TABLES.metadata.create_all(database.engine)

        with daemon(tmp_path, database.url) as process:
            for crash in range(3):
                put_despite(database, ob, f"batch:{crash}", count=30)
                wait_for(lambda crash=crash: delivered(database) > 30 * crash, "progress", 120, [process])
                kill_server_process(database)
            wait_for(lambda: delivered(database) == 90, "the end", 120, [process])
            process.terminate()
            assert process.wait() == 0, process.output

        attempts = {row.id: row.attempts for row in database.rows(TABLES.settlement)}
        database.dispose()

    service = FileService(tmp_path)
    sent = Counter(service.sent)
    assert len(service.effects) == len(sent) == 90
    assert sum(sent.values()) <= sum(attempts.values())


def put_despite(database: Database, ob: outbox.Outbox, batch: str, *, count: int) -> None:
    """Enqueue as an app does: again, until the commit has been acknowledged."""

    def enqueue() -> bool:
        with suppress(sa.exc.OperationalError), database.begin() as session:
            for number in range(count):
                ob.enqueue(session, "crm.upsert", {}, parent=batch, discriminator=str(number), if_exists="ignore")
            flush_all(session)
            return True
        return False

    wait_for(enqueue, "the database to take entries", 60)


def delivered(database: Database) -> int:
    with suppress(sa.exc.OperationalError):
        return states(database)["delivered"]
    return 0


def kill_server_process(database: Database) -> None:
    """The server takes that for a crash: it ends every connection, and recovers from its log."""
    checkpointer = sa.text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")

    def find() -> int | None:
        with (
            suppress(sa.exc.OperationalError),
            database.engine.connect() as connection,
        ):  # of before the last crash, perhaps
            return connection.scalar(checkpointer)
        return None

    os.kill(wait_for(find, "a checkpointer"), signal.SIGKILL)


# --- stopped between its settling and the commit

STOPPED = """
from sqlalchemy import create_engine, event
import signal
import time

def make():
    engine = create_engine(url)

    @event.listens_for(engine, "after_cursor_execute")
    def stop(connection, cursor, statement, *rest):
        if "INSERT INTO outbox_settlement" in statement:
            (here / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # the signal may reach another thread first, and this one would commit

    limits = {"lease": timedelta(seconds=4), "margin": timedelta(seconds=0.5)}
    return Dispatcher(engine, outbox=ob, adapters={"crm": MemoryAdapter(timeout=timedelta(seconds=1))}, **limits)
"""


def test_a_process_stopped_before_its_commit_keeps_no_other_waiting(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    id = put_one(
        postgresql, ob, ordering_key="a"
    )  # else its settlement is one statement, without a transaction to keep open
    write_factory(tmp_path, STOPPED)
    service = MemoryAdapter()

    def is_settled_by_another() -> bool:
        run_once(postgresql, ob, adapters={"crm": service})
        return not postgresql.queue  # it may be settled by a later run than the one that sent it

    with daemon(tmp_path, postgresql.url) as stopped:
        wait_for(lambda: (tmp_path / "stopped").exists(), "the settling", 60, workers=[stopped])
        wait_for(is_settled_by_another, "the server to end the stopped one's transaction", 120, workers=[stopped])

    assert state(postgresql, id) == "delivered"
    assert [delivery.id for delivery in service.deliveries] == [id]
