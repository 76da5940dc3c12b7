"""What each entry leaves in the memory of a dispatcher: hardly anything, because the garbage collector runs seldom there."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.sql.elements import BindParameter
from support.database import TABLES, Database
from support.entries import dispatcher, pumping
from support.ordering import OrderedService, put_in_group

import outbox
from dispatchers.flow_control.state import Limits
from outbox.sql.dialect import dialect_of

ENTRIES = 40


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def statement_parameters() -> int:
    """How many parameters of SQLAlchemy's statements live, garbage included."""
    return sum(isinstance(each, BindParameter) for each in gc.get_objects())


def growth_over_entries(database: Database, ob: outbox.Outbox, **settings: Any) -> int:
    """By how many parameters a dispatcher grows over the entries of a group, after the first ones."""
    return asyncio.run(_growth(database, ob, settings))


async def _growth(database: Database, ob: outbox.Outbox, settings: dict[str, Any]) -> int:
    service = OrderedService()
    working = dispatcher(database, ob, adapters={"crm": service}, **settings)

    async def deliver(names: list[str]) -> None:
        put_in_group(database, ob, *names)
        wanted = len(service.came["ada"]) + len(names)
        await pumping(working, lambda: len(service.came["ada"]) == wanted)

    await deliver([f"first {number}" for number in range(10)])
    gc.collect()
    before = statement_parameters()
    await deliver([f"order {number}" for number in range(ENTRIES)])
    grown = statement_parameters() - before
    await working.close()
    return grown


@pytest.mark.usefixtures("without_collector")
def test_an_entry_of_a_group_leaves_no_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    assert growth_over_entries(postgresql, ob) < ENTRIES


@pytest.mark.usefixtures("without_collector")
def test_a_claim_under_shared_limits_leaves_no_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    limits = {"crm": Limits(rate=1000.0)}

    assert growth_over_entries(postgresql, ob, limits=limits) < ENTRIES


@pytest.mark.usefixtures("without_collector")
def test_retention_leaves_no_lists_of_ids(postgresql: Database, ob: outbox.Outbox) -> None:
    with postgresql.engine.connect() as connection:
        delete = dialect_of(connection).delete
        delete(connection, TABLES.entry.c.id, [uuid4()])  # SQLAlchemy keeps the first statement of each kind
        before = statement_parameters()

        delete(connection, TABLES.entry.c.id, [uuid4()] * 1000)

        assert statement_parameters() == before
