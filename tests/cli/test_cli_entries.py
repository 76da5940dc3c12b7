"""`outbox status` and `list`: what they show, in JSON and on a terminal."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import (
    block,
    command,
    document,
    error_of,
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
from dispatchers.admin import overview
from outbox.sql.dialect import clock, clock_plus

OUTBOX_ENV = "test"


def ids(page: Any) -> list[UUID]:
    return [UUID(entry["id"]) for entry in page["entries"]]


# --- status


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
    monkeypatch.setattr(overview, "UNSERVED_MAX", 20)
    monkeypatch.setattr(overview, "MARKED_READ_MAX", 10)

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


# --- list


def test_the_list_is_of_what_waits_the_longest_due_first(database: Database, ob: outbox.Outbox) -> None:
    put_ended(database, ob)
    first = put_one(database, ob, "c.send")
    age(database, HOUR)
    second = put_one(database, ob, "b.send")
    age(database, HOUR)
    last = put_uncertain(database, ob)
    third = put_one(database, ob, "a.send")

    page = document("list", database=database)

    assert ids(page) == [first, second, third, last]
    assert page["next"] is None
    assert page["entries"][3]["due_at"] is None


def test_a_page_names_the_start_of_the_next_and_no_entry_is_lost(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=4)  # all due at the same instant
    put(database, ob, "mail.send", count=3)
    put_uncertain(database, ob)
    whole = ids(document("list", database=database))

    seen: list[UUID] = []
    after: list[str] = []
    for _ in range(4):
        page = document("list", "--limit", "2", *after, database=database)
        seen += ids(page)
        after = ["--after", page["next"]]

    assert page["next"] is None
    assert seen == whole
    assert len(set(seen)) == 8


def test_what_ended_is_listed_by_its_end_the_newest_first(database: Database, ob: outbox.Outbox) -> None:
    old = [put_ended(database, ob) for _ in range(3)]
    failed = put_ended(database, ob, good=False)

    both = document("list", "--state", "delivered", "--state", "failed", database=database)
    first = document("list", "--state", "delivered", "--limit", "2", database=database)
    second = document("list", "--state", "delivered", "--limit", "2", "--after", first["next"], database=database)

    assert ids(both) == [failed, *reversed(old)]
    assert ids(first) + ids(second) == [*reversed(old)]
    assert both["entries"][0]["reason"] == "status 422: no such customer"
    assert second["next"] is None


def test_what_ended_long_ago_is_listed_only_when_asked_for(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob)
    database.execute(sa.update(TABLES.settlement).values(settled_at=clock_plus(-timedelta(days=3))))

    printed = succeeded("list", "--state", "delivered", database=database)

    assert re.fullmatch(r"none ended since \S+Z; --since 30d lists older ones\n", printed)
    assert ids(document("list", "--state", "delivered", "--since", "4d", database=database)) == [id]
    assert ids(document("list", "--state", "delivered", "--since", "2020-01-01", database=database)) == [id]
    parent = ("--parent", "order:0", "--env", "test")
    assert ids(document("list", "--state", "delivered", *parent, database=database)) == [id]


def test_the_list_is_narrowed_by_each_filter(database: Database, ob: outbox.Outbox) -> None:
    create = put_one(database, ob, "stripe.refunds.create", parent="order:a")
    other = put_one(database, ob, "stripe.refunds_archive.create", parent="order:b")
    elsewhere = put_one(database, ob, "stripe.customers.update", destination="stripe-eu", parent="order:a")
    uncertain = put_uncertain(database, ob)
    suspended = put_suspended(database, ob)
    later = put_one(database, ob, "mail.send", due=HOUR)

    def listed(*filters: str) -> set[UUID]:
        return set(ids(document("list", *filters, database=database, OUTBOX_ENV=OUTBOX_ENV)))

    assert listed("--operation", "stripe") == {create, other, elsewhere}
    assert listed("--operation", "stripe.refunds") == {create}
    assert listed("--operation", "stripe.refunds.create") == {create}
    assert listed("--destination", "stripe") == {create, other}
    assert listed("--destination", "stripe-eu", "--operation", "stripe") == {elsewhere}
    assert listed("--parent", "order:a") == {create, elsewhere}
    assert listed("--parent", "order:a", "--scope", "acct_1", "--source", "http") == set()
    assert listed("--state", "uncertain") == {uncertain}
    assert listed("--state", "uncertain", "--state", "pending") == {
        create,
        other,
        elsewhere,
        uncertain,
        suspended,
        later,
    }
    assert listed("--suspended") == {suspended}
    assert listed("--since", (datetime.now(UTC) + HOUR / 2).isoformat()) == {uncertain, suspended, later}


def test_the_list_is_narrowed_by_env_scope_and_source_without_a_parent(database: Database, ob: outbox.Outbox) -> None:
    other = outbox.Outbox(ob.configuration.keyring, env="staging")
    ours, theirs = put_one(database, ob), put_one(database, other)
    scoped = put_one(database, ob, parent=outbox.ParentKey("order:9", scope="ada", source="http"))

    def listed(*arguments: str, **environment: str) -> set[UUID]:
        return set(ids(document("list", *arguments, database=database, **environment)))

    assert listed("--env", "staging") == {theirs}
    assert listed("--env", "test", "--scope", "") == {ours}
    assert listed("--scope", "ada") == listed("--source", "http") == {scoped}
    assert listed(OUTBOX_ENV="test") == {ours, theirs, scoped}, "the variable hides nothing"
    for printed in (succeeded("list", database=database), succeeded("list", "--env", "test", database=database)):
        has_env = "staging" in printed
        assert ("ENV" in printed.splitlines()[0].split()) is has_env


def test_what_ended_is_narrowed_by_destination_and_operation(database: Database, ob: outbox.Outbox) -> None:
    here = put_ended(database, ob)
    there = put_ended(database, ob, destination="stripe-eu")

    for filters, expected in {("--destination", "stripe"): [here], ("--operation", "stripe"): [there, here]}.items():
        assert ids(document("list", "--state", "delivered", *filters, database=database)) == expected


def test_the_list_for_people_says_when_and_why(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob)
    put_uncertain(database, ob)
    put_suspended(database, ob)
    lease = {"state": "sending", "lease_token": UUID(int=1), "leased_at": clock(), "lease_until": clock_plus(LEASE)}
    change(database, put_one(database, ob, "mail.send"), **lease)
    put(database, ob, "mail.send", due=HOUR)
    age(database, HOUR / 2)

    printed = succeeded("list", database=database).splitlines()

    assert printed[0].split() == ["ID", "STATE", "OPERATION", "PARENT", "DUE", "REASON"]
    assert [" ".join(line.split()[1:]) for line in sorted(printed[1:], key=lambda line: line.split()[3])] == [
        "pending crm.upsert order:0 30m ago",
        "uncertain mail.send order:1 - no answer within 30 s",
        "pending mail.send order:2 - suspended: restored from a backup",
        "sending mail.send order:3 expired 29m ago",
        "pending mail.send order:4 in 29m",
    ]


def test_an_empty_list_says_so(database: Database) -> None:
    assert succeeded("list", database=database) == "none\n"
    assert re.fullmatch(r"none due since \S+Z\n", succeeded("list", "--since", "1h", database=database))
    assert document("list", database=database)["entries"] == []


@pytest.mark.parametrize("field", ["operation", "destination"])
def test_a_name_that_there_cannot_be_is_refused_as_the_library_does(database: Database, field: str) -> None:
    printed = error_of("list", f"--{field}", "\udcff", database=database)

    assert printed == (1, "refused", rf"{field} '\udcff': contains a lone surrogate, which UTF-8 cannot encode")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--state", "failed", "--state", "retry"),
            "one list cannot mix unfinished and finished entries: list failed separately",
        ),
        (("--state", "failed", "--suspended"), "--suspended lists unfinished entries only: failed is a finished state"),
        (("--state", "dead"), "'dead' is not one of"),
        (("--since", "yesterday"), "'yesterday' is neither a span such as 15m, 2h or 7d nor an instant such as"),
        (("--since", "999999w"), "is neither a span"),
        (("--after", "here"), "'here' is not a cursor: pass the one that the previous page printed"),
        (("--limit", "1001"), "1001 is not in the range 1<=x<=1000"),
    ],
)
def test_a_list_that_cannot_be_is_refused(sqlite: Database, arguments: tuple[str, ...], says: str) -> None:
    status, text = refused("list", *arguments, database=sqlite)

    assert status == 2
    assert says in " ".join(text.split())
