"""`outbox list`: what it shows, in JSON and on a terminal."""

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import document, error_of, ids, put_ended, put_suspended, put_uncertain, refused, succeeded
from support.database import TABLES, Database
from support.entries import HOUR, LEASE, age, change, put, put_one

import outbox
from dispatchers.cli import entries
from outbox.sql.clock import clock, clock_plus

OUTBOX_ENV = "test"


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

    assert re.fullmatch(
        r"no finished entry with --state delivered ended since \S+Z; --since 30d lists older ones\n", printed
    )
    assert ids(document("list", "--state", "delivered", "--since", "4d", database=database)) == [id]
    assert " 3d ago" in succeeded("list", "--state", "delivered", "--since", "4d", database=database)
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


def test_an_empty_list_names_the_filter(database: Database) -> None:
    def printed(*options: str) -> str:
        return " ".join(succeeded("list", *options, database=database).split())

    assert printed() == "no unfinished entry; for finished ones: --state delivered, failed or cancelled"
    assert printed("--state", "uncertain", "--state", "retry", "--parent", "order 1", "--suspended") == (
        "no unfinished entry with --state uncertain --state retry --parent 'order 1' --suspended"
    )
    assert printed("--enqueued-since", "2h") == "no unfinished entry with --enqueued-since 2h"
    assert re.fullmatch(r"no unfinished entry became due since \S+Z", printed("--since", "1h"))
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


def test_a_list_compares_only_so_many_entries_and_says_where_it_continues(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database, ob, count=60)
    put(database, ob, "mail.send")
    monkeypatch.setattr(entries, "MAX_ROWS", 55)
    asked = ("list", "--operation", "mail", "--limit", "5")

    page, shown = document(*asked, database=database), succeeded(*asked, database=database)
    assert page["entries"] == []
    assert "none among the entries compared so far; --after" in " ".join(shown.split())
    while not page["entries"]:
        page = document(*asked, "--after", page["next"], database=database)

    assert [each["operation"] for each in page["entries"]] == ["mail.send"]
