"""An ordering group that no transaction has advanced continues at the next sweep, and after one command."""

import asyncio
import logging
from uuid import UUID

import pytest
from support.database import TABLES, Database
from support.entries import change, put_one, queue_row, run_once
from support.ordering import put_in_group
from support.verify import broken_rules

import outbox
from dispatchers import Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import stuck_groups
from outbox.times import NEVER

pytestmark = pytest.mark.on_mariadb


def stick(database: Database, ob: outbox.Outbox, group: str = "ada") -> list[UUID]:
    """A group of two whose first entry is blocked by nothing, as after a transaction that has not advanced it."""
    ids = put_in_group(database, ob, f"{group} 1", f"{group} 2", group=group)
    for id in ids:
        change(database, id, due_at=NEVER)
    return ids


def test_a_running_dispatcher_frees_it_and_says_so(
    database: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    stick(database, ob)
    assert "becomes due" in broken_rules(database)

    with caplog.at_level(logging.ERROR):
        assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 2

    assert any("ordering group 'ada' was stuck" in message for message in caplog.messages)


def test_it_frees_no_group_that_is_blocked_and_none_that_is_in_order(database: Database, ob: outbox.Outbox) -> None:
    blocked = put_in_group(database, ob, "eve 1", "eve 2", group="eve")
    run_once(database, ob, adapters={"crm": MemoryAdapter(lambda delivery: Rejected("no"))})
    put_in_group(database, ob, "bob 1", "bob 2", group="bob")
    put_one(database, ob)
    suspended = put_in_group(database, ob, "joe 1", group="joe")
    change(database, suspended[0], due_at=NEVER, suspended_reason="its row cannot be read")
    before = database.queue

    asyncio.run(DatabaseStore(database.engine, ob.configuration).survey())

    assert queue_row(database, blocked[1]).due_at == NEVER
    assert database.queue == before


def test_each_sweep_looks_at_some_groups_until_all_were_looked_at(
    database: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck_groups, "MAX_GROUPS", 2)
    firsts = [stick(database, ob, f"g{number}")[0] for number in range(5)]
    store = DatabaseStore(database.engine, ob.configuration)
    freed = []

    for _ in range(4):
        asyncio.run(store.survey())
        freed.append(sum(queue_row(database, id).due_at != NEVER for id in firsts))
    change(database, firsts[0], due_at=NEVER)
    asyncio.run(store.survey())

    assert freed == [2, 4, 5, 5]
    assert queue_row(database, firsts[0]).due_at == NEVER, "the fourth sweep looked at it already"


@pytest.mark.parametrize("command", ["release", "retry"])
def test_one_command_frees_it(database: Database, ob: outbox.Outbox, command: str) -> None:
    first, second = stick(database, ob)

    with database.owner() as connection:
        if command == "release":
            decisions.release_group(connection, TABLES, "ada", actor="eve", reason="seen by an operator")
        else:
            decisions.retry(connection, TABLES, first, actor="eve", reason="seen by an operator")

    assert queue_row(database, first).due_at != NEVER
    assert queue_row(database, second).due_at == NEVER
    assert broken_rules(database) == {}


def test_what_the_commands_say_of_other_groups_is_true(database: Database, ob: outbox.Outbox) -> None:
    first, second = put_in_group(database, ob, "1", "2")
    change(database, second, due_at=NEVER)

    with database.owner() as connection:
        with pytest.raises(EntryNotFound, match="'ada' is not blocked: nothing has to be released"):
            decisions.release_group(connection, TABLES, "ada", actor="eve", reason="seen by an operator")
        with pytest.raises(DecisionRefused, match="blocked by an earlier entry of its ordering group"):
            decisions.retry(connection, TABLES, second, actor="eve", reason="seen by an operator")

    assert queue_row(database, first).due_at != NEVER
