"""What a fork does to the connections of an app: it gets its own, or an error in words."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from support.daemons import wait_for
from support.database import IMPORT_PATH, Database
from support.python_processes import run_python

import outbox
from outbox import migrations

HEAD = """
import os, sys
import outbox, sqlalchemy as sa
from sqlalchemy.orm import Session
from dispatchers import Dispatcher
from dispatchers.adapters import MemoryAdapter
from outbox.sql.connections import forks
import asyncio

url = os.environ["SHOP_URL"]
ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")
PID = sa.text("SELECT pg_backend_pid()")

def in_fork(work):
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            work()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)

def backend(engine):
    with engine.connect() as connection:
        return connection.execute(PID).scalar_one()
"""


def lines_of(database: Database, program: str) -> list[str]:
    shown = database.url.render_as_string(hide_password=False)
    done = run_python("-c", HEAD + program, env={"SHOP_URL": shown, "PYTHONPATH": IMPORT_PATH}, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("look", ["check", "migrations.check"])
def test_the_check_at_the_start_leaves_no_connection(database: Database, ob: outbox.Outbox, look: str) -> None:
    engine = database.new_engine(poolclass=sa.QueuePool)
    opened, closed = [], []
    sa.event.listen(engine, "connect", lambda connection, record: opened.append(connection))
    sa.event.listen(engine, "close_detached", closed.append)

    if look == "check":
        ob.check(engine)
    else:
        migrations.check(engine)

    assert closed == opened != []
    assert_works(engine)


def test_the_awaited_check_leaves_no_connection(postgresql: Database, ob: outbox.Outbox) -> None:
    asked = sa.text("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")

    async def check(observer: sa.Connection) -> None:
        engine = create_async_engine(postgresql.async_url)
        before = set(observer.scalars(asked))
        await ob.check(engine)
        await asyncio.to_thread(
            wait_for, lambda: not set(observer.scalars(asked)) - before, "the server's notice of the closed connection"
        )
        await engine.dispose()

    with postgresql.last_connection() as observer:
        asyncio.run(check(observer))


def test_a_database_in_memory_outlives_the_check(ob: outbox.Outbox) -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox.prepare_sqlite(engine)
    migrations.upgrade(engine)

    ob.check(engine)

    ob.check(engine)
    engine.dispose()


@pytest.mark.parametrize("hooks", [True, False], ids=["a fork", "a fork that Python does not know of"])
@pytest.mark.parametrize("first", ["ob.check(engine)", "backend(engine); ob.check(engine)"])
def test_a_fork_has_connections_of_its_own(postgresql: Database, first: str, hooks: bool) -> None:
    """uWSGI forks without calling the functions of `os.register_at_fork`."""
    without = "" if hooks else "forks._engines.clear()"
    lines = lines_of(
        postgresql,
        f"""
engine = sa.create_engine(url)
{first}
{without}
before = backend(engine)
for _ in range(2):
    in_fork(lambda: print(backend(engine)))
assert backend(engine) == before
print(before)
engine.dispose()
""",
    )

    assert len(set(lines)) == 3


def test_a_session_that_was_open_over_a_fork_is_refused(postgresql: Database) -> None:
    before, line, after, count = lines_of(
        postgresql,
        """
engine = sa.create_engine(url)
ob.check(engine)
session = Session(engine)
TRANSACTION = sa.text("SELECT pg_current_xact_id()::text")
print(session.execute(TRANSACTION).scalar_one())

def enqueue():
    with session:
        ob.enqueue(session, "mail.send", {}, parent="order:1")
        session.commit()

in_fork(enqueue)
print(session.execute(TRANSACTION).scalar_one())
enqueue()
print(session.execute(sa.text("SELECT count(*) FROM outbox_entry")).scalar_one())
""",
    )

    assert "ConfigurationError: process " in line
    assert "which was forked from it, must not use it" in line
    assert (before, count) == (after, "1")


@pytest.mark.parametrize(
    "end", ["session.close()", "session.execute(TRANSACTION)", "engine.dispose(); del globals()['session']"]
)
@pytest.mark.parametrize("seen", ["ob.check(engine)", "ob.status(session, 'order:1')"])
def test_the_end_of_a_fork_undoes_nothing_in_its_parent(postgresql: Database, seen: str, end: str) -> None:
    """SQLAlchemy rolls a session back that is closed or collected, on the connection that both processes have."""
    lines = lines_of(
        postgresql,
        f"""
engine = sa.create_engine(url)
session = Session(engine)
{seen}
TRANSACTION = sa.text("SELECT pg_current_xact_id()::text")
session.execute(sa.text("INSERT INTO shop_order (customer, amount) VALUES ('ada', 1)"))
before = session.execute(TRANSACTION).scalar_one()

def end():
    {end}

in_fork(end)
assert session.execute(TRANSACTION).scalar_one() == before
session.commit()
print(session.execute(sa.text("SELECT count(*) FROM shop_order")).scalar_one())
""",
    )

    assert lines[-1] == "1"
    assert ("which was forked from it, must not use it" in lines[0]) == ("execute" in end)


def test_a_fork_has_its_own_copy_of_a_database_in_memory(ob: outbox.Outbox) -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox.prepare_sqlite(engine)
    migrations.upgrade(engine)

    if not (child := os.fork()):
        try:
            ob.check(engine)
        except BaseException:
            os._exit(1)
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    engine.dispose()


def test_a_fork_renews_the_pool_of_an_engine_that_was_seen_with_options(tmp_path: Path, ob: outbox.Outbox) -> None:
    """Apps make such options for each request, and they are gone at the fork."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox.prepare_sqlite(engine)
    migrations.upgrade(engine.execution_options(tenant=1))
    gc.collect()
    pool = engine.pool

    if not (child := os.fork()):
        os._exit(engine.pool is pool)

    assert os.waitpid(child, 0)[1] == 0


def test_a_dispatcher_that_has_worked_is_refused_in_a_fork(postgresql: Database) -> None:
    lines = lines_of(
        postgresql,
        """
fresh, used = (Dispatcher(url, outbox=ob, adapters={"mail": MemoryAdapter()}) for _ in range(2))

async def run_once(dispatcher):
    print(await dispatcher.run_once())

asyncio.run(run_once(used))
in_fork(lambda: asyncio.run(run_once(used)))
in_fork(lambda: asyncio.run(run_once(fresh)))
""",
    )

    assert (lines[0], lines[2]) == ("0", "0")
    assert "ConfigurationError: this dispatcher has worked in process " in lines[1]


def assert_works(engine: Any) -> None:
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
