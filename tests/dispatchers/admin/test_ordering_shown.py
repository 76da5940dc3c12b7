"""What `outbox status`, `list` and `show` report of groups, and what their release does."""

from support.cli_runner import document, succeeded
from support.database import Database
from support.entries import queue_row
from support.ordering import BUSY, OrderedService, put_in_group, send_all, states_of

import outbox
from dispatchers import Rejected


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
