"""Which entries a filter selects, and how a list of them is paged."""

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import put_ended, put_suspended, put_uncertain
from support.database import TABLES, Database
from support.entries import HOUR, age, change, put, put_one, run_once

import outbox
from dispatchers import Deferred, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.entries import list_entries
from dispatchers.admin.read.entry_filter import ENDED_STATES, Filter, ParentWanted, check_filter, select_ids
from dispatchers.admin.read.payload_filter import Member
from dispatchers.admin.read.plain_values import Place
from outbox.errors import InvalidValue
from outbox.sql.clock import clock_plus, database_now
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb


def listed(database: Database, max_entries: int = 50, **wanted: Any) -> list[UUID]:
    with database.engine.begin() as connection:
        page = list_entries(connection, TABLES, Filter(**wanted), max_entries=max_entries)
    return [entry.id for entry in page.entries]


def selected(database: Database, **wanted: Any) -> set[UUID]:
    with database.engine.begin() as connection:
        return set(connection.execute(select_ids(TABLES, Filter(**wanted), database_now(connection))).scalars())


@pytest.mark.every_value
@pytest.mark.parametrize(
    "wanted",
    [
        {"operation": "mail"},
        {"operation": "mail.send"},
        {"destination": "mail"},
        {"parent": ParentWanted("order:1")},
        {"parent": ParentWanted("order:1", "test", "", "app")},
        {"parent_prefix": "ord", "operation": "mail"},
        {"payload": (Member("card", "4242424242424242"),), "operation": "mail"},
        {"ordering_key": "customer:7"},
        {"reason": "within 30"},
        {"states": ["uncertain"]},
        {"states": ["uncertain"], "operation": "mail", "reason": "no answer", "ordering_key": "customer:7"},
    ],
)
def test_a_filter_selects_what_meets_every_condition(
    database: Database, ob: outbox.Outbox, wanted: dict[str, Any]
) -> None:
    put(database, ob, count=1)
    mail = put_uncertain(database, ob, ordering_key="customer:7")
    put_one(database, ob, "crm.mail.send", ordering_key="customer:8")

    assert listed(database, **wanted) == [mail]
    assert selected(database, **wanted) == {mail}


@pytest.mark.every_value
@pytest.mark.parametrize(
    "wanted",
    [
        {"operation": "stripe"},
        {"destination": "stripe"},
        {"reason": "no such"},
        {"states": ["failed"]},
        {"ordering_key": "customer:7"},
        {"parent": ParentWanted(None, scope="acct_1")},
    ],
)
def test_a_filter_selects_among_what_ended(database: Database, ob: outbox.Outbox, wanted: dict[str, Any]) -> None:
    put_uncertain(database, ob)
    parent = outbox.ParentKey("order:1", scope="acct_1", source="http")
    failed = put_ended(database, ob, good=False, ordering_key="customer:7", parent=parent)
    other = put_one(database, ob)
    settle_as(database, other, "cancelled")

    assert listed(database, **{"states": ENDED_STATES} | wanted) == [failed]
    assert selected(database, **{"states": ENDED_STATES} | wanted) == {failed}


def settle_as(database: Database, id: UUID, state: str) -> None:
    database.execute(sa.delete(TABLES.queue).where(TABLES.queue.c.id == id))
    ended = {"id": id, "state": state, "deliveries": 0, "attempts": 0, "key_epoch": 0, "settled_at": clock_plus(-HOUR)}
    database.execute(sa.insert(TABLES.settlement).values(ended))


def test_a_filter_selects_by_the_time_of_the_enqueue(database: Database, ob: outbox.Outbox) -> None:
    old = put_one(database, ob)
    age(database, 2 * HOUR)
    new = put_one(database, ob)

    assert listed(database, enqueued_before=HOUR) == [old]
    assert listed(database, enqueued_since=HOUR) == [new]
    assert listed(database, enqueued_since=3 * HOUR, enqueued_before=HOUR) == [old]


@pytest.mark.every_value
@pytest.mark.parametrize("part", ['the "card"', "é", "100 % (sure)", "a\\b", "restored"])
def test_a_reason_is_searched_letter_for_letter(database: Database, ob: outbox.Outbox, part: str) -> None:
    put_one(database, ob)
    reason = put_one(database, ob)
    change(database, reason, outcome=json.dumps({"reason": f"it says: {part}!", "deliveries": 1}))
    suspended = put_suspended(database, ob)
    change(database, suspended, suspended_reason=f"restored: {part}")

    assert selected(database, reason=part) == {reason, suspended}


