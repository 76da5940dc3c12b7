"""`--databases FILE`: what is in all databases of a fleet, and decisions in the one that has an entry or is named."""

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, put_uncertain, refused, succeeded, write_databases
from support.database import TABLES, Database
from support.entries import put, put_one, states
from support.relays import relay

import outbox


@pytest.fixture
def shards(postgresql: Database, sqlite: Database, tmp_path: Path) -> tuple[str, Database, Database]:
    """A file that names two databases, `east` and `west`."""
    return str(write_databases(tmp_path, east=postgresql.url, west=sqlite.url)), postgresql, sqlite


Shards = tuple[str, Database, Database]


def test_status_shows_each_database_under_its_name(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    put(east, ob, count=3)
    put_one(west, ob, "mail.send")

    text = succeeded("status", "--databases", path)
    found = document("status", OUTBOX_DATABASES=path)["databases"]

    assert text.index("east:") < text.index("crm") < text.index("west:") < text.index("mail")
    assert [(name, [each["name"] for each in one["destinations"]]) for name, one in found.items()] == [
        ("east", ["crm"]),
        ("west", ["mail"]),
    ]


def test_an_entry_is_found_in_whichever_database_it_is(shards: Shards, ob: outbox.Outbox) -> None:
    path, _, west = shards
    id = put_one(west, ob, parent="invoice:42")

    for arguments in (
        ("status", "invoice:42"),
        ("list", "invoice:42"),
        ("list", str(id)),
        ("list", "--parent", "invoice:42"),
    ):
        found = document(*arguments, "--databases", path)["databases"]
        assert [each["id"] for each in found["west"]["entries"]] == [str(id)]
        assert found.get("east", {"entries": []})["entries"] == []

    status, text = refused("status", "invoice:43", "--databases", path)
    assert (status, text.startswith("outbox: in none of 2 databases: no entry has the parent key")) == (3, True)


def test_the_exit_code_is_that_of_the_worst_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, _, west = shards
    assert command("status", "--exit-code", "--databases", path).exit_code == 0

    put_uncertain(west, ob)

    assert command("status", "--exit-code", "--databases", path).exit_code == 5


def test_a_database_that_is_down_hides_no_other(
    shards: Shards, ob: outbox.Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatchers.cli.over_databases.DATABASE_SECONDS", 1.0)
    _, east, west = shards
    put(west, ob)

    with relay(east.url) as (carrying, hanging):
        carrying.swallow()
        down = sa.make_url("postgresql+psycopg://u:secret@127.0.0.1:1/x")
        path = str(write_databases(tmp_path, down=down, hangs=hanging, west=west.url))
        result = command("status", "--databases", path, "--json")
        text = command("status", "--databases", path).stdout

    found = json.loads(result.stdout)["databases"]
    assert result.exit_code == 1
    assert found["down"]["error"]["code"] == "database"
    assert found["hangs"]["error"] == {"code": "database", "message": "the database has not answered for 1 s"}
    assert [each["name"] for each in found["west"]["destinations"]] == ["crm"]
    assert "crm" in text
    assert "secret" not in text + result.output


def test_doctor_examines_every_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, _ = shards
    put(east, ob)

    result = command("doctor", "--databases", path, "--json", OUTBOX_ENV="other", OUTBOX_SECRET=SECRET_TEXT)

    found = json.loads(result.stdout)["databases"]
    assert result.exit_code == 7
    assert not found["east"]["is_healthy"]
    assert "environment" in [each["check"] for each in found["east"]["findings"]]
    assert "environment" not in [each["check"] for each in found["west"]["findings"]]


def test_a_database_whose_driver_is_not_installed_hides_no_other(
    shards: Shards, ob: outbox.Outbox, tmp_path: Path
) -> None:
    _, _, west = shards
    put(west, ob)
    path = str(write_databases(tmp_path, alien=sa.make_url("postgresql+psycopg2://u:secret@host/x"), west=west.url))

    result = command("status", "--databases", path, "--json")

    found = json.loads(result.stdout)["databases"]
    assert result.exit_code == 1
    assert "needs the driver 'psycopg2', which is not installed" in found["alien"]["error"]["message"]
    assert [each["name"] for each in found["west"]["destinations"]] == ["crm"]


def test_one_database_can_be_asked_although_a_variable_names_all(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, _ = shards
    put(east, ob)
    url = east.url.render_as_string(hide_password=False)

    assert "destinations" in document("status", "--database", url, OUTBOX_DATABASES=path)
    assert "databases" in document("status", database=east, OUTBOX_DATABASES=path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("status", "--databases", "{path}", "--database", "sqlite://"),
            "--database must be a name in the file, and not a URL",
        ),
        (("status",), "Missing option '--database'"),
        (
            ("status", "--databases", "{path}", "--database", "north"),
            "--database is not a name in {path}, which names east, west",
        ),
        (
            ("retry", "--databases", "{path}", "--operation", "crm", "--reason", "x"),
            "give --database NAME, one of east, west",
        ),
        (("confirm", "--databases", "{path}"), "give --database NAME, one of east, west"),
        (
            ("resume", "--databases", "{path}", "--after-restore", "--reason", "x"),
            "--after-restore is about one database",
        ),
        (("list", "--databases", "{path}", "--after", "2026-01-31T12:00:00Z,{id}"), "give --database"),
    ],
)
def test_options_that_do_not_fit_are_refused(shards: Shards, arguments: tuple[str, ...], says: str) -> None:
    given = (each.format(path=shards[0], id="32221437-59bb-8148-b3b7-24c1fc9a0a9d") for each in arguments)

    status, text = refused(*given)

    assert status == 2
    assert says.format(path=shards[0]) in " ".join(text.split())


# --- one database of the file


def test_an_id_is_decided_about_in_whichever_database_it_is(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    put(east, ob, count=2)
    id = put_one(west, ob, parent="invoice:42")

    assert document("show", str(id), "--databases", path)["parent"] == "invoice:42"
    assert document("show", "invoice:42", OUTBOX_DATABASES=path)["id"] == str(id)
    assert document("show", "invoice:42", database=east, OUTBOX_DATABASES=path)["id"] == str(id)  # the file counts more
    succeeded("cancel", str(id)[:8], "--reason", "a test", OUTBOX_DATABASES=path)

    assert states(east) == {"pending": 2}
    assert [row.action for row in west.rows(TABLES.audit)] == ["cancel"]
    assert east.rows(TABLES.audit) == []


def test_an_entry_that_is_in_no_database_that_answers_is_not_decided_about(
    shards: Shards, ob: outbox.Outbox, tmp_path: Path
) -> None:
    path, east, west = shards
    missing = "32221437-59bb-8148-b3b7-24c1fc9a0a9d"
    assert refused("retry", "--reason", "asked", missing, "--databases", path)[0] == 3
    for each in (east, west):
        put_one(each, ob, parent="invoice:42")
    status, text = refused("show", "invoice:42", "--databases", path)
    assert (status, "in several databases: give --database NAME, one of east, west" in " ".join(text.split())) == (
        2,
        True,
    )

    down = write_databases(tmp_path, east=east.url.set(query={}, host="127.0.0.1", port=1), west=west.url)
    status, text = refused("retry", "--reason", "asked", missing, "--databases", str(down))
    assert (status, "is in no database that answered; east: " in text) == (1, True)
    id = str(west.entries[0].id)
    status, text = refused("cancel", "--reason", "asked", id[:8], "--databases", str(down))
    assert (status, "is in west: give --database west, because east: " in text) == (1, True)
    succeeded("cancel", "--reason", "asked", id, "--databases", str(down))  # a whole id is in one database


def test_an_entry_that_is_in_two_databases_is_not_decided_about(shards: Shards, ob: outbox.Outbox) -> None:
    """As after a tenant's move, and in a restored copy."""
    path, east, west = shards
    id = str(put_one(east, ob, parent="invoice:42"))
    assert str(put_one(west, ob, parent="invoice:42")) == id

    why = ("--reason", "asked")
    for arguments in (
        ("show", id),
        ("retry", id, *why),
        ("cancel", id, *why),
        ("cancel", id[:8], *why),
        ("show", "invoice:42"),
    ):
        status, text = refused(*arguments, "--databases", path)
        assert status == 2
        assert "is in several databases: give --database NAME, one of east, west" in " ".join(text.split())
    succeeded("cancel", "--reason", "asked", id, "--databases", path, "--database", "west")

    assert states(east) == {"pending": 1}
    assert [row.action for row in west.rows(TABLES.audit)] == ["cancel"]


def test_a_name_of_the_file_selects_its_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    for each in (east, west):
        put(each, ob)

    selected = ("--databases", path, "--database", "west")
    assert command("cancel", "--operation", "crm", "--reason", "x", "--yes", *selected).exit_code == 0
    found = document("status", "--database", "west", OUTBOX_DATABASES=path)

    assert states(east) == {"pending": 1}
    assert len(west.rows(TABLES.audit)) == 1
    assert [each["name"] for each in found["destinations"]] == ["crm"]


def test_a_pause_and_its_end_are_recorded_in_every_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    for each in (east, west):
        put(each, ob)

    succeeded("pause", "--reason", "asked", "crm", "--databases", path)
    assert [row.paused for each in (east, west) for row in each.rows(TABLES.destination)] == [True, True]

    succeeded("resume", "--reason", "asked", "crm", "--databases", path)
    assert [row.paused for each in (east, west) for row in each.rows(TABLES.destination)] == [False, False]
    found = document("audit", "--databases", path)["databases"]
    assert [[row["action"] for row in found[name]["decisions"]] for name in ("east", "west")] == [
        ["resume", "pause"]
    ] * 2


def test_verify_checks_every_database(shards: Shards, ob: outbox.Outbox) -> None:
    path, east, west = shards
    put(east, ob)
    put_one(west, ob)
    west.execute(sa.update(TABLES.entry).values(operation="mail.send"))  # the queue has another

    result = command("verify", "--databases", path, "--json", OUTBOX_SECRET=SECRET_TEXT)

    found = json.loads(result.stdout)["databases"]
    assert (result.exit_code, found["east"]["is_clean"], found["west"]["is_clean"]) == (6, True, False)


def test_a_wrong_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "databases.conf"
    path.write_text("east\n")

    status, text = refused("status", "--databases", str(path))

    assert status == 1
    assert "databases.conf, line 1: write `name = url`" in text
