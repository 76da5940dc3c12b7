"""A transaction of the store that the server ends in favour of another one is run again, on PostgreSQL, MariaDB and MySQL."""

from typing import Any

import pytest
import sqlalchemy as sa
from support.concurrency import retold
from support.database import Database
from support.entries import put_one, run_once, states

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.connections.transactions import DEADLOCK_TRIES

DEADLOCKS = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01'; END $$",
    "mariadb": "BEGIN NOT ATOMIC SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END",
    "mysql": "CALL deadlock()",
}
PROCEDURE = "CREATE PROCEDURE IF NOT EXISTS deadlock() SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"
"""MySQL signals in stored programs only."""


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    database: Database = request.getfixturevalue(request.param)
    if database.server == "mysql":
        database.execute(sa.text(PROCEDURE))
    return database


def deadlocks(database: Database, first: int, times: int) -> tuple[list[str], Any]:
    """Statements on our tables from the number `first` on fail, so many; a statement of a later try counts too."""
    sent: list[str] = []
    deadlock = DEADLOCKS[database.server]

    def execute(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        if "outbox_" not in statement:
            return statement, parameters
        sent.append(statement)
        return (deadlock, ()) if first <= len(sent) < first + times else (statement, parameters)

    return sent, retold(database.dispatchers_engine, execute)


@pytest.mark.parametrize("times", [1, DEADLOCK_TRIES - 1])
def test_run_once_survives_a_deadlock_at_any_statement(server: Database, ob: outbox.Outbox, times: int) -> None:
    number, statements = 0, 1000
    while number < statements:
        number += 1
        put_one(server, ob, ordering_key="ada", discriminator=str(number))
        sent, failing = deadlocks(server, number, times)
        with failing:
            assert run_once(server, ob, adapters={"crm": MemoryAdapter()}) == 1
        statements = len(sent) - times if number == 1 else statements

    assert number > 10
    assert states(server) == {"delivered": number}


def test_run_once_raises_a_deadlock_that_does_not_end(server: Database, ob: outbox.Outbox) -> None:
    put_one(server, ob)
    _, failing = deadlocks(server, 1, 1000)

    with failing, pytest.raises(sa.exc.DBAPIError):
        run_once(server, ob, adapters={"crm": MemoryAdapter()})

    assert states(server) == {"pending": 1}
