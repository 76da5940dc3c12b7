"""`--databases FILE`: the setup and the maintenance of all databases of a fleet with one command."""

import json
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.cli_runner import command, document, refused, succeeded, write_databases
from support.database import TABLES, Database
from support.entries import put, run_once
from support.relays import relay
from support.retention import A_MOMENT, RETENTION, elapse, settle_all

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox import migrations


@pytest.fixture
def shards(postgresql: Database, sqlite: Database, tmp_path: Path) -> tuple[str, Database, Database]:
    """A file that names two databases, `east` and `west`."""
    return str(write_databases(tmp_path, east=postgresql.url, west=sqlite.url)), postgresql, sqlite


Shards = tuple[str, Database, Database]


def test_upgrade_says_a_line_for_each_database(tmp_path: Path) -> None:
    east, new = (sa.make_url(f"sqlite:///{tmp_path / name}.db") for name in ("east", "new"))
    migrations.upgrade(east)
    down = sa.make_url("postgresql+psycopg://u:secret@127.0.0.1:1/x")
    path, head = str(write_databases(tmp_path, east=east, down=down, new=new)), migrations.head()

    result = command("db", "upgrade", "--databases", path)

    first, second, third = result.stdout.splitlines()
    assert result.exit_code == 1
    assert (first, third) == (f"east: already at {head}", f"new: upgraded from nothing to {head}")
    assert second.startswith("down: database error: ")
    assert "secret" not in result.output
    checked = document("db", "check", "--databases", str(write_databases(tmp_path, east=east, new=new)))
    assert checked["databases"] == {name: {"revision": head, "needed": head} for name in ("east", "new")}


def test_a_database_that_hangs_does_not_keep_a_long_command(
    postgresql: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.cli.over_databases.DATABASE_SECONDS", 1.0)
    new = sa.make_url(f"sqlite:///{tmp_path / 'new.db'}")

    with relay(postgresql.url) as (carrying, hanging):
        carrying.swallow()
        result = command("db", "upgrade", "--databases", str(write_databases(tmp_path, hangs=hanging, new=new)))

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "hangs: the database has not answered for 1 s",
        f"new: upgraded from nothing to {migrations.head()}",
    ]


def test_maintenance_deletes_in_every_database(shards: Shards, ob: outbox.Outbox, tmp_path: Path) -> None:
    path, east, west = shards
    for each, count in ((east, 2), (west, 3)):
        put(each, ob, count=count)
        settle_all(each)
        elapse(each, RETENTION + A_MOMENT)
    down = sa.make_url("postgresql+psycopg://u:secret@127.0.0.1:1/x")

    counted = command("maintenance", "--window", "24h", "--databases", path, "--json", "--dry-run")
    with_one_down = str(write_databases(tmp_path, east=east.url, down=down, west=west.url))
    result = command("maintenance", "--window", "24h", "--databases", with_one_down)

    found = json.loads(counted.stdout)["databases"]
    assert (counted.exit_code, result.exit_code) == (0, 1)
    assert [found[name]["deleted"]["entries"] for name in ("east", "west")] == [2, 3]
    first, second, third = result.stdout.splitlines()
    assert first == "east: deleted 0 records, 2 entries, 0 tombstones"
    assert second.startswith("down: database error: ")
    assert third == "west: deleted 0 records, 3 entries, 0 tombstones"
    assert {"east: entries: checked 2 of 2", "west: entries: checked 3 of 3"} <= set(result.stderr.splitlines())
    assert east.entries == west.entries == []


def test_a_fleets_callbacks_are_recorded_and_forgotten_everywhere(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, east, west = shards
    (tmp_path / "next_deploy_of_a_fleet.py").write_text(FLEET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    recorded = succeeded("callbacks", "record", "next_deploy_of_a_fleet:make_fleet", "--databases", path)
    listed = document("callbacks", "list", "--databases", path)["databases"]
    west.execute(sa.delete(TABLES.callback))
    forgotten = succeeded("callbacks", "forget", "on_settled crm", "--databases", path)

    assert recorded == "made\neast: 1 recorded: on_settled crm\nwest: 1 recorded: on_settled crm\n"
    assert [[each["name"] for each in listed[name]["callbacks"]] for name in ("east", "west")] == [
        ["on_settled crm"]
    ] * 2
    assert forgotten.startswith("east: on_settled crm forgotten; ")
    assert (east.rows(TABLES.callback), len(forgotten.splitlines())) == ([], 1)


FLEET = """
from dispatchers import Fleet, Operations
from dispatchers.adapters import MemoryAdapter

effects = Operations()
effects.on_settled("crm")(lambda session, settlement: None)


def make_fleet():
    print("made")
    return Fleet(include=[effects], adapters={"crm": MemoryAdapter()})
"""


def test_a_check_value_is_forgotten_in_one_named_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    for each in (east, west):
        run_once(each, ob, adapters={"crm": MemoryAdapter()})
    assert [row.kid for row in east.rows(TABLES.kid)] == ["k1"]

    status, text = refused("keys", "forget", "k1", "--databases", path)
    succeeded("keys", "forget", "k1", "--databases", path, "--database", "west")

    assert (status, "give --database NAME, one of east, west" in " ".join(text.split())) == (2, True)
    assert (len(east.rows(TABLES.kid)), west.rows(TABLES.kid)) == (1, [])