def test_a_reason_is_not_searched_in_what_the_service_answered(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    result = {"text": 'it says "reason": "card declined"', "deliveries": "declined"}
    outcome = {"reason": "waits", "known": {"state": "delivered", "attempts": 1, "result": result}}
    change(database, id, outcome=json.dumps(outcome))

    assert selected(database, reason="declined") == set()
    assert selected(database, reason="wait") == {id}


def test_uncertain_entries_are_listed_by_the_oldest_doubt(database: Database, ob: outbox.Outbox) -> None:
    unsent, newer, older = (put_uncertain(database, ob) for _ in range(3))
    change(database, newer, in_doubt_since=clock_plus(-HOUR))
    change(database, older, in_doubt_since=clock_plus(-2 * HOUR))
    retried = put_one(database, ob)  # in doubt, and not uncertain
    change(database, retried, state="retry", maybe_sent=True, in_doubt_since=clock_plus(-3 * HOUR))

    assert listed(database, states=["uncertain"]) == [older, newer, unsent]
    assert pages(database, Filter(states=["uncertain"]), max_entries=1) == [older, newer, unsent]
    assert pages(database, Filter(states=["uncertain"]), max_entries=1, max_rows=2) == [older, newer, unsent]


def pages(database: Database, wanted: Filter, *, max_entries: int, max_rows: int | None = None) -> list[UUID]:
    """The entries of every page."""
    found: list[UUID] = []
    after: Place[UUID] | None = None
    for _ in range(100):
        with database.engine.begin() as connection:
            page = list_entries(connection, TABLES, wanted, max_entries=max_entries, after=after, max_rows=max_rows)
        found += [entry.id for entry in page.entries]
        if page.next is None:
            return found
        after = page.next
    raise AssertionError("the list has no end")


@pytest.mark.parametrize("state", ["waiting", "ended"])
def test_a_bounded_list_has_short_pages_and_reaches_everything(
    database: Database, ob: outbox.Outbox, state: str
) -> None:
    first, _, third, *_, last = put(database, ob, count=10)
    others = [put_one(database, ob, "mail.send", parent=f"mail:{number}") for number in range(3)]
    wanted = Filter(parent=ParentWanted(None, source="app"), operation="crm", reason="slow")
    for id in (first, third, last):
        change(database, id, outcome=json.dumps({"reason": "slow"}), due_at=clock_plus(HOUR))
    if state == "ended":
        wanted = Filter(states=["failed"])
        for id in [first, third, last]:
            settle_as(database, id, "failed")
        for id in others:
            settle_as(database, id, "delivered")

    with database.engine.begin() as connection:
        page = list_entries(connection, TABLES, wanted, max_entries=10, max_rows=2)
    found = pages(database, wanted, max_entries=10, max_rows=2)

    assert len(page.entries) <= 2
    assert page.next is not None
    assert len(found) == 3
    assert set(found) == {first, third, last}


def test_a_list_is_bounded_where_nothing_has_a_due_time(database: Database, ob: outbox.Outbox) -> None:
    ids = put(database, ob, count=5)
    for id in ids:
        change(database, id, due_at=NEVER)

    assert pages(database, Filter(states=["pending"]), max_entries=2, max_rows=3) == sorted(
        ids, key=lambda id: id.bytes
    )


def test_what_ended_at_one_instant_is_on_one_page_each(database: Database, ob: outbox.Outbox) -> None:
    ids = put(database, ob, count=7)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    with database.engine.begin() as connection:
        connection.execute(TABLES.settlement.update().values(settled_at=database_now(connection) - HOUR))

    wanted = Filter(states=ENDED_STATES, operation="crm")
    assert pages(database, wanted, max_entries=1, max_rows=3) == sorted(ids, key=lambda id: id.bytes)


def test_a_filter_reads_what_has_ended_once(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=60)
    run_once(postgresql, ob, adapters={"crm": MemoryAdapter()})
    scans = sa.text("SELECT idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'outbox_settlement'")

    with postgresql.engine.begin() as connection:
        before = connection.execute(scans).scalar_one()
        page = list_entries(connection, TABLES, Filter(states=["failed"]), max_entries=10, max_rows=100)
        assert page.entries == []
        assert connection.execute(scans).scalar_one() - before < 10  # one of each part, and not one of each row


def test_a_search_in_payloads_reads_no_more_than_its_bound(postgresql: Database, ob: outbox.Outbox) -> None:
    put(postgresql, ob, count=200)
    run_once(postgresql, ob, adapters={"crm": MemoryAdapter()})
    rows = sa.text("SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'outbox_entry'")
    wanted = Filter(states=ENDED_STATES, payload=[Member("amount", "1")])

    with postgresql.engine.begin() as connection:
        before = connection.execute(rows).scalar_one()
        page = list_entries(connection, TABLES, wanted, max_entries=5, max_rows=20)
        read = connection.execute(rows).scalar_one() - before

    assert page.entries == []
    assert page.next is not None
    assert read <= 20


@pytest.mark.parametrize("states", [["uncertain", "failed"], [], ["lost"]])
def test_a_filter_has_states_of_one_kind(database: Database, states: list[str]) -> None:
    with pytest.raises(InvalidValue, match="must be some of"):
        listed(database, states=states)


def test_a_time_may_be_an_instant(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    with database.engine.begin() as connection:
        now = database_now(connection)

    assert listed(database, enqueued_before=now, since=now - timedelta(days=1)) == [id]
    assert listed(database, enqueued_since=now) == []


# --- what was sent

PAYLOAD: dict[str, Any] = {
    "campaign": "spring",
    "ünï": "grün",
    "number": 3,
    "share": 1.5,
    "yes": True,
    "no": False,
    "none": None,
    "empty": "",
    "percent": "50%_",
    "escaped": 'a"b\\c\n\u0001',
    "order": {"country": "FR", "line": {"sku": "x-1"}},
}
HAS = [
    *("campaign=spring", "ünï=grün", "number=3", "share=1.5", "yes=true", "no=false", "empty=", "percent=50%_"),
    *("order.country=FR", "order.line.sku=x-1", 'escaped=a"b\\c\n\u0001'),
]
HAS_NOT = [
    *("campaign=Spring", "campaign=sprin", "campaign=spring ", "Campaign=spring", "number=30", "number=3.0", "yes=1"),
    *(
        "none=null",
        "none=",
        "missing=",
        "missing=spring",
        "order=FR",
        "order.city=FR",
        "campaign.spring=x",
        "percent=50%a",
    ),
]


@pytest.mark.parametrize(("members", "found"), [(HAS, True), (HAS_NOT, False)], ids=["has", "has not"])
@pytest.mark.every_value
def test_each_database_finds_the_same_members_of_a_payload(
    database: Database, ob: outbox.Outbox, members: list[str], found: bool
) -> None:
    id = put_one(database, ob, payload=PAYLOAD)
    put_one(database, ob, payload=["spring"])
    put_one(database, ob, payload="spring")
    put_one(database, ob, payload={"nul": "a\0b"})

    selects = {text: selected(database, payload=(Member.parse(text),)) for text in members}

    assert selects == dict.fromkeys(members, {id} if found else set())


def test_a_parents_beginning_is_compared_letter_for_letter(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob, parent="spring_7:ada")
    put_one(database, ob, parent="springX7:ada")
    put_one(database, ob, parent="Spring_7:ada")

    assert selected(database, parent_prefix="spring_7:") == {id}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("campaign", "must be a member and its value, as in campaign=spring"),
        ("=spring", "must be a member and its value, as in campaign=spring"),
        ("a..b=1", "must be a member and its value, as in campaign=spring"),
        ('a"b=1', "has a quote or a backslash in its path, which cannot be searched for"),
        ("a=\0", "contains a NUL character or a lone surrogate, which cannot be searched for"),
        ("a=" + "x" * 1001, "has more than 1000 characters in its path or its value"),
    ],
)
def test_a_member_that_cannot_be_searched_for_is_refused(text: str, error: str) -> None:
    with pytest.raises(InvalidValue, match=error):
        Member.parse(text)


