"""Ordering groups as operators see them: blocked by what, how many wait, and for which entry."""

import pytest
from support.cli_runner import document, succeeded
from support.database import TABLES, Database
from support.entries import queue_row
from support.ordering import BUSY, OrderedService, put_in_group, send_all, states_of

import outbox
from dispatchers import Rejected
from dispatchers.admin.read.counts import Count
from dispatchers.admin.read.groups import MAX_WAITING, list_groups, read_group

pytestmark = pytest.mark.on_mariadb


def test_a_blocked_group_names_what_blocks_it_and_counts_what_waits(database: Database, ob: outbox.Outbox) -> None:
    head, second, third = put_in_group(database, ob, "head", "second", "third")
    send_all(database, ob, OrderedService(head=Rejected("declined")))

    with database.engine.begin() as connection:
        page = list_groups(connection, TABLES, max_groups=10)
        group = read_group(connection, TABLES, "ada")

    (listed,) = page.groups
    assert (listed.ordering_key, listed.blocked_by, listed.reason) == ("ada", head, "declined")
    assert (listed.head, listed.waiting) == (second, Count(value=2, is_exact=True))
    assert page.blocked == Count(value=1, is_exact=True)
    assert group.blocking is not None
    assert (group.blocking.id, group.blocking.state) == (head, "failed")
    assert [entry.id for entry in group.first] == [second, third]


def test_a_group_that_only_waits_is_listed_among_all(database: Database, ob: outbox.Outbox) -> None:
    head, _ = put_in_group(database, ob, "head", "second")
    send_all(database, ob, OrderedService(head=BUSY))

    with database.engine.begin() as connection:
        blocked = list_groups(connection, TABLES, max_groups=10)
        every = list_groups(connection, TABLES, max_groups=10, only_blocked=False)

    assert blocked.groups == []
    (group,) = every.groups
    assert (group.head, group.head_state, group.blocked_by) == (head, "retry", None)
    assert group.waiting == Count(value=2, is_exact=True)


@pytest.mark.parametrize("only_blocked", [True, False])
def test_groups_are_paged_by_their_key(database: Database, ob: outbox.Outbox, only_blocked: bool) -> None:
    keys = [f"customer:{number}" for number in range(5)]
    for key in keys:
        put_in_group(database, ob, f"{key} head", f"{key} second", group=key)
    send_all(database, ob, OrderedService(**{f"{key} head": Rejected("declined") for key in keys}))

    listed, after = [], None
    with database.engine.begin() as connection:
        while True:
            page = list_groups(connection, TABLES, max_groups=2, after=after, only_blocked=only_blocked)
            listed += [group.ordering_key for group in page.groups]
            if page.next is None:
                break
            after = page.next

    assert listed == keys


def test_a_long_group_is_not_counted_to_its_end(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.begin() as session:
        for number in range(MAX_WAITING + 100):
            ob.enqueue(session, "crm.x", {}, parent=f"order:{number}", ordering_key="long")

    with postgresql.engine.begin() as connection:
        group = read_group(connection, TABLES, "long")

    assert not group.waiting.is_exact
    assert group.waiting.value >= MAX_WAITING


def test_a_group_of_which_nothing_waits_is_empty(database: Database) -> None:
    with database.engine.begin() as connection:
        group = read_group(connection, TABLES, "nobody")

    assert (group.blocked_by, group.head, group.first) == (None, None, [])
    assert group.waiting == Count(value=0, is_exact=True)


# --- What `outbox status`, `list` and `show` report of groups, and what their release does.


def test_list_show_and_status_name_the_entry_that_another_waits_for(database: Database, ob: outbox.Outbox) -> None:
    head, second, third = put_in_group(database, ob, "head", "second", "third")
    send_all(database, ob, OrderedService(head=BUSY))

    listed = document("list", database=database)["entries"]
    shown = document("show", str(second), database=database)
    overview = document("status", database=database)

    assert {entry["id"]: entry["blocked_by"] for entry in listed} == {
        str(head): None,
        str(second): str(head),
        str(third): str(head),
    }
    assert (shown["blocked_by"], shown["due_at"], shown["position"]) == (
        str(head),
        None,
        queue_row(database, second).position,
    )
    assert (overview["blocked"], overview["destinations"][0]["blocked"]) == (2, 2)
    assert f"blocked by {head} in its ordering group" in succeeded("list", database=database)
    assert f"{head}\n" in succeeded("show", str(third), database=database)
    assert "2 blocked by an earlier entry of their ordering group\n" in succeeded("status", database=database)
    assert f"blocked by {head} in its ordering group" in succeeded(
        "status", "third", "--env", "test", database=database
    )


def test_they_name_the_entry_that_blocks_a_group(database: Database, ob: outbox.Outbox) -> None:
    head, second = put_in_group(database, ob, "head", "second")
    service = OrderedService(head=Rejected("declined"))
    send_all(database, ob, service)

    assert document("show", str(second), database=database)["blocked_by"] == str(head)
    assert f"by {head}: declined\n" in succeeded("status", database=database)
    succeeded("release", "--ordering-key", "ada", "--actor", "bob", "--reason", "the customer left", database=database)
    send_all(database, ob, service)

    assert states_of(database, [head, second]) == ["failed", "delivered"]
    events = document("show", str(head), database=database)["events"]
    assert (events[-1]["actor"], events[-1]["reason"]) == ("bob", "the customer left")
