"""The file that names a fleet's databases: what is refused in it, and that a hangup makes the fleet read it again."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemons import daemon, wait_for, write_factory
from support.database import TABLES, Database
from support.entries import put, states
from support.fleet import delivered, urls, write

import outbox
from dispatchers.process.databases_file import read_databases
from outbox.errors import ConfigurationError


@pytest.fixture
def databases(copies: Any) -> Iterator[list[Database]]:
    taken = [copies.take() for _ in range(3)]
    yield taken
    for each in taken:
        copies.give_back(each)


FLEET = """
from support.daemons import FileService

def make():
    return Fleet(adapters={"crm": FileService(here)}, outbox=ob, poll=timedelta(seconds=0.05))
"""


def test_a_hangup_makes_it_read_the_file_again(databases: list[Database], ob: outbox.Outbox, tmp_path: Path) -> None:
    write_factory(tmp_path, FLEET)
    path, named = tmp_path / "databases.conf", urls(databases)
    write(path, {name: named[name] for name in ("shard0", "shard1")})
    for each in databases:
        put(each, ob)

    with daemon(tmp_path, databases[0].url, "factory:make", "--databases", str(path)) as process:
        wait_for(delivered(databases[:2], 1), "the first two", workers=[process])
        write(path, {name: named[name] for name in ("shard1", "shard2")})
        process.process.send_signal(signal.SIGHUP)
        wait_for(delivered(databases[2:], 1), "the third", workers=[process])
        wait_for(lambda: not databases[0].rows(TABLES.dispatcher), "the end of the first", workers=[process])
        put(databases[0], ob)

        path.write_text("shard1 = postgresql://user:secret@/x\nshard1 = sqlite://\n")
        process.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "databases.conf, line 2: the name 'shard1' occurs twice" in process.output, "the error")
        put(databases[1], ob)
        wait_for(delivered(databases[1:2], 2), "the last one", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    assert states(databases[0]) == {"delivered": 1, "pending": 1}
    assert "outbox.daemon [shard2]: started: " in process.output
    assert "secret" not in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shard", "write `name = url`"),
        ("shard =", "write `name = url`"),
        ("shard = postgresql+psycopg://u:secret@host/x # ours", "a comment needs a line of its own"),
        ("a b = sqlite:///x.db", "'a b' is not a name"),
        ("shard = mysql://secret@host/x", "the outbox runs on"),
        ("shard = secret", "needs a SQLAlchemy URL"),
        ("shard = postgresql+asyncpg://u:secret@host/x", "is asynchronous"),
        ("first = sqlite:///other.db", "the name 'first' occurs twice"),
        ("shard = sqlite:///one.db", "'shard' is the same database as 'first'"),
    ],
)
def test_a_wrong_line_is_named_without_its_url(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "databases.conf"
    path.write_text(f"# comment\nfirst = sqlite:///one.db\n\n{line}\n")

    with pytest.raises(ConfigurationError, match=re.escape(f"{path}, line 4: ") + f".*{re.escape(says)}") as raised:
        read_databases(path)

    assert "secret" not in str(raised.value)


def test_a_url_may_contain_the_signs_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "databases.conf"
    path.write_text("tenant-a.eu=postgresql+psycopg://u:p%23=1@h/db?application_name=x#y")

    (url,) = read_databases(path).values()

    assert url.password == "p#=1"


@pytest.mark.parametrize(
    "url",
    [
        "mariadb+pymysql://u@/x?unix_socket=/run/",
        "postgresql+psycopg://?service=shard",
        "postgresql+psycopg://u@host/x?options=-csearch_path%3Dtenant",
    ],
)
def test_databases_of_two_sockets_services_or_schemas_are_two(tmp_path: Path, url: str) -> None:
    path = tmp_path / "databases.conf"
    path.write_text("".join(f"shard{number} = {url}{number}\n" for number in range(2)), encoding="utf-8-sig")

    assert len(read_databases(path)) == 2


def test_a_file_that_names_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "databases.conf"

    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_databases(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigurationError, match="names no database"):
        read_databases(path)
