"""Reading the state of many destinations takes as many statements as that of few."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database, statements_of
from support.entries import HOUR, age, put_one, run_once

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.overview import read_overview, read_unserved
from dispatchers.store.records.gauges import read_gauges
from dispatchers.store.records.queries import read_lags
from outbox.sql.clock import database_now

READS: dict[str, Callable[[sa.Connection], object]] = {
    "overview": lambda connection: read_overview(connection, TABLES),
    "destinations": lambda connection: read_destinations(connection, TABLES),
    "unserved": lambda connection: read_unserved(connection, TABLES, database_now(connection)),
    "lags": lambda connection: read_lags(connection, TABLES, database_now(connection)),
    "gauges": lambda connection: read_gauges(connection, TABLES),
}


@pytest.mark.parametrize("read", READS)
def test_many_destinations_take_no_more_statements_than_few(postgresql: Database, ob: outbox.Outbox, read: str) -> None:
    counts = []
    for destinations in (range(4), range(4, 30)):
        for number in destinations:
            put_one(postgresql, ob, f"service{number}.upsert")
        with postgresql.engine.connect() as connection, statements_of(postgresql.engine) as statements:
            READS[read](connection)
        counts.append(len(statements))

    assert counts[0] == counts[1]


def test_of_many_unserved_destinations_only_some_are_counted(postgresql: Database, ob: outbox.Outbox) -> None:
    for number in range(60):
        put_one(postgresql, ob, f"service{number}.upsert")
    run_once(postgresql, ob, adapters={"crm": MemoryAdapter()})
    age(postgresql, HOUR)

    with postgresql.engine.connect() as connection, statements_of(postgresql.engine) as statements:
        unserved = read_unserved(connection, TABLES, database_now(connection)) or []

    assert {each.entries for each in unserved} == {1}
    assert len(statements) < 60