# --- Which entries a filter selects: exactly those whose reason has the text, letter for letter, on every database.


REASON = 'M\u00fcller: 50% "now" a_b c\\d\n\U0001f600'
PARTS = ("M\u00fcller", "50%", '"now"', "a_b", "c\\d", "\n", "\U0001f600")
OTHERS = ("m\u00fcller", "NOW", "00fc", "fc", "d83d", "50%a", "axb", "c.d", "\\n", "(?i)now", "***:now", "n$")


def matching(database: Database, wanted: Filter) -> int:
    with database.engine.connect() as connection:
        check_filter(connection, TABLES, wanted)
        return len(connection.execute(select_ids(TABLES, wanted, database_now(connection))).all())


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["waiting", "suspended", "failed"])
def test_a_part_of_a_reason_is_found_letter_for_letter(database: Database, ob: outbox.Outbox, kind: str) -> None:
    id = put_one(database, ob)
    if kind == "suspended":
        change(database, id, suspended_reason=REASON, due_at=NEVER)
    else:
        outcome = Deferred(REASON, after=timedelta(hours=1)) if kind == "waiting" else Rejected(REASON)
        run_once(database, ob, adapters={"crm": MemoryAdapter([outcome])})
    states = {"states": ENDED_STATES} if kind == "failed" else {}

    found = {part: matching(database, Filter(reason=part, **states)) for part in (*PARTS, *OTHERS)}

    assert found == dict.fromkeys(PARTS, 1) | dict.fromkeys(OTHERS, 0)


@pytest.mark.parametrize("part", ["", "x" * 1001, "a\0", "\udcff"])
def test_a_part_that_no_reason_has_is_refused(database: Database, part: str) -> None:
    with pytest.raises(InvalidValue, match="reason"):
        matching(database, Filter(reason=part))


def test_no_ended_entry_is_suspended(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    database.execute(sa.update(TABLES.queue).values(suspended_reason="a clone", due_at=NEVER))

    assert matching(database, Filter(suspended=True)) == 2
    with pytest.raises(InvalidValue, match="what has ended is not suspended"):
        matching(database, Filter(suspended=True, states=("failed",)))
