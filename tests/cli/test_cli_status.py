"""`outbox status`: what it shows, in JSON and on a terminal."""

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from support.cli_runner import (
    block,
    command,
    document,
    error_of,
    ids,
    put_ended,
    put_suspended,
    put_uncertain,
    refused,
    set_row,
    succeeded,
)
from support.database import TABLES, Database
from support.entries import HOUR, LEASE, age, change, put, put_one, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read import overview
from outbox.sql.clock import clock, clock_plus

OUTBOX_ENV = "test"


def test_status_counts_what_waits_for_each_destination(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    put_uncertain(database, ob)
    put_suspended(database, ob)
    put_ended(database, ob)

    printed = document("status", database=database)

    crm, mail = printed["destinations"]
    assert (crm["name"], crm["states"], crm["suspended"]) == ("crm", {"pending": 3}, 0)
    assert (mail["name"], mail["states"], mail["suspended"]) == ("mail", {"pending": 1, "uncertain": 1}, 1)
    assert (printed["uncertain"], printed["suspended"], printed["suspended_reason"], printed["blocked_groups"]) == (
        1,
        1,
        None,
        [],
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", printed["at"])


def test_status_shows_how_long_the_oldest_waits_that_could_be_sent(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    age(database, 2 * HOUR)
    put(database, ob, "later.send", due=HOUR)
    put_uncertain(database, ob)

    crm, later, mail = document("status", database=database)["destinations"]

    assert 7200 <= crm["oldest_due_seconds"] < 7300
    assert later["oldest_due_seconds"] is None
    assert mail["oldest_due_seconds"] is None


@pytest.mark.parametrize(("expired", "waits"), [(True, True), (False, False)])
def test_what_is_sent_waits_again_once_its_lease_has_run_out(
    database: Database, ob: outbox.Outbox, expired: bool, waits: bool
) -> None:
    until = clock_plus(-LEASE if expired else LEASE)
    lease = {"state": "sending", "lease_token": UUID(int=1), "leased_at": clock(), "lease_until": until}
    change(database, put_one(database, ob), **lease)

    (crm,) = document("status", database=database)["destinations"]

    assert (crm["oldest_due_seconds"] is not None) is waits


def test_status_names_the_operations_that_no_dispatcher_serves(database: Database, ob: outbox.Outbox) -> None:
    """All that wait, not only those by which a dispatcher has learned that it does not serve them."""
    put(database, ob, "crm.gone", count=130)
    put_one(database, ob, "sms.send", parent="order:sms", destination="crm")
    run_once(database, ob, adapters={"crm.upsert": MemoryAdapter()})
    assert document("status", database=database)["unserved"] == []  # another dispatcher may take them yet
    age(database, HOUR)
    put(database, ob, "crm.upsert", count=3)
    put_one(database, ob, "crm.gone", parent="order:later", due=HOUR)

    gone, sms = document("status", database=database)["unserved"]
    shown = " ".join(succeeded("status", database=database).split())

    assert (gone["operation"], gone["destination"], gone["entries"], gone["has_more"]) == (
        "crm.gone",
        "crm",
        130,
        False,
    )
    assert (sms["operation"], sms["entries"]) == ("sms.send", 1)
    assert "130 of crm.gone not served by any dispatcher: no adapter of this dispatcher serves it" in shown
    assert "1 of sms.send not served by any dispatcher: no adapter of this dispatcher serves it" in shown


def test_status_counts_unserved_entries_only_so_far(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, ob, "crm.gone", count=30)
    run_once(database, ob, adapters={"crm.upsert": MemoryAdapter()})
    age(database, HOUR)
    monkeypatch.setattr(overview, "MAX_UNSERVED", 20)
    monkeypatch.setattr(overview, "MAX_MARKED_READ", 10)

    (gone,) = document("status", database=database)["unserved"]

    assert (gone["entries"], gone["has_more"]) == (20, True)


def test_status_names_entries_whose_lease_is_long_over(database: Database, ob: outbox.Outbox) -> None:
    long_over, just_over, lasting = put(database, ob, count=3)
    for id, hours in ((long_over, HOUR), (just_over, timedelta(seconds=5)), (lasting, -HOUR)):
        until = clock_plus(-hours)
        change(database, id, state="sending", lease_token=id, leased_at=clock_plus(-2 * HOUR), lease_until=until)

    (overdue,) = document("status", database=database)["overdue"]
    shown = succeeded("status", database=database)

    assert (overdue["id"], overdue["destination"]) == (str(long_over), "crm")
    assert 3600 <= overdue["over_seconds"] < 3700
    assert re.search(f"1 with a lease that expired up to .* ago: {long_over};", " ".join(shown.split()))


def test_status_for_people_is_a_table_with_what_needs_them_below(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    id = put_uncertain(database, ob)
    put_suspended(database, ob)
    block(database, id, "invoice:7")
    age(database, 2 * HOUR)

    printed = succeeded("status", database=database).splitlines()

    assert printed[0].split() == [
        "DESTINATION",
        "PENDING",
        "SENDING",
        "RETRY",
        "UNCERTAIN",
        "SUSPENDED",
        "OLDEST",
        "DUE",
        "NOTE",
    ]
    assert printed[1].split() == ["crm", "3", "0", "0", "0", "0", "2h"]
    assert printed[2].split() == ["mail", "1", "0", "0", "1", "1", "-"]
    assert printed[3:] == [
        "1 uncertain: `outbox list --state uncertain` shows them",
        "1 suspended: `outbox list --suspended` shows them",
        f"ordering group invoice:7 blocked 1h ago by {id}: it failed",
        "entries have been due for 2h and no running dispatcher reports itself (`run_once()` and older releases do not)",
    ]


def test_status_shows_a_destination_that_is_throttled_and_why(database: Database) -> None:
    control = {"rate_per_second": None, "breaker_failures": 0, "breaker_until": None, "changed_at": clock()}
    paused = {"paused": True, "paused_reason": "their maintenance", "breaker": "closed", "cooldown_until": None}
    cooling = {"paused": False, "paused_reason": None, "breaker": "half_open", "cooldown_until": clock_plus(HOUR)}
    set_row(database, TABLES.destination, name="crm", **control, **paused)
    set_row(database, TABLES.destination, name="mail", **control, **cooling)
    set_row(database, TABLES.meta, id=1, suspended_reason="this is a copy of the database")

    printed = succeeded("status", database=database)

    assert "sending is suspended: this is a copy of the database\n" in printed
    assert "paused: their maintenance\n" in printed
    assert re.search(r"breaker half-open, cooldown for another (59m|1h)\n", printed)


def test_an_empty_outbox_says_so(database: Database) -> None:
    assert succeeded("status", database=database) == "the queue is empty\n"
    assert document("status", database=database)["destinations"] == []


def test_for_monitoring_the_exit_code_shows_whether_anything_is_uncertain(
    database: Database, ob: outbox.Outbox
) -> None:
    put(database, ob)
    assert command("status", "--exit-code", database=database).exit_code == 0

    put_uncertain(database, ob, parent="order:u")

    assert command("status", "--exit-code", database=database).exit_code == 5
    assert command("status", "--exit-code", "--json", database=database).exit_code == 5
    assert command("status", database=database).exit_code == 0
    assert command("status", "order:u", "--exit-code", database=database, OUTBOX_ENV=OUTBOX_ENV).exit_code == 5
    assert command("status", "order:0", "--exit-code", database=database, OUTBOX_ENV=OUTBOX_ENV).exit_code == 0


# --- status of a parent


def test_the_status_of_a_parent_is_what_the_app_gets(database: Database, ob: outbox.Outbox) -> None:
    parent = outbox.ParentKey("req-1", scope="acct_1", source="http")
    put_ended(database, ob, parent=parent)
    put_uncertain(database, ob, parent=parent)
    put(database, ob, parent="req-1")
    with database.session() as session:
        expected = ob.status(session, parent)

    arguments = ("status", "req-1", "--scope", "acct_1", "--source", "http")
    printed = document(*arguments, database=database, OUTBOX_ENV=OUTBOX_ENV)["entries"]

    names = ("operation", "discriminator", "child_key", "state", "reason", "attempts")
    assert [[entry[name] for name in names] for entry in printed] == [
        [getattr(status, name) for name in names] for status in expected
    ]
    assert [entry["state"] for entry in printed] == ["delivered", "uncertain"]
    assert [datetime.fromisoformat(entry["created_at"]) for entry in printed] == [one.created_at for one in expected]


def test_the_status_of_a_parent_for_people_names_effects_and_reasons(database: Database, ob: outbox.Outbox) -> None:
    put_uncertain(database, ob, parent="order:1", discriminator="line-2")

    printed = succeeded("status", "order:1", "--env", "test", database=database).splitlines()

    assert printed[0].split() == ["ID", "STATE", "OPERATION", "ATTEMPTS", "CREATED", "REASON"]
    assert re.search(r" uncertain +mail.send \(line-2\) +1 +\d{4}-.*Z +no answer within 30 s$", printed[1])


def test_a_parent_without_entries_is_not_found(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, parent=outbox.ParentKey("req-1", scope="acct_1", source="http"))

    given = ("--scope", "acct_2")

    assert error_of("status", "req-2", database=database) == (
        3,
        "not_found",
        "no entry has the parent key 'req-2'",
    )
    assert error_of("status", "req-1", *given, database=database, OUTBOX_ENV=OUTBOX_ENV) == (
        3,
        "not_found",
        "no entry has the parent key 'req-1' of env 'test', scope 'acct_2'",
    )


def test_the_key_that_a_customer_quotes_is_found_for_any_sender(database: Database, ob: outbox.Outbox) -> None:
    first, second = (
        put(database, ob, parent=outbox.ParentKey("l-1", scope=scope, source="http"))[0] for scope in ("ada", "bob")
    )
    third = put(database, ob, parent="l-1")[0]

    def found(*options: str) -> tuple[set[UUID], set[UUID]]:
        listed = document("list", "--parent", "l-1", *options, database=database)
        return set(ids(document("status", "l-1", *options, database=database))), set(ids(listed))

    for options, expected in [
        ((), {first, second, third}),
        (("--env", "test"), {first, second, third}),
        (("--source", "http"), {first, second}),
        (("--source", "http", "--scope", "ada"), {first}),
        (("--source", "app", "--scope", "", "--env", "test"), {third}),
    ]:
        assert found(*options) == (expected, expected), options
    header, *rows = succeeded("status", "l-1", database=database).splitlines()
    assert header.split()[:4] == ["ID", "STATE", "SOURCE", "SCOPE"]
    assert {row.split()[3] for row in rows[:2]} == {"ada", "bob"}


def test_a_parent_outside_the_limits_is_refused_as_the_library_does(sqlite: Database) -> None:
    status, text = refused("status", "order:1", "--source", "http", "--scope", "", database=sqlite)

    assert status == 1
    assert "scope '': may be empty only for source 'app'" in text


NEVER_LOADED = {
    *("alembic", "outbox.migrations", "mako"),
    *(
        "dispatchers.process",
        "dispatchers.pipeline",
        "dispatchers.adapters",
        "dispatchers.dashboard",
        "dispatchers.telemetry",
    ),
    *(
        "dispatchers.store.database",
        "dispatchers.callbacks",
        "httpx",
        "pydantic",
        "starlette",
        "opentelemetry",
        "greenlet",
    ),
    *("sqlalchemy.ext.asyncio", "sqlalchemy.dialects.mysql"),
}
"""What `status` has no use for. It would add to a command that monitoring and people run often."""


def test_status_loads_only_what_it_uses(postgresql: Database) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr));"
        " from dispatchers.cli import main; main(['status'])"
    )
    url = postgresql.url.render_as_string(hide_password=False)
    variables = {**os.environ, "DATABASE_URL": url}

    ran = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)

    loaded = set(ran.stderr.split())
    assert "dispatchers.admin.read.overview" in loaded
    assert NEVER_LOADED & loaded == set()
